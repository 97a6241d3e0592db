"""From a run file to frozen plans: its sources, splits, tokenizer and the room that the datasets will take."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from pipeline.common import storage
from pipeline.common.capacity import free_space, room_of
from pipeline.common.console import Console, say, warn
from pipeline.common.format import size
from pipeline.common.problems import Problems
from pipeline.config.root import Config
from pipeline.data.curate.results.apply import applied_curations
from pipeline.data.datasets.files import PLAN_FILE
from pipeline.data.preprocess.checks import PREPROCESS_CHECKS, PreprocessScope, check_adopted
from pipeline.data.preprocess.make_tokenizer import prepare_tokenizer, remove_unused_tokenizer
from pipeline.data.preprocess.run_tokenizer import (
    ORIGIN_FILE,
    OtherTokenizer,
    check_tokenizer_settings,
    named_tokenizer,
    run_tokenizer,
    tokenizer_folder,
)
from pipeline.data.preprocess.source_plan import SourcePlan, make_plan
from pipeline.data.preprocess.split_counts import find_splits, known_splits
from pipeline.data.preprocess.splits import Splits
from pipeline.data.preprocess.status import read_state
from pipeline.data.tokenization.tokenizer import TOKENIZER_FILE, Tokenizer
from pipeline.data.work.frozen_plan import freeze_alone, make_data_dir
from pipeline.data.work.leases import LeaseWatch, sweep, take_when_free
from pipeline.data.work.progress import NOTHING_TO_DO
from pipeline.data.work.units import SourceFiles, find_source_files, reading

_TOKENS_PER_BYTE = 0.25
"""Tokens per byte of text; a guess for English."""


def checked_scope(config: Config, *, grow: bool) -> PreprocessScope:
    """A run that nothing speaks against, with its sources."""
    found = Problems()
    scope = PreprocessScope(config, find_source_files(config, found, grow=grow))
    with reading(config, scope.sources):
        found.look(PREPROCESS_CHECKS, scope)
    found.raise_problems()
    return scope


def find_plans(config: Config) -> tuple[Tokenizer, list[SourcePlan]] | None:
    """Tokenizer and plans of a run that is planned, as `freeze_plans` would find them; writes nothing.

    None also where documents would have to be read to know it.

    Raises:
        UserError: something in the config or the data has to be fixed first.
    """
    if not (tokenizer_folder(config) / ORIGIN_FILE).is_file():
        return None
    sources = find_source_files(config)
    tokenizer = run_tokenizer(config)
    if config.tokenizer.path is not None:
        check_tokenizer_settings(config)
        asked = named_tokenizer(config)
        if asked.special_tokens != tokenizer.special_tokens:  # then the kept one is written anew
            return None
        _check_datasets(config, tokenizer)
    else:
        prepare_tokenizer(config, sources, {}, partial(_check_datasets, config))  # compares: there is one
    plans = []
    curations = applied_curations(config, sources)
    for found in sources:
        curation = curations.get(found.source.name)
        folder, splits = config.data_dir / found.source.name, known_splits(config, found, curation)
        if splits is None or not (folder / PLAN_FILE).exists():
            return None
        plan = make_plan(found, tokenizer, config, splits, curation)
        if plan.differences(folder):
            return None
        plans.append(plan)
    return tokenizer, plans


def freeze_plans(
    scope: PreprocessScope, console: Console, *, units: bool, grow: bool
) -> tuple[Tokenizer, list[SourcePlan]]:
    """Make tokenizer and plans, or compare them with those that are there."""
    config, sources = scope.config, scope.sources
    for found in sources if grow else ():
        if not found.grows:
            say(console, f"{found.source.name}: no files were added to a plan")
    splits = find_splits(config, console, sources, scope.curations)
    tokenizer = _tokenizer_of(config, console, sources, splits)
    if not sources:
        say(console, NOTHING_TO_DO)
    if not units and (warning := dataset_warning(config, sources, tokenizer.dtype.itemsize)):
        warn(console, warning)
    plans = [
        make_plan(found, tokenizer, config, splits[found.source.name], scope.curations.get(found.source.name))
        for found in sources
    ]
    for plan in plans:
        freeze_alone(plan, config, config.data_dir / plan.found.source.name, console)
    remove_stale(config, plans)
    return tokenizer, plans


def dataset_warning(config: Config, sources: Sequence[SourceFiles], token_bytes: int) -> str | None:
    """Warning where the datasets will probably not fit on the disk of `data.dir`; None where they will.

    Nothing is read for it, so it is a guess, and refuses nothing.

    Args:
        config: The run.
        sources: What is tokenized.
        token_bytes: Bytes of a token on disk.
    """
    free, _ = free_space(config.data_dir)
    copies = 2 if config.data.preprocess.shuffle == "global" else 1
    needed = {source.source.name: copies * _TOKENS_PER_BYTE * token_bytes * source.text_bytes for source in sources}
    if sum(needed.values()) <= free:
        return None
    for state in read_state(config):
        if state.units:
            needed[state.name] = needed.get(state.name, 0.0) * (1 - state.done / state.units)
    if sum(needed.values()) <= free:
        return None
    return (
        f"{room_of('data.dir', config.data_dir, free)}, and the datasets will take about {size(sum(needed.values()))} "
        "more (estimated from the size of the files): free some space, or set data.dir to a folder on another disk"
    )


def _tokenizer_of(config: Config, console: Console, sources: list[SourceFiles], splits: dict[str, Splits]) -> Tokenizer:
    check = partial(_check_datasets, config)
    folder = tokenizer_folder(config)
    if config.tokenizer.train is None or (folder / ORIGIN_FILE).exists():
        try:
            return prepare_tokenizer(config, sources, splits, check)
        except OtherTokenizer as error:
            if not remove_unused_tokenizer(config, sources):
                raise
            say(console, f"the tokenizer is made again, since no unit was started with it ({error.difference})")
            return _tokenizer_of(config, console, sources, splits)
    make_data_dir(config, folder)
    with (
        take_when_free(
            folder,
            "train",
            LeaseWatch(),
            lambda holder: say(console, f"waiting for {holder}, which trains the tokenizer"),
        ) as lease,
        lease.beating(),
    ):
        trains = not (folder / ORIGIN_FILE).exists()
        if trains:
            say(console, "training the tokenizer")
        tokenizer = prepare_tokenizer(config, sources, splits, check)
    wanted = config.tokenizer.train.vocab_size
    if trains and tokenizer.vocab_size < wanted:
        say(
            console,
            f"the tokenizer has {tokenizer.vocab_size:,} entries instead of {wanted:,} (tokenizer.train.vocab_size): "
            "the text has no more pairs that occur tokenizer.train.min_frequency times",
        )
    return tokenizer


def _check_datasets(config: Config, tokenizer: Tokenizer) -> None:
    """Datasets made elsewhere, which are checked here for a tokenizer that was trained just now."""
    found = Problems()
    check_adopted(config, tokenizer, found)
    found.raise_problems()


def start_over(config: Config, plan: SourcePlan) -> str:
    """Advice on starting a source over whose files have changed: plan and trained tokenizer are of the old ones."""
    folder = config.data_dir / plan.found.source.name
    if config.tokenizer.path is not None:
        return f"remove {folder}, which was begun with the files as they are now"
    if any(config.data_dir.glob("*/*/manifest.json")):
        kept = tokenizer_folder(config) / TOKENIZER_FILE
        return (
            f"remove {folder}, which was begun with the files as they are now, and keep the tokenizer of "
            f"the finished sources with tokenizer.path: {kept} in place of tokenizer.train"
        )
    return f"remove {config.data_dir}, which was begun with the files as they are now"


def remove_stale(config: Config, plans: list[SourcePlan]) -> None:
    """Remove what processes that were killed left half-written."""
    for folder in (tokenizer_folder(config), *(config.data_dir / plan.found.source.name for plan in plans)):
        with suppress(OSError):
            for path in folder.rglob(f"*{storage.TEMPORARY_SUFFIX}"):
                storage.remove_if_stale(path)
            sweep(folder)
