"""Ranks meet, tell one another things, and leave; and what they say when that does not work."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline.common.errors import MachineError, RankFailed, UserError
from pipeline.config.run import TimeLimitsConfig
from pipeline.train.distributed import process_group
from pipeline.train.distributed.layout import Layout
from pipeline.train.distributed.process_group import (
    Processes,
    background_group,
    barrier,
    broadcast_from_rank0,
    cpu_group,
    gather,
    init_process_group,
    of_environment,
)
from pipeline.train.distributed.rank import is_consequence, read_error, record_error
from pipeline.train.parallel.mesh import Mesh, build_mesh
from tests.train.distributed import ranks

pytestmark = pytest.mark.parallel

CPU = torch.device("cpu")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def told() -> list[Any]:
    """Everything that ranks can tell one another."""
    init_process_group(of_environment(), CPU, TimeLimitsConfig())
    rank = dist.get_rank()
    shared = [
        broadcast_from_rank0(lambda: {"größe": [1, 2.5, None], "from": rank}),
        broadcast_from_rank0(lambda: None),
        broadcast_from_rank0(lambda: "x" * 100_000),
    ]
    gathered = gather({"rank": rank, "text": "y" * (rank * 1000)})
    barrier()
    assert dist.get_world_size(cpu_group()) == dist.get_world_size()
    return [shared, gathered]


def test_values_reach_all() -> None:
    results = ranks.run(3, told, connect=False)
    shared = [{"größe": [1, 2.5, None], "from": 0}, None, "x" * 100_000]
    assert [result[0] for result in results] == [shared] * 3
    assert [result[1] for result in results] == [[{"rank": r, "text": "y" * (r * 1000)} for r in range(3)], None, None]


def test_one_process_needs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert of_environment() == Processes(0, 1, 0, 1)
    init_process_group(of_environment(), CPU, TimeLimitsConfig())
    init_process_group(of_environment(), CPU, TimeLimitsConfig())
    assert broadcast_from_rank0(lambda: (1, 2)) == (1, 2)
    assert gather("a") == ["a"]
    barrier()
    assert not process_group.joined()


def threads_and_groups() -> tuple[int, int]:
    """Threads of this process that run collectives, and its groups."""
    init_process_group(of_environment(), CPU, TimeLimitsConfig())
    groups = _groups(build_mesh(Layout(dp_shard=2, tp=2), "cpu"))
    for group in groups:
        for _ in range(4):
            dist.barrier(group)  # a thread has its name once it runs; if there are two, both had something to do
    names = [(each / "comm").read_text() for each in Path("/proc/self/task").iterdir()]
    return sum("gloo_runl" in name for name in names), len({group.group_name for group in groups})


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted by what Linux tells of them")
def test_each_group_over_gloo_has_one_thread() -> None:
    """With two of them, two collectives under way in a group corrupt the heap."""
    for threads, groups in ranks.run(4, threads_and_groups, connect=False):
        assert threads == groups >= 4


def timeouts(layout: Layout) -> dict[str, timedelta]:
    """Of the collectives of each group that a run uses."""
    init_process_group(of_environment(), CPU, TimeLimitsConfig())
    groups = _groups(build_mesh(layout, "cpu"))
    return {group.group_name: group._get_backend(CPU).options._timeout for group in groups}


def _groups(mesh: Mesh) -> list[Any]:
    """All groups of this process."""
    meshes = [mesh.devices, *([mesh.contexts] if mesh.contexts else [])]
    return [dist.group.WORLD, background_group(), *(group for each in meshes for group in each.get_all_groups())]


@pytest.mark.parametrize("layout", [Layout(tp=2, dp_shard=2), Layout(cp=2, dp_replicate=2)])
def test_the_watchdog_comes_before_any_timeout_also_of_a_run_that_was_suspended(layout: Layout) -> None:
    for found in ranks.run(layout.world_size, timeouts, layout, connect=False):
        assert len(found) >= 4
        assert set(found.values()) == {timedelta(days=7)}


def failing_share() -> tuple[str, int]:
    def make() -> None:
        raise MachineError("the disk is full")

    try:
        broadcast_from_rank0(make)
    except (MachineError, RankFailed) as error:
        result = type(error).__name__, error.exit_code
    assert broadcast_from_rank0(lambda: "goes on") == "goes on"
    return result


def test_an_error_of_rank_0_is_one_of_all() -> None:
    assert ranks.run(2, failing_share) == [("MachineError", 1), ("RankFailed", 1)]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "RANK=1, but not WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "but not LOCAL_WORLD_SIZE; start the processes with"),
        ({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "whole numbers"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "RANK must be from 0"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK must be from 0"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, "cannot be above WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "same number of processes on"),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "counted node by node"),
    ],
)
def test_bad_environment(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        of_environment()


def fails_to_join(place: Processes, address: str | None, port: str | None) -> str:
    """What a process says that joins with this environment."""
    for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)):
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        init_process_group(place, CPU, TimeLimitsConfig(init_seconds=5))
    except (UserError, MachineError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def error_of(place: Processes, address: str | None, port: int | str | None) -> str:
    """That of a process of its own, as joining happens once."""
    (said,) = ranks.run(1, fails_to_join, place, address, None if port is None else str(port), connect=False)
    return str(said)


@pytest.mark.parametrize(("address", "port"), [(None, 29500), ("127.0.0.1", None), ("127.0.0.1", 99999)])
def test_no_place_to_meet(address: str | None, port: int | None) -> None:
    error = error_of(Processes(0, 2, 0, 2), address, port)
    assert error.startswith("UserError") and "MASTER_ADDR and MASTER_PORT" in error


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        error = error_of(Processes(0, 2, 0, 2), "127.0.0.1", taken.getsockname()[1])
    assert error.startswith("MachineError: rank 0 cannot listen at 127.0.0.1:")
    assert "MASTER_PORT" in error


@pytest.mark.slow
@pytest.mark.guard
def test_rank_0_is_not_there() -> None:
    error = error_of(Processes(1, 2, 1, 2), "127.0.0.1", ranks.free_port())
    assert error.startswith("MachineError: rank 1 on ")
    assert "could not reach rank 0 at 127.0.0.1:" in error
    assert "raise launch.time_limits.init_seconds (5) if that takes longer" in error


@pytest.mark.guard
def test_too_few_come() -> None:
    error = error_of(Processes(0, 3, 0, 3), "127.0.0.1", ranks.free_port())
    assert error.startswith("MachineError: only 1 of 3 ranks reached ")
    assert "missing: rank 1, rank 2" in error


def disagree(change: Callable[[Processes], Processes]) -> str | None:
    """Join with changed numbers; what is wrong with them, if this rank is the one that found out."""
    try:
        init_process_group(change(of_environment()), CPU, TimeLimitsConfig(init_seconds=10))
    except UserError as error:
        if not isinstance(error, MachineError):  # the others wait in vain
            return str(error)
    except RankFailed:
        pass
    return None


def only_rank_1_waits() -> str:
    """What rank 1 of three is told, when rank 0 ends and rank 2 never comes."""
    place = of_environment()
    if place.rank == 2:
        return ""
    address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
    if place.rank == 0:
        store = dist.TCPStore(*address, None, is_master=True, wait_for_workers=False)
        store.wait(["pipeline/0/rank 1"], timedelta(seconds=20))
        time.sleep(0.5)
        return ""
    with pytest.raises(RankFailed) as told:
        init_process_group(place, CPU, TimeLimitsConfig(init_seconds=30))
    return str(told.value)


@pytest.mark.guard
def test_rank_0_that_ends_while_others_wait_for_more() -> None:
    _, told, _ = ranks.run(3, only_rank_1_waits, connect=False)
    assert told.startswith("rank 0 at 127.0.0.1:") and told.endswith(" has ended; its message says why")


def other_world(place: Processes) -> Processes:
    return Processes(place.rank, 2 + 2 * place.rank, place.local_rank, 2)


def other_node(place: Processes) -> Processes:
    return Processes(place.rank, 2, 0, 1 + place.rank)


def same_rank(place: Processes) -> Processes:
    time.sleep(place.rank)  # the one that opens the port comes first
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(place.rank == 1)
    return Processes(0, 2, 0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(other_world, "WORLD_SIZE=", marks=pytest.mark.guard),
        pytest.param(other_node, "LOCAL_WORLD_SIZE=", marks=pytest.mark.slow),
        pytest.param(same_rank, "two processes have RANK=0", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_do_not_agree(change: Callable[[Processes], Processes], message: str) -> None:
    found = [text for text in ranks.run(2, disagree, change, connect=False) if text]
    assert len(found) == 1
    assert message in found[0]


def test_error_files(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(error: BaseException) -> Any:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        try:
            raise error
        except BaseException as caught:
            record_error(caught)
            record_error(ValueError("a later one"))
        return read_error(file)

    monkeypatch.setenv("RANK", "0")
    mistake = record(KeyError("k"))
    assert (mistake.code, mistake.message, mistake.was_shown) == (1, "KeyError: 'k'", True)
    assert mistake.traceback.startswith("Traceback")
    monkeypatch.setenv("RANK", "1")
    known = record(UserError("wrong"))
    assert (known.code, known.message, known.traceback, known.was_shown) == (2, "wrong", "", False)
    assert record(RankFailed("rank 0 has failed", 77)).consequence
    assert read_error(tmp_path / "none.json") is None
    (tmp_path / "cut.json").write_text("{")
    assert read_error(tmp_path / "cut.json") is None


def test_torch_errors_are_consequences() -> None:
    assert is_consequence(dist.DistBackendError("NCCL error in ..."))
    assert is_consequence(RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed"))
    assert not is_consequence(RuntimeError("shape mismatch"))
    cause = MachineError("no connection")
    cause.__cause__ = dist.DistNetworkError("refused")
    assert not is_consequence(cause), "it has been understood"


def test_a_group_that_was_made_anew_has_a_background_group_of_its_own() -> None:
    alone = Processes(0, 1, 0, 1)
    init_process_group(alone, CPU, TimeLimitsConfig())
    first = background_group()
    dist.destroy_process_group()
    init_process_group(alone, CPU, TimeLimitsConfig())
    assert background_group() is not first
    assert broadcast_from_rank0(lambda: 1, background_group()) == 1


def test_a_group_of_the_cpu_is_none_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, made = Processes(0, 1, 0, 1), []
    init_process_group(alone, CPU, TimeLimitsConfig())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    begin = dist.init_process_group

    def spy(backend: str, **how: Any) -> None:
        made.append(backend)
        begin("gloo", **how)

    monkeypatch.setattr(dist, "init_process_group", spy)
    for device in (CPU, torch.device("cuda", 0), torch.device("cuda", 0), CPU):
        init_process_group(alone, device, TimeLimitsConfig())
    assert made == ["cpu:gloo,cuda:nccl", "gloo"]
