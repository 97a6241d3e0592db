"""Checkpoints of a run at a glance, in detail, checked and thinned out: the `pipeline checkpoint` commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pipeline.common.console import progress
from pipeline.common.errors import UserError
from pipeline.common.format import aligned, shape_text, when
from pipeline.config.checkpoint import CheckpointConfig
from pipeline.train.checkpoint.committed import UNREADABLE, damage_named, step_of, validation_losses
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints, NotRemoved
from pipeline.train.checkpoint.mirror.copies import small_files, states
from pipeline.train.checkpoint.mirror.copies import verify as verify_objects
from pipeline.train.checkpoint.policy import best, is_permanent
from pipeline.train.distributed.axes import axis_names
from pipeline.train.distributed.layout import degrees_text
from pipeline.train.export.folders import ExportFolders
from pipeline.train.export.pending import pending_exports

if TYPE_CHECKING:
    from pipeline.train.checkpoint.tensors import Stored

_MIB = 2**20


@dataclass(frozen=True)
class Row:
    """A checkpoint, or what is left of one."""

    step: int | None
    name: str
    state: str
    """"ok" (by its sizes; `verify` reads everything), "damaged", "abandoned" or "temporary"."""
    latest: bool = False
    """True if a run resumes from it."""
    time: float | None = None
    """Time at which it was committed, in seconds since 1970."""
    bytes: int | None = None
    parent: int | None = None
    """Step of the checkpoint that it descends from."""
    attempt: int | None = None
    layout: str | None = None
    permanent: bool = False
    """True if `train.checkpoint.keep_every` keeps it permanently."""
    best: bool = False
    """True if it is one of the `train.checkpoint.keep_best` with the lowest validation loss."""
    problems: tuple[str, ...] = ()


def rows(checkpoints: Checkpoints, config: CheckpointConfig) -> list[Row]:
    """Rows of a run folder: checkpoints by step, then abandoned ones, then unfinished ones."""
    everything, latest = checkpoints.all(), checkpoints.latest()
    chosen = best(config, validation_losses(everything, config))
    seen = [(each, _row(each, config, latest=each == latest, best=each.step in chosen)) for each in everything]
    seen += [(each, _row(each, config, abandoned=True)) for each in checkpoints.abandoned()]
    # What a run that trains has removed meanwhile is not damaged.
    found = [row for each, row in seen if row.state != "damaged" or each.path.exists()]
    for path in checkpoints.unfinished():
        with suppress(OSError):  # it is finished, or gone
            if path.is_dir():
                step = step_of(path.name.partition(".")[0])
                size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
                found.append(Row(step, path.name, "temporary", bytes=size, time=path.stat().st_mtime))
    return found


def mirror_rows(url: str) -> list[Row]:
    """Rows of a mirror, by step."""
    found = []
    for commit, state, problems in states(url):
        parent = state.get("parent")
        layout = state.get("layout")
        found.append(
            Row(
                commit.step,
                f"step-{commit.step:08d}",
                "damaged" if problems else "ok",
                time=commit.time,
                bytes=commit.size,
                parent=parent.get("step") if isinstance(parent, dict) else None,
                attempt=state.get("attempt"),
                layout=layout_text(layout) if isinstance(layout, dict) else None,
                problems=tuple(problems),
            )
        )
    return [*found[:-1], *(replace(each, latest=True) for each in found[-1:])]


@contextmanager
def mirror_details(url: str, step: int | None) -> Iterator[Details]:
    """`details` of a checkpoint in a mirror, as long as it is looked at: the files of its tensors are not fetched."""
    from pipeline.train.checkpoint.tensors import stored

    with small_files(url, step) as checkpoint, damage_named(checkpoint):
        yield Details(checkpoint, checkpoint.state(), stored(checkpoint), [])


def _row(
    checkpoint: Checkpoint,
    config: CheckpointConfig,
    *,
    latest: bool = False,
    best: bool = False,
    abandoned: bool = False,
) -> Row:
    problems = checkpoint.problems(full=False)
    parent, state, size, committed = None, {}, None, None
    with suppress(OSError):
        committed = checkpoint.time
    try:
        size, state, parent = checkpoint.size, checkpoint.state(), checkpoint.parent()
    except UNREADABLE:
        problems = problems or [f"{checkpoint.path} cannot be read"]
    return Row(
        checkpoint.step,
        checkpoint.path.name,
        "damaged" if problems else "abandoned" if abandoned else "ok",
        latest,
        committed,
        size,
        parent.step if parent else None,
        state.get("attempt"),
        layout_text(state["layout"]) if isinstance(state.get("layout"), dict) else None,
        not abandoned and is_permanent(config, checkpoint.step),
        best,
        tuple(problems),
    )


def layout_text(layout: Mapping[str, Any]) -> str:
    """`tp 2 x dp 2`; `1 process`."""
    # Samples are dealt to dp_replicate x dp_shard, which checkpoints record as one.
    axes = (*axis_names(lambda axis: axis.data != "samples"), "dp")
    return degrees_text({axis: layout.get(axis, 1) for axis in axes}) or "1 process"


def list_lines(found: Sequence[Row]) -> Iterator[str]:
    """`rows` as a table."""
    if not found:
        yield "no checkpoints"
        return
    head = ("step", "committed", "size", "parent", "attempt", "layout", "state", "")
    cells = [head] + [
        (
            "?" if row.step is None else f"{row.step:,}",
            "?" if row.time is None else when(row.time),
            "?" if row.bytes is None else _size(row.bytes),
            "-" if row.parent is None else f"{row.parent:,}",
            "-" if row.attempt is None else str(row.attempt),
            row.layout or "-",
            row.state,
            ", ".join(_notes(row)),
        )
        for row in found
    ]
    yield from aligned(cells)
    for row in found:
        yield from (f"  {problem}" for problem in row.problems)


def _notes(row: Row) -> Iterator[str]:
    if row.latest:
        yield "latest"
    if row.permanent:
        yield "kept for ever"
    if row.best:
        yield "best"
    if row.state in ("abandoned", "temporary"):
        yield row.name


def as_json(found: Iterable[Row]) -> list[dict[str, Any]]:
    """`rows` for other programs."""
    return [asdict(row) for row in found]


@dataclass(frozen=True)
class Details:
    """The contents of a checkpoint."""

    checkpoint: Checkpoint
    state: dict[str, Any]
    sections: dict[str, dict[str, Stored]]
    problems: list[str]


def details(checkpoints: Checkpoints, step: int | None) -> Details:
    """Look into a checkpoint, without reading its tensors.

    Raises:
        UserError: there is none, or its state or list of tensors is damaged.
    """
    from pipeline.train.checkpoint.tensors import stored

    checkpoint = checkpoints.find(step)
    problems = checkpoint.problems(full=False)
    with damage_named(checkpoint):
        return Details(checkpoint, checkpoint.state(), stored(checkpoint), problems)


def details_lines(found: Details, *, all_tensors: bool) -> list[str]:
    """`details` in words: where it comes from and what it holds, then its tensors.

    Raises:
        UserError: something in its state is of another kind than this program writes.
    """
    with damage_named(found.checkpoint):
        return list(_details_lines(found, all_tensors=all_tensors))


def _details_lines(found: Details, *, all_tensors: bool) -> Iterator[str]:
    state, checkpoint = found.state, found.checkpoint
    yield f"{checkpoint.path}"
    yield f"  step        {checkpoint.step:,}" + (f", {state['tokens']:,} tokens" if "tokens" in state else "")
    yield f"  committed   {when(checkpoint.time)}, attempt {state.get('attempt', '?')}, {_size(checkpoint.size)}"
    yield f"  fingerprint {checkpoint.fingerprint}"
    parent = checkpoint.parent()
    yield f"  descends from {'nothing: the first of its run' if parent is None else parent.name}"
    if state.get("origin"):
        yield f"  origin      {_words(state['origin'], leave_out=('journal',))}"
    if "layout" in state:
        yield f"  layout      {layout_text(state['layout'])} ({_words(state['layout'])})"
    if "versions" in state:
        yield f"  versions    {_words(state['versions'])}"
    prints = state.get("fingerprints", {})
    for name in ("tokenizer", "data", "objective"):
        if name in prints:
            value = prints[name]
            yield f"  {name:<11} {_words(value) if isinstance(value, dict) else value}"
    yield from _journal_lines(state.get("journal"))
    for name, text in (("loss_scale", "loss scale"), ("spikes", "spikes"), ("faults", "faults")):
        if state.get(name):
            yield f"  {text:<11} {_words(state[name])}"
    for problem in found.problems:
        yield f"  damaged: {problem}"
    for section, tensors in found.sections.items():
        numel = sum(each.numel for each in tensors.values())
        size = _size(sum(each.bytes for each in tensors.values()))
        yield f"{section}: {len(tensors):,} tensors, {numel:,} numbers, {size}"
        if section == "model" or all_tensors:
            width = max(map(len, tensors))
            for name, each in tensors.items():
                shape = shape_text(each.shape) or "scalar"
                yield f"  {name:<{width}}  {shape}  {str(each.dtype).removeprefix('torch.')}"


def _journal_lines(journal: Any) -> Iterator[str]:
    if not isinstance(journal, dict):
        return
    segments = journal.get("segments", [])
    sources = sorted({name for segment in segments for name in segment.get("sources", {})})
    count = f"{len(segments)} segment{'s' if len(segments) != 1 else ''}"
    yield f"  journal     {count} of {', '.join(sources) or 'nothing'}"
    others = {name: value for name, value in journal.items() if name != "segments" and value}
    if others:
        yield f"              {_words(others)}"


def details_json(found: Details) -> dict[str, Any]:
    """`details` for other programs, with the whole of state.json."""
    return {
        "path": str(found.checkpoint.path),
        "fingerprint": found.checkpoint.fingerprint,
        "time": found.checkpoint.time,
        "bytes": found.checkpoint.size,
        "problems": found.problems,
        "state": found.state,
        "tensors": {
            section: {
                name: {"shape": each.shape, "dtype": str(each.dtype).removeprefix("torch.")}
                for name, each in tensors.items()
            }
            for section, tensors in found.sections.items()
        },
    }


def verify(
    checkpoints: Checkpoints, step: int | None, console: Console, report: Callable[[str], None]
) -> dict[int, list[str]]:
    """Read checkpoints, compare every hash and look into the list of tensors; returns what is wrong by step.

    Hashes beside the files find damage, and say nothing of who wrote them. One that a run which trains removes
    meanwhile is not damage.

    Args:
        checkpoints: of a run.
        step: of one of them; by default all are read.
        console: for the progress bar.
        report: gets a line per checkpoint as soon as it is known.

    Raises:
        UserError: there is nothing to verify.
    """
    everything = [checkpoints.find(step)] if step is not None else checkpoints.all()
    if not everything:
        raise checkpoints.not_there(None)
    found: dict[int, list[str]] = {}
    with progress(console, "verify (bytes)", sum(map(_readable, everything))) as advance:
        for checkpoint in everything:
            try:
                problems = checkpoint.problems(advance=advance) or _forgeries(checkpoint)
            except OSError as error:
                if checkpoint.path.exists():
                    raise
                problems = [str(error)]
            if problems and not checkpoint.path.exists():
                if step is not None:
                    raise checkpoints.not_there(step)
                report(f"{checkpoint.path.name}: removed meanwhile")
                continue
            found[checkpoint.step] = problems
            if not problems:
                report(f"{checkpoint.path.name}: good, {len(checkpoint.files())} files, {_size(checkpoint.size)}")
    return found


def verify_mirror(url: str, step: int | None, console: Console, report: Callable[[str], None]) -> dict[int, list[str]]:
    """`verify` of a mirror: every object is read once, and nothing is kept."""
    found: dict[int, list[str]] = {}
    for commit, problems in verify_objects(url, step, console):
        found[commit.step] = problems
        if not problems:
            report(f"step-{commit.step:08d}: good, {len(commit.files)} files, {_size(commit.size)}")
    return found


def _forgeries(checkpoint: Checkpoint) -> list[str]:
    """Problems of the list of tensors of a checkpoint whose hashes are right."""
    from pipeline.train.checkpoint.dcp_metadata import read_metadata

    try:
        read_metadata(checkpoint)
    except UserError as error:
        return [str(error)]
    return []


def _readable(checkpoint: Checkpoint) -> int:
    try:
        return checkpoint.size
    except UNREADABLE:
        return 0


def prune(
    checkpoints: Checkpoints,
    config: CheckpointConfig,
    report: Callable[[str], None],
    *,
    keep: int | None,
    steps: Sequence[int] | None,
    abandoned: bool,
    dry_run: bool,
) -> None:
    """Remove what the policy does not keep, or chosen checkpoints.

    Args:
        checkpoints: of a run.
        config: the policy's numbers.
        report: gets a line per folder that is gone, or would be, and per one that stays for its export.
        keep: number of latest checkpoints that stay, instead of the policy's; or
        steps: remove these instead.
        abandoned: remove what the run has gone back from, too.
        dry_run: remove nothing.

    Raises:
        NotRemoved: not all of them could be removed.
        UserError: a step is not there, or must stay.
    """
    if keep is not None and steps is not None:
        raise UserError("name what to remove with either --keep or --steps, not with both")
    run = checkpoints.folder.parent
    exported = {step for step in ExportFolders.of_run(run).unfinished().values() if step}
    pending = pending_exports(run, config, [each.step for each in checkpoints.all()])
    if steps is None:
        policy = config if keep is None else config.model_copy(update={"keep": keep})
        chosen = []
        for each in checkpoints.prune(policy, full=True, dry_run=True):
            if each.step in exported or each.step in pending:
                report(f"kept {each.path}: its export is not done")
            else:
                chosen.append(each)
    else:
        chosen = [checkpoints.find(step) for step in sorted(set(steps))]
        latest, good = checkpoints.latest(), checkpoints.last_good(full=True)
        for each in chosen:
            if each in (latest, good):
                why = "is the one that the run resumes from" if each == latest else "is the newest valid one"
                raise UserError(f"step {each.step} {why} and stays; leave it out of --steps. Nothing was removed")
            if each.step in exported:
                raise UserError(f"step {each.step} is being exported; try again when that is done. Nothing was removed")
            if each.step in pending:
                raise UserError(
                    f"step {each.step} is still to be exported (train.checkpoint.export); try again when that is done, "
                    "or give train.checkpoint.export=null to this command. Nothing was removed"
                )
    if abandoned:
        chosen += checkpoints.abandoned()
    gone, failure = chosen, None
    if not dry_run:
        try:
            gone = checkpoints.remove(chosen)
        except NotRemoved as error:
            gone, failure = error.gone, error
    for each in gone:
        report(f"{'would remove' if dry_run else 'removed'} {each.path}")
    if failure is not None:
        raise failure
    if not gone:
        report("nothing to remove")


def _size(size: int) -> str:
    return f"{size / _MIB:,.1f} MiB"


def _words(values: Mapping[str, Any], leave_out: Sequence[str] = ()) -> str:
    """`torch 2.13, python 3.11`; long lists by their length."""
    return ", ".join(f"{name} {_brief(value)}" for name, value in values.items() if name not in leave_out)


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return f"({_words(value)})"
    if isinstance(value, list):
        text = ", ".join(map(_brief, value))
        return f"[{text}]" if len(value) <= 4 else f"{len(value)} entries"
    return str(value)
