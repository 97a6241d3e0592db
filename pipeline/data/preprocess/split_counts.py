"""The splits of every source: at once where they are shares; by a look at all documents where they are numbers."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from pipeline.common.console import say
from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.config.root import Config
from pipeline.data.curate.results.apply import AppliedCuration
from pipeline.data.preprocess.source_plan import counting_job, planned_settings
from pipeline.data.preprocess.splits import (
    Splits,
    all_held_out,
    documents_wanted,
    make_splits,
    split_names,
    splits_from_settings,
    splits_in_words,
)
from pipeline.data.preprocess.tokenize_unit import SmallestHashes, UnitJob, make_sample_hashes
from pipeline.data.sources.records import NOT_BAD
from pipeline.data.work.frozen_plan import make_data_dir
from pipeline.data.work.job_run import worker_count
from pipeline.data.work.leases import Lease, LeaseWatch, take
from pipeline.data.work.progress import ProgressLine
from pipeline.data.work.units import SourceFiles, cut_units
from pipeline.data.work.worker_pool import ATTEMPTS, Workers

_NONE: Mapping[str, tuple[str, str]] = {}
_ALL: Mapping[str, AppliedCuration] = {}


def find_splits(
    config: Config, console: Console, sources: list[SourceFiles], curations: Mapping[str, AppliedCuration] = _ALL
) -> dict[str, Splits]:
    """The splits of each source by its name.

    Args:
        config: the run.
        console: where progress goes.
        sources: that have files.
        curations: decisions that documents follow, by source.

    Raises:
        UserError: a source has fewer documents than its splits are to have, or none beside them.
    """
    wanted = documents_wanted(config.data)
    if not wanted:
        return {
            found.source.name: all_held_out(config.data) if found.held_out else make_splits(config.data)
            for found in sources
        }
    return {
        found.source.name: known_splits(config, found, curations.get(found.source.name))
        or _counted(config, console, found, wanted, curations.get(found.source.name))
        for found in sources
    }


def known_splits(config: Config, found: SourceFiles, curation: AppliedCuration | None = None) -> Splits | None:
    """The splits of a source if none of its documents has to be read for them."""
    if found.held_out:
        return all_held_out(config.data)
    return _planned(config, found, curation) if documents_wanted(config.data) else make_splits(config.data)


def unknown_splits(config: Config) -> Splits:
    """Splits of which nobody knows yet where they end."""
    return Splits(tuple(split_names(config.data)), (0,) * len(config.data.splits), config.data.split_by == "id")


def _planned(config: Config, found: SourceFiles, curation: AppliedCuration | None) -> Splits | None:
    """The splits of the plan that was made before, if it is of the same files and the same `data.splits`."""
    settings = planned_settings(config, found) or {}
    splits = {name: str(split) for name, split in config.data.splits.items()}
    ends = settings.get("ends of splits") or {}
    if settings.get("curation") != (curation and curation.hash):
        return None
    if settings.get("data.splits") != splits or set(ends) != set(splits):
        return None
    return splits_from_settings(config.data, ends)


def _counted(
    config: Config,
    console: Console,
    found: SourceFiles,
    wanted: int,
    curation: AppliedCuration | None,
    dropped: Mapping[str, tuple[str, str]] = _NONE,
) -> Splits:
    """Read all documents for the smallest hashes among them: one more than wanted, to see that some are left."""
    settings = config.data.preprocess
    damaged: dict[str, tuple[str, str]] = {}
    say(console, f"{found.source.name}: counting all documents, because data.splits has numbers of documents")
    source = counting_job(found, config, Splits((), (), config.data.split_by == "id"), curation=curation)
    source = replace(source, reader=replace(source.reader, dropped=dropped))
    jobs = [UnitJob(source, unit) for unit in cut_units(found, settings.seed, settings.unit_bytes)]
    smallest: list[int] = []
    records = curated = 0
    rejected: Counter[str] = Counter()
    with (
        _counting_lease(config, source.folder),
        ProgressLine(console, found.bytes, len(jobs), 0, "counting") as line,
        Workers[UnitJob, SmallestHashes](make_sample_hashes, (wanted + 1,), worker_count(config, len(jobs))) as workers,
    ):
        for result in line.results(workers, jobs, f"could not be counted in {ATTEMPTS} attempts"):
            smallest = list(heapq.merge(smallest, result.hashes))[: wanted + 1]
            records += result.records
            curated += result.curated
            damaged |= {each.file.name: (each.reason, each.detail) for each in result.damaged}
            rejected += result.rejected
    if settings.on_damaged_file == "drop" and damaged.keys() - dropped.keys():
        say(console, f"{found.source.name}: again, without {counted(len(damaged), 'damaged file')}")
        return _counted(config, console, found, wanted, curation, damaged)
    if len(smallest) < wanted:
        removed = f" without the {curated:,} that data.curate removes" if curated else ""
        bad = Counter({reason: count for reason, count in rejected.items() if reason not in NOT_BAD})
        if bad.total() > len(smallest):
            reasons = ", ".join(
                f"{count:,} {reason}" if len(bad) > 1 else reason for reason, count in bad.most_common()
            )
            raise UserError(
                f"source {found.source.name!r}: {bad.total():,} of {counted(records, 'record')} "
                f"{'is' if bad.total() == 1 else 'are'} bad: {reasons}. The others are too few for data.splits "
                f"({splits_in_words(config.data)}); correct the source's type or text_key, or repair the data; "
                "`pipeline preprocess RUN.yaml --dry-run` shows more"
            )
        raise UserError(
            f"source {found.source.name!r} has {len(smallest)} documents{removed}, too few for data.splits "
            f"({splits_in_words(config.data)}); lower them"
        )
    if len(smallest) == wanted:
        raise UserError(
            f"source {found.source.name!r}: data.splits ({splits_in_words(config.data)}) leave nothing to train on: "
            f"they take all of its {wanted} documents; lower the numbers"
        )
    return make_splits(config.data, smallest, found.source.name)


@contextmanager
def _counting_lease(config: Config, folder: Path) -> Iterator[None]:
    """A lease that only shows `--status` that somebody is at work; two commands may count at a time."""
    try:
        make_data_dir(config, folder)
        lease = take(folder, "counting", LeaseWatch())
    except OSError:  # a disk that cannot be written: whatever needs it says so
        lease = None
    if not isinstance(lease, Lease):
        yield
        return
    with lease, lease.beating():
        yield
