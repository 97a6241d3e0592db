"""The checkpoint that a run resumes from: rank 0 chooses, and all ranks look for damage before anything is loaded.

Rank 0 alone lists folders. Of each checkpoint that it considers, every rank reads a share of the files, so that each
file is read and hashed once.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from pipeline.common.errors import MachineError
from pipeline.config.run import ResumeConfig
from pipeline.train.checkpoint.committed import Files, changed, wait_until_visible
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints, Verify
from pipeline.train.distributed.process_group import broadcast_from_rank0, gather

Report = Callable[[str], None]


def resume_point(checkpoints: Checkpoints, config: ResumeConfig, report: Report) -> Checkpoint | None:
    """The checkpoint to resume from, None for a run that has none yet; every rank calls this.

    Nothing is moved: `Checkpoints.resume_from` does that, when the run has agreed to what it finds there.

    Args:
        checkpoints: of the run.
        config: which one is asked for, and how it is verified.
        report: gets a line per checkpoint that is skipped, on rank 0.

    Raises:
        UserError: what was asked for is not there, or nothing can be trusted.
        MachineError: a rank cannot read what rank 0 sees.
    """

    def choose(verify: Verify) -> Checkpoint | None:
        if config.step is not None:
            return checkpoints.follow(config.step, report, verify)
        found = checkpoints.resumable(report, verify)
        if found is None and config.from_ == "latest":
            checkpoints.at(None)  # which says that there is none
        return found

    return _agree(checkpoints, choose, full=config.verify_on_load == "full")


def rewind_point(checkpoints: Checkpoints, config: ResumeConfig, before: int, report: Report) -> Checkpoint | None:
    """The newest checkpoint of at most `before` steps; later ones are abandoned. Every rank calls this.

    Args:
        checkpoints: of the run.
        config: how it is verified.
        before: steps.
        report: gets a line per checkpoint that is abandoned or skipped, on rank 0.
    """
    return _agree(
        checkpoints,
        lambda verify: checkpoints.rewind(before, report, verify),
        full=config.verify_on_load == "full",
    )


def source_point(checkpoints: Checkpoints, step: int | None) -> Checkpoint:
    """A checkpoint to read weights from, of a step or the latest one, every file of it read; nothing is moved there.

    Every rank calls this.

    Raises:
        UserError: there is none, or it is damaged.
        MachineError: a rank cannot read what rank 0 sees.
    """
    found = _agree(checkpoints, lambda verify: checkpoints.at(step, verify), full=True)
    assert found is not None
    return found


def _agree(checkpoints: Checkpoints, choose: Callable[[Verify], Checkpoint | None], *, full: bool) -> Checkpoint | None:
    """The result of `choose` on rank 0, where it may ask for verification as often as it likes, on all ranks."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1:
        return choose(lambda checkpoint: checkpoint.problems(full=full))
    if dist.get_rank() != 0:
        while True:
            # Also the end of this loop where rank 0 has failed.
            task: dict[str, Any] = broadcast_from_rank0(_not_rank_0)
            if "files" not in task:
                return None if task["step"] is None else checkpoints.committed(task["step"])
            gather(_verify_own_files(checkpoints, task, dist.get_rank(), ranks))

    def verify(checkpoint: Checkpoint) -> list[str]:
        problems = checkpoint.problems(full=False)
        if problems or not full:
            return problems
        task = broadcast_from_rank0(lambda: {"step": checkpoint.step, "files": checkpoint.files()})
        verdicts = gather(_verify_own_files(checkpoints, task, 0, ranks))
        assert verdicts is not None, "this is rank 0"
        for verdict in verdicts:
            if verdict["error"]:
                raise MachineError(verdict["error"])
        return [problem for verdict in verdicts for problem in verdict["problems"]]

    def find() -> dict[str, Any]:
        found = choose(verify)
        return {"step": found.step if found else None}

    step = broadcast_from_rank0(find)["step"]
    return None if step is None else checkpoints.committed(step)


def _not_rank_0() -> dict[str, Any]:
    raise AssertionError("only rank 0 knows")


def _verify_own_files(checkpoints: Checkpoints, task: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Problems of this rank's files, and the error if it could not read one that rank 0 sees."""
    problems: list[str] = []
    files: Files = task["files"]
    try:
        checkpoint = checkpoints.committed(task["step"])
        for name in files_by_rank(files, ranks)[rank]:
            path = checkpoint.path / name
            wait_until_visible(path)
            if problem := changed(path, files[name][1]):
                problems.append(problem)
    except MachineError as error:
        return {"problems": problems, "error": str(error)}
    except OSError as error:
        return {
            "problems": problems,
            "error": f"rank {rank} on {socket.gethostname()} cannot read {error.filename}: {error.strerror}; the "
            "checkpoint itself may be valid: repair the access of that machine to it, then run the same command again",
        }
    return {"problems": problems, "error": None}


def files_by_rank(files: Files, ranks: int) -> list[Sequence[str]]:
    """File names by rank, each once: the largest first, to the rank with the fewest bytes so far."""
    dealt: list[list[str]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for name in sorted(files, key=lambda name: (-files[name][0], name)):
        rank = load.index(min(load))
        dealt[rank].append(name)
        load[rank] += files[name][0]
    return list(dealt)
