"""Ranks look for damage together, before anything is loaded, and agree on what the run goes on from."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from pipeline.common.errors import EXIT_OTHER, EXIT_REFUSED, RankFailed, UserError
from pipeline.config.run import ResumeConfig
from pipeline.train.checkpoint import committed
from pipeline.train.checkpoint.manager import Checkpoints, Files, record_of
from pipeline.train.checkpoint.resume_point import files_by_rank, resume_point, rewind_point
from pipeline.train.distributed.process_group import barrier
from tests.train.distributed.ranks import Ranks

pytestmark = pytest.mark.parallel

WORLD = 3
FILES = 5


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD, connect=True) as ranks:
        yield ranks


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """Steps 10, 20 and 30, of some files of different sizes."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        tmp = checkpoints.begin(step, 1)
        files: Files = {}
        for number in range(FILES):
            path = tmp / f"__{number}_0.distcp"
            path.write_bytes(bytes([step]) * (1000 * (number + 1)))
            files[path.name] = record_of(path)
        checkpoints.commit(tmp, step, files, {})
    return checkpoints


def find(
    folders: list[Path], keys: dict[str, Any], before: int | None = None, patience: float = 60.0
) -> dict[str, Any]:
    """The outcome on one rank, and the files that it has read."""
    import torch.distributed as dist

    hashed: list[str] = []
    original = committed.file_hash

    def file_hash(path: Path, *arguments: Any, **options: Any) -> int:
        if path.suffix == ".distcp" or path.name == "state.json":
            hashed.append(f"{path.parent.name}/{path.name}")
        return original(path, *arguments, **options)

    checkpoints = Checkpoints(folders[min(dist.get_rank(), len(folders) - 1)])
    config = ResumeConfig.model_validate(keys)
    said: list[str] = []
    committed.PATIENCE_S = patience
    committed.file_hash = file_hash
    try:
        if before is None:
            found = resume_point(checkpoints, config, said.append)
            there = len(checkpoints.all())
            barrier()
            if found is not None and dist.get_rank() == 0:
                assert there == 3, "nothing has been moved yet"
                checkpoints.resume_from(found, config.step, said.append)
        else:
            found = rewind_point(checkpoints, config, before, said.append)
        error, step = None, found.step if found else None
    except (UserError, RankFailed) as failure:
        error, step = (type(failure).__name__, failure.exit_code, str(failure)), None
    finally:
        committed.file_hash = original
        committed.PATIENCE_S = 60.0
    return {"step": step, "error": error, "hashed": hashed, "said": said}


def flip(checkpoints: Checkpoints, step: int, number: int) -> None:
    path = checkpoints.folder / f"step-{step:08d}" / f"__{number}_0.distcp"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def of_step(outcomes: list[dict[str, Any]], step: int) -> list[list[str]]:
    """Files with tensors that each rank has read of a checkpoint."""
    return [[name for name in each["hashed"] if name.startswith(f"step-{step:08d}/__")] for each in outcomes]


def test_each_file_is_read_once_by_one_of_the_ranks(ranks: Ranks, checkpoints: Checkpoints) -> None:
    outcomes = ranks.call(find, [checkpoints.folder], {})
    assert [each["step"] for each in outcomes] == [30] * WORLD
    read = of_step(outcomes, 30)
    assert all(read)
    assert Counter(chain(*read)) == Counter(f"step-00000030/__{number}_0.distcp" for number in range(FILES))
    assert of_step(outcomes, 20) == of_step(outcomes, 10) == [[], [], []]


@pytest.mark.parametrize("number", range(FILES))
def test_a_flipped_bit_is_found_by_whoever_reads_it_and_all_go_on_from_the_parent(
    ranks: Ranks, checkpoints: Checkpoints, number: int
) -> None:
    flip(checkpoints, 30, number)
    outcomes = ranks.call(find, [checkpoints.folder], {})
    assert [each["step"] for each in outcomes] == [20] * WORLD
    assert f"__{number}_0.distcp" in outcomes[0]["said"][0]
    assert outcomes[1]["said"] == outcomes[2]["said"] == []
    assert [each.step for each in checkpoints.all()] == [10, 20]


def test_sizes_alone_are_looked_at_where_that_is_asked_for(ranks: Ranks, checkpoints: Checkpoints) -> None:
    flip(checkpoints, 30, 1)
    outcomes = ranks.call(find, [checkpoints.folder], {"verify_on_load": "size"})
    assert [each["step"] for each in outcomes] == [30] * WORLD
    assert of_step(outcomes, 30) == [[], [], []]
    (checkpoints.folder / "step-00000030" / "__1_0.distcp").write_bytes(b"short")
    outcomes = ranks.call(find, [checkpoints.folder], {"verify_on_load": "size"})
    assert [each["step"] for each in outcomes] == [20] * WORLD


def test_a_rewind_is_verified_alike(ranks: Ranks, checkpoints: Checkpoints) -> None:
    flip(checkpoints, 20, 2)
    outcomes = ranks.call(find, [checkpoints.folder], {}, 25)
    assert [each["step"] for each in outcomes] == [10] * WORLD
    assert sorted(chain(*of_step(outcomes, 10))) == [f"step-00000010/__{number}_0.distcp" for number in range(FILES)]
    assert of_step(outcomes, 30) == [[], [], []]
    assert [each.step for each in checkpoints.abandoned()] == [20, 30]
    outcomes = ranks.call(find, [checkpoints.folder], {}, 5)
    assert [each["step"] for each in outcomes] == [None] * WORLD


def test_a_step_that_is_asked_for_is_gone_back_to(ranks: Ranks, checkpoints: Checkpoints) -> None:
    outcomes = ranks.call(find, [checkpoints.folder], {"from": 10})
    assert [each["step"] for each in outcomes] == [10] * WORLD
    assert "moving step-00000030 to" in outcomes[0]["said"][0]
    assert [each.step for each in checkpoints.abandoned()] == [20, 30]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"from": 15}, "a checkpoint of step 15 (steps there: 10, 20, 30); choose one of them"),
        ({"from": 20}, "resume.from is 20, but checkpoint step-00000020 is damaged"),
    ],
)
def test_a_step_that_is_asked_for_and_not_to_be_had_is_an_error_on_all(
    ranks: Ranks, checkpoints: Checkpoints, keys: dict[str, Any], message: str
) -> None:
    flip(checkpoints, 20, 4)
    outcomes = ranks.call(find, [checkpoints.folder], keys)
    kind, code, text = outcomes[0]["error"]
    assert (kind, code) == ("UserError", EXIT_REFUSED)
    assert message in text
    assert [each["error"][:2] for each in outcomes[1:]] == [("RankFailed", EXIT_REFUSED)] * (WORLD - 1)
    assert [each.step for each in checkpoints.all()] == [10, 20, 30]


def test_latest_must_be_there_where_it_is_asked_for(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks.call(find, [tmp_path / "none"], {"from": "latest"})
    assert "does not have a checkpoint (steps there: none)" in outcomes[0]["error"][2]
    outcomes = ranks.call(find, [tmp_path / "none"], {})
    assert [(each["step"], each["error"]) for each in outcomes] == [(None, None)] * WORLD


def test_a_machine_that_does_not_see_the_folder_is_told_apart_from_damage(
    ranks: Ranks, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    outcomes = ranks.call(find, [checkpoints.folder, tmp_path / "elsewhere"], {}, None, 0.2)
    kind, code, text = outcomes[0]["error"]
    assert (kind, code) == ("MachineError", EXIT_OTHER)
    assert "COMMIT" in text and "run.dir" in text
    assert [each["error"][0] for each in outcomes[1:]] == ["RankFailed"] * (WORLD - 1)
    assert [each.step for each in checkpoints.all()] == [10, 20, 30]


def test_a_name_that_a_network_file_system_shows_late_is_waited_for(
    ranks: Ranks, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    late = tmp_path / "late"

    def show() -> None:
        time.sleep(0.5)
        os.symlink(checkpoints.folder, late)

    thread = threading.Thread(target=show)
    thread.start()
    outcomes = ranks.call(find, [checkpoints.folder, late], {})
    thread.join()
    assert [each["step"] for each in outcomes] == [30] * WORLD


def test_shares_are_even_and_cover_every_file_once() -> None:
    files: Files = {f"f{number}": (size, "") for number, size in enumerate([7, 9, 2, 2, 5, 1, 0, 4])}
    for count in (1, 2, 3, 20):
        dealt = files_by_rank(files, count)
        assert sorted(chain(*dealt)) == sorted(files)
        loads = [sum(files[name][0] for name in names) for names in dealt]
        assert max(loads) - min(loads) <= 9
    assert [sum(files[name][0] for name in names) for names in files_by_rank(files, 3)] == [11, 10, 9]
