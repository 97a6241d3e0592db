"""A run opened to ask where its data came from and when it is seen: the plan, the datasets, how far it has come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import orjson

from pipeline.common.console import echo
from pipeline.common.errors import UserError
from pipeline.common.format import counted, numbered
from pipeline.common.paths import StrPath
from pipeline.common.run_files import RunFiles
from pipeline.config.load import load_run
from pipeline.config.objective import objective_kind
from pipeline.config.root import Config
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.files import TRAIN
from pipeline.data.datasets.open import begun_fingerprint, open_datasets
from pipeline.data.loading.arranged_packs import arranged_pack
from pipeline.data.loading.objectives.base import Arranged, Objective, sample_key
from pipeline.data.loading.objectives.choice import make_objectives
from pipeline.data.loading.skip_masks import arranged_window
from pipeline.data.order.journal import Journal
from pipeline.data.order.journal_file import read_journal
from pipeline.data.order.packs import instances_of
from pipeline.data.order.phases import plan_journal
from pipeline.data.order.run_length import RunLength, run_length
from pipeline.data.order.sampler import Sampler
from pipeline.data.order.segments import Skip
from pipeline.data.order.windows import Instances, Span
from pipeline.data.provenance.adopted_location import AdoptedOrigins, known_id, open_origins
from pipeline.data.provenance.source_location import Origin, Origins
from pipeline.data.sources.records import printable
from pipeline.data.tokenization.tokenizer import Tokenizer

_SHOWN_CHARACTERS = 60
_SHOWN_LINES = 50
_ID_CHARACTERS = 200

Range = tuple[int, int]
"""Tokens [first, end) of a document."""
Say = Callable[[str], None]


def targets_in(span: Span, place: int, count: int, shifts: bool | None) -> Range:
    """The targets of a piece of a document: the first token of a window is an input only, or the last no part of it.

    Args:
        span: the piece.
        place: its number in the sample.
        count: pieces of the sample.
        shifts: which of the two, see `Objective.shifts`; None for a pack, all tokens of which are targets.
    """
    if shifts is None:
        return span.start, span.start + span.length
    first, last = (place == 0, 0) if shifts else (0, place == count - 1)
    return span.start + first, span.start + span.length - last


class DocumentInfo(NamedTuple):
    """A document: its number in the dataset, where it came from, and its id if that is known."""

    document: int
    tokens: int
    """With the end-of-document token."""
    unit: int | None
    row: int | None
    """In the unit."""
    id: str | None
    id_hash: int | None
    origin: Origin | None
    """None where nothing beside the dataset tells."""
    damage: str = ""
    """Why its `.prov` record cannot be read, so that nothing but number and tokens is known."""

    @property
    def json(self) -> dict[str, Any]:
        """For `--json`."""
        value = {"document": self.document, "length": self.tokens, "unit": self.unit, "row": self.row, "id": self.id}
        value["id_hash"] = None if self.id_hash is None else f"{self.id_hash:016x}"
        return value | ({"file": None} if self.origin is None else self.origin.json)

    def __str__(self) -> str:
        if self.damage:
            return "origin unknown"
        id = f"xxh3:{self.id_hash:016x}" if self.id is None else printable(shortened(self.id, _ID_CHARACTERS))
        return f"{printable(str(self.origin))}, id {id}" if self.origin else f"id {id}"


@dataclass
class RunView:
    """A run to ask.

    Attributes:
        config: its run file.
        folder: its folder.
        journal: what it has trained by, and what its next start will go on with.
        warnings: what is to be known before any result is read.
        about: what else is to be said of the journal with any result.
        datasets: training split of each source.
        instances: the windows or packs at positions, for each segment by source.
        sampler: the order of the run.
        done: steps trained so far.
        trained: the run by its journal alone, if the run file plans steps after the newest checkpoint in another way
            than they were trained.
    """

    config: Config
    folder: Path
    journal: Journal
    warnings: Sequence[str]
    about: Sequence[str]
    datasets: Mapping[str, Dataset]
    instances: Sequence[Mapping[str, Instances]]
    sampler: Sampler
    done: int
    trained: RunView | None = None

    @cached_property
    def length(self) -> RunLength:
        """Steps of the whole run, and what ends it."""
        return run_length(self.config, self.sampler)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.length.steps

    @cached_property
    def objectives(self) -> Sequence[Mapping[str, Objective]]:
        """Objectives of the run, for each segment by source."""
        return make_objectives(self.config, self.journal, self.datasets)

    def shifts(self, segment: int, source: str) -> bool | None:
        """The `shifts` of samples of a source, see `targets_in`."""
        return None if self.instances[segment][source].packed else self.objectives[segment][source].shifts

    def arranged(self, segment: int, source: str, epoch: int, position: int, sample: int) -> Arranged:
        """A sample as the model gets it, but for skips.

        Args:
            segment: its number.
            source: of the sample.
            epoch: of the sample.
            position: of the sample.
            sample: global index.
        """
        objective, instances = self.objectives[segment][source], self.instances[segment][source]
        if not instances.packed:
            return arranged_window(objective, instances, epoch, position, self.journal.seed, sample)
        return arranged_pack(
            objective,
            instances,
            epoch,
            position,
            length=self.journal.segments[segment].sequence_length,
            end_of_document=self.datasets[source].manifest.tokenizer.end_of_document,
            key=sample_key(self.journal.seed, sample),
        )

    @property
    def notes(self) -> list[str]:
        """Notes that go with any result."""
        notes = [*self.about]
        types = {objective.type for _, objective in self.config.objectives()}
        for type in sorted(types):
            if note := objective_kind(type).note:
                notes.append(f"train.objective.type: {type}: {note}")
        # Others have no such target: what they predict they choose themselves.
        if self.config.train.loss.mask_document_start and any(objective_kind(type).masks_start for type in types):
            notes.append("train.loss.mask_document_start: token 0 of each document has no weight")
        return notes

    def dataset(self, source: str) -> Dataset:
        """The training split of a source.

        Raises:
            UserError: the run has no such source.
        """
        if source not in self.datasets:
            raise UserError(f"--source: {source!r} is not one of the run's sources ({', '.join(self.datasets)})")
        return self.datasets[source]

    def origins(self, source: str) -> Origins | AdoptedOrigins | None:
        """Origins of the documents of a source."""
        return self._origins(source)

    @cached_property
    def _origins(self) -> Callable[[str], Origins | AdoptedOrigins | None]:
        return lru_cache(maxsize=None)(
            lambda source: open_origins(self.datasets[source].folder, self.datasets[source].manifest)
        )

    @cached_property
    def _tokenizer(self) -> Callable[[str], Tokenizer]:
        # Sources have one tokenizer, mostly, and opening a large one takes half a second.
        folders = {one.manifest.tokenizer.fingerprint: one.folder for one in self.datasets.values()}
        opened = lru_cache(maxsize=None)(lambda fingerprint: Tokenizer.open(folders[fingerprint]))
        return lambda source: opened(self.datasets[source].manifest.tokenizer.fingerprint)

    def describe(self, source: str, documents: Iterable[int], ids: bool, say: Say) -> dict[int, DocumentInfo]:
        """Descriptions of documents, by their number in the source's dataset.

        Args:
            source: of all of them.
            documents: their numbers, each once.
            ids: read ids from the source files where they are not known without.
            say: called with what is about to be read.
        """
        dataset, origins = self.datasets[source], self.origins(source)
        records, damage = {}, {}
        for document in documents:
            try:
                records[document] = dataset.provenance(document)
            except UserError as error:
                damage[document] = str(error)
        keys = {document: (unit, row) for document, (unit, row, _, _) in records.items()}
        places = origins.places(keys.values(), report=say) if origins else {}
        known = {
            document: self._id(source, document, places.get(key), records[document][3])
            for document, key in keys.items()
        }
        unknown = [document for document, id in known.items() if id is None]
        if ids and origins and unknown:
            read = origins.places([keys[document] for document in unknown], read=True, report=say)
            places |= read
            for document in unknown:
                known[document] = self._id(source, document, read[keys[document]], records[document][3])
        described = {}
        for document in [*records, *damage]:
            tokens = dataset.document_start(document + 1) - dataset.document_start(document)
            unit, row, _, id_hash = records.get(document, (None, None, None, None))
            place = None if unit is None or row is None else places.get((unit, row))
            described[document] = DocumentInfo(
                document, tokens, unit, row, known.get(document), id_hash, place, damage.get(document, "")
            )
        return described

    def _id(self, source: str, document: int, place: Origin | None, id_hash: int) -> str | None:
        """The id that has this hash: what the place or the kept metadata say."""
        return known_id(self.datasets[source], self.origins(source), document, place, id_hash)

    def words(self, source: str, about: DocumentInfo, tokens: Range) -> str:
        """The beginning of some tokens of a document as text."""
        dataset, (start, end) = self.datasets[source], tokens
        # The token that closes the document is left out where there is something else to see.
        count = min(end, max(about.tokens - 1, start + 1)) - start
        # Four tokens a character is the most, one for each byte of it; mostly it is less than one.
        for some in (_SHOWN_CHARACTERS + 1, 4 * (_SHOWN_CHARACTERS + 1)):
            ids = dataset.read(dataset.document_start(about.document) + start, min(count, some))
            text = self._tokenizer(source).decode(ids)
            if len(text) > _SHOWN_CHARACTERS or len(ids) == count:
                break
        return shortened(text)

    def words_of(self, source: str, document: int, tokens: Sequence[Range]) -> str:
        """The beginning of some stretches of tokens of a document as text, with … between them."""
        dataset = self.datasets[source]
        start = dataset.document_start(document)
        parts, length = [], 0
        for first, end in tokens:
            ids = dataset.read(start + first, min(end - first, 4 * (_SHOWN_CHARACTERS + 1)))
            parts.append(self._tokenizer(source).decode(ids).strip())
            length += len(parts[-1]) + 3
            if length > _SHOWN_CHARACTERS:
                break
        return shortened(" … ".join(parts))

    def masked(self, step: int, sample: int, source: str, document: int | None = None) -> str | None:
        """Reason why the targets of a sample, or those of a document in it, have no weight; None if they have.

        Args:
            step: counted from 0.
            sample: global index.
            source: of the sample.
            document: number in the dataset.
        """
        skip = self.journal.why_skipped(step)
        if skip is not None:
            return "blend.skip has the step" if not skip.fault else f"skipped{_fault(skip)}"
        for skip in self.journal.masks(step):
            if skip.samples is not None and skip.samples[0] <= sample < skip.samples[1]:
                return f"blend.skip has {_inclusive('sample', skip.samples)}"
            if skip.source == source:
                ranges = [found for found in skip.documents if document is not None and found[0] <= document < found[1]]
                if not skip.documents or ranges:
                    what = f"{_inclusive('document', ranges[0])} of" if ranges else "source"
                    return f"blend.skip has {what} {source}"
        return None


class Printable(Protocol):
    """The result of a question about a run, for people and programs."""

    @property
    def json(self) -> dict[str, Any]:
        """For programs."""

    def lines(self) -> Iterator[str]:
        """For people."""


def print_result(result: Printable, as_json: bool) -> None:
    """Print a result, line by line or as JSON."""
    lines = [orjson.dumps(result.json, option=orjson.OPT_INDENT_2).decode()] if as_json else result.lines()
    for line in lines:
        echo(line)


def first_lines(lines: Sequence[str]) -> Iterator[str]:
    """The first lines of many, and the number of the others."""
    yield from lines[:_SHOWN_LINES]
    if len(lines) > _SHOWN_LINES:
        yield f"and {counted(len(lines) - _SHOWN_LINES, 'more line')}: --json has all"


def shortened(text: str, characters: int = _SHOWN_CHARACTERS) -> str:
    """The beginning of a text."""
    return text[:characters] + ("…" if len(text) > characters else "")


def in_brackets(tokens: Range) -> str:
    """`[3, 7)`."""
    return f"[{tokens[0]}, {tokens[1]})"


def unknown_origins(described: Iterable[DocumentInfo]) -> list[str]:
    """A note about documents whose `.prov` records cannot be read."""
    damage = {about.document: about.damage for about in described if about.damage}
    if not damage:
        return []
    return [f"the origin of {counted(len(damage), 'document')} is unknown: {next(iter(damage.values()))}"]


def hint_of_ids(described: Iterable[DocumentInfo], ids: bool) -> list[str]:
    """A hint for people where ids are not known and were not asked for."""
    if ids or not any(about.id is None and about.origin and about.origin.file for about in described):
        return []
    return ["xxh3:... is the hash of an id that only the source files have: --ids reads them"]


def _fault(skip: Skip) -> str:
    return f" because of the fault at step {skip.steps[1]:,}" if skip.steps else ""


def _inclusive(noun: str, half_open: tuple[int, int]) -> str:
    return numbered(noun, half_open[0], half_open[1] - 1)


def open_view(run: StrPath, overrides: Sequence[str] = ()) -> RunView:
    """Open a run to ask about its data.

    Args:
        run: the run file, or the run folder.
        overrides: `key.path=value`.

    Raises:
        UserError: the run file has a mistake, a dataset is not finished or is not the one that the run was begun with.
    """
    config = load_run(run, overrides)
    folder = config.run.dir
    datasets = open_datasets(config, TRAIN)
    path = RunFiles(folder).journal

    def opened(journal: Journal, done: int, warnings: Sequence[str], about: Sequence[str] = ()) -> RunView:
        instances = instances_of(journal, datasets)
        return RunView(config, folder, journal, warnings, about, datasets, instances, Sampler(journal), done)

    done = steps_done(folder)
    if not path.exists():
        about = [f"planned from the run file: {folder} has no {RunFiles.journal} yet"]
        return opened(plan_journal(config, datasets), done, [], about)
    saved = read_journal(folder)
    _check_datasets(saved, datasets, path)
    replaced = [*_replaced(folder, datasets)]
    # Training resumes from the newest checkpoint, which may be behind.
    kept = max(RunFiles(folder).checkpoint_steps(), default=0)
    journal = plan_journal(config, datasets, saved)
    try:
        _check_end(journal, kept)
        journal = journal.going_on(saved, kept) if kept else journal
    except UserError as error:
        return opened(saved, done, [f"answered by {path}: {error}", *replaced])
    try:
        _check_end(journal, done)
        same = done == kept or journal.seen(done) == saved.seen(done)
    except UserError:
        same = False
    if not same:
        steps = f"{numbered('step', kept + 1, done)}, made since the newest checkpoint, will be made again"
        again = f"{steps} as the run file plans them now; `where` shows the steps as they were"
        trained = opened(saved, done, [f"{steps}, with other data; this is by {path}", *replaced])
        return replace(opened(journal, kept, [again, *replaced]), trained=trained)
    about = []
    if journal.to_json() != saved.to_json():
        about = [
            f"step {done + 1:,} and later ones are planned from the run file, which has changed since {path} was "
            "written; a training process that is running now still uses the latter"
        ]
    return opened(journal, done, replaced, about)


def _check_end(journal: Journal, done: int) -> None:
    """Refuse a plan that ends before the steps that are done: what lies behind an end is not planned."""
    end = Sampler(journal).end()
    if end is not None and end.step < done:
        raise UserError(
            f"{counted(done, 'step')} are done, but the run file now ends the run after {end.step:,}: {end.reason}"
        )


def _check_datasets(journal: Journal, datasets: Mapping[str, Dataset], path: Path) -> None:
    if missing := [name for name in journal.names if name not in datasets]:
        raise UserError(f"{path} has the source {missing[0]!r}, which the run file does not have any more; put it back")
    for segment in journal.segments:
        for name, state in segment.sources.items():
            dataset = datasets[name]
            first, end = state.documents or (0, dataset.documents)
            has = -1 if end > dataset.whole.documents else dataset.document_start(end) - dataset.document_start(first)
            if has != state.tokens:
                raise UserError(
                    f"{dataset.folder} is not the dataset that the run was started with: {path} says that documents "
                    f"[{first}, {end}) have {state.tokens:,} tokens; restore it"
                )


def _replaced(folder: Path, datasets: Mapping[str, Dataset]) -> Iterator[str]:
    """Warnings about datasets that were made again since the newest checkpoint, with as many tokens as before."""
    for name, fingerprint in RunFiles(folder).newest_state().get("fingerprints", {}).get("data", {}).items():
        begun = begun_fingerprint(fingerprint)
        if name in datasets and datasets[name].fingerprint != begun:
            yield (
                f"{datasets[name].folder} was made again: the newest checkpoint was trained on fingerprint "
                f"{begun}, and it has {datasets[name].fingerprint} now; its documents in earlier steps differ "
                "from those shown"
            )


def steps_done(folder: Path) -> int:
    """Steps of the newest checkpoint, or in the metrics, which have every step."""
    done = max(RunFiles(folder).checkpoint_steps(), default=0)
    for row in RunFiles(folder).newest_rows():
        with suppress(ValueError, KeyError, TypeError):  # it is about something else
            if "save_seconds" not in row:  # a save ends after later steps
                return max(done, int(row["step"]))
    return done


def newest_ranks(folder: Path) -> int | None:
    """Data-parallel ranks of the newest checkpoint; None without one."""
    layout = RunFiles(folder).newest_state().get("layout", {})
    ranks = layout.get("dp", layout.get("world_size"))
    return None if ranks is None else int(ranks)


def newest_origin(folder: Path) -> dict[str, Any]:
    """Origin of a run by its newest checkpoint: `kind` is `fork` or `init_from`; empty if it began from scratch."""
    return RunFiles(folder).newest_state().get("origin") or {}
