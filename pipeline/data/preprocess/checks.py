"""Everything that may end preprocessing at its start, for the stage itself and for previews. Writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.common.problems import Problems, StartCheck
from pipeline.config.root import Config
from pipeline.data.curate.results.apply import AppliedCuration, applied_curations
from pipeline.data.datasets.files import PLAN_FILE, TRAIN
from pipeline.data.datasets.open import dataset_place, has_dataset, open_dataset
from pipeline.data.packing.pack_pass import PackPass
from pipeline.data.preprocess.make_tokenizer import check_kept_tokenizer
from pipeline.data.preprocess.run_tokenizer import (
    has_run_tokenizer,
    keeps_from_growing,
    named_tokenizer,
    run_tokenizer,
)
from pipeline.data.preprocess.source_plan import ADD_APART, is_planned, make_plan
from pipeline.data.preprocess.split_counts import known_splits, unknown_splits
from pipeline.data.sources.templates.chat_template import ChatTemplate
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.data.work.frozen_plan import has_units
from pipeline.data.work.units import SourceFiles, check_files, reading


@dataclass(frozen=True)
class PreprocessScope:
    """A preprocessing that is about to start.

    Attributes:
        config: the run.
        sources: those whose files were found.
        curation_comes: curation runs before it, so decisions need not be there yet.
    """

    config: Config
    sources: list[SourceFiles]
    curation_comes: bool = False

    @cached_property
    def curations(self) -> dict[str, AppliedCuration]:
        """Decisions that documents follow, by source; models are opened for them.

        Raises:
            UserError: as `applied_curations`.
        """
        return applied_curations(self.config, self.sources)


def _data_dir(scope: PreprocessScope, found: Problems) -> None:
    folder = scope.config.data_dir
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            within = "" if path == folder else f"{folder}: "
            raise UserError(f"data.dir {within}{path} is a file; set data.dir to a folder")


def _growth(scope: PreprocessScope, found: Problems) -> None:
    """Sources that files cannot be added to."""
    for source in scope.sources:
        reason = keeps_from_growing(scope.config, held_out=source.held_out)
        if source.grows and reason is not None:
            key, why = reason
            found.problem(
                f"--grow: source {source.source.name!r} has {counted(len(source.generations[-1]), 'added file')}, "
                f"which cannot be appended with {key}: {why}. {ADD_APART}; curate that one first, if it is to be"
            )


def _new(scope: PreprocessScope) -> Iterator[tuple[SourceFiles, bool]]:
    """The files that are read of each source, with True if no plan has them yet."""
    for source in scope.sources:
        if source.grows:
            yield source.generation(-1), True
        else:
            begun = has_units(scope.config.data_dir / source.source.name)
            yield source, not begun and not is_planned(scope.config, source)


def _chat_templates(scope: PreprocessScope, found: Problems) -> None:
    """Templates of conversations, on fixed ones."""
    for source in scope.sources:
        template = source.reader.template
        if isinstance(template, ChatTemplate):
            with found.collecting():
                template.check(source.source.name)


def _tokenizer(scope: PreprocessScope, found: Problems) -> None:
    """The tokenizer of the run file, beside the one that is kept, and datasets made elsewhere."""
    config = scope.config
    with reading(config, []):
        check_kept_tokenizer(config, scope.sources)
        tokenizer = known_tokenizer(config)
    if tokenizer is not None:
        check_adopted(config, tokenizer, found)


def _files_are_missing(scope: PreprocessScope) -> str:
    """Reason why a trained tokenizer cannot be compared: it is one of the files of all sources."""
    named = [each.name for each in scope.config.data.sources if each.dataset is None]
    lost = set(named) - {each.source.name for each in scope.sources}
    trains = scope.config.tokenizer.train is not None
    return f"it depends on the files of {', '.join(sorted(lost))}" if trains and lost else ""


def _decisions(scope: PreprocessScope, found: Problems) -> None:
    """Decisions of the curation, which raise where they are not those of the run file."""
    _ = scope.curations


def _plans(scope: PreprocessScope, found: Problems) -> None:
    """Datasets that were begun with other settings or files."""
    config = scope.config
    with reading(config, []):
        tokenizer = known_tokenizer(config)
    begun = [each for each in scope.sources if (config.data_dir / each.source.name / PLAN_FILE).exists()]
    if tokenizer is None or not begun:
        return
    for source in begun:
        folder, curation = config.data_dir / source.source.name, scope.curations.get(source.source.name)
        # Where documents would have to be counted, files or data.splits differ, and the ends do not matter.
        splits = known_splits(config, source, curation) or unknown_splits(config)
        plan = make_plan(source, tokenizer, config, splits, curation)
        with found.collecting():
            differences = plan.differences(folder)
            if differences and has_units(folder) and not (source.grows and plan.can_grow and plan.extends(folder)):
                raise plan.refusal(folder, differences)


def _curation_comes(scope: PreprocessScope) -> str:
    curate = scope.config.data.curate
    waits = scope.curation_comes and curate is not None and curate.mode == "apply"
    return "curation comes first and makes them" if waits else ""


PREPROCESS_CHECKS: tuple[StartCheck[PreprocessScope], ...] = (
    StartCheck("data folder", _data_dir, is_first=True),
    StartCheck("added files", _growth),
    StartCheck("files of sources", lambda scope, found: check_files(scope.config, _new(scope), found)),
    StartCheck("chat templates", _chat_templates),
    StartCheck("tokenizer", _tokenizer, _files_are_missing),
    StartCheck("decisions of the curation", _decisions, _curation_comes),
    StartCheck("plans of datasets", _plans, _curation_comes),
)


def known_tokenizer(config: Config) -> Tokenizer | None:
    """The tokenizer of the run, if there is one by now."""
    if has_run_tokenizer(config):
        return run_tokenizer(config)
    return None if config.tokenizer.path is None else named_tokenizer(config)


def check_adopted(config: Config, tokenizer: Tokenizer, found: Problems) -> None:
    """Datasets made elsewhere: they must be there, with the run's tokenizer, and with their packs if it needs any."""
    for at, source in config.data.inputs.items():
        if source.dataset is None:
            continue
        place = dataset_place(config, source, TRAIN)
        key, split = f"{at}.dataset", str(place).rpartition("/")[2]
        with found.collecting():
            if not has_dataset(config, place):
                raise UserError(
                    f"{key}: {source.dataset} has no folder {split}/; name the folder that has {split}/ in it"
                )
            dataset = open_dataset(config, place)
            folder, info = dataset.folder, dataset.manifest.tokenizer
            if info.fingerprint != tokenizer.fingerprint:
                raise UserError(
                    f"{key}: {place} was made with another tokenizer ({info.vocab_size} entries, fingerprint "
                    f"{info.fingerprint}) than this run's ({tokenizer.vocab_size} entries, {tokenizer.fingerprint}); "
                    f"set tokenizer.path: {folder / 'tokenizer.json'}, or make the dataset again with this run's "
                    "tokenizer"
                )
    with found.collecting():
        for problem in PackPass(config).adopted_problems():
            found.problem(problem)
