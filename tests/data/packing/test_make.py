"""Packs on disk: equal bytes however they are made, and made again where they are damaged."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pipeline.common.console import Console
from pipeline.common.errors import UserError
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.packing import blocks
from pipeline.data.datasets.packing.files import block_path, packs_folder
from pipeline.data.datasets.packing.packs import Packs
from pipeline.data.datasets.packing.verify import check_packs, verify_packs
from pipeline.data.packing.make import PackMaker
from tests.data.datasets.packing.made import some_lengths, write_lengths
from tests.data.runs import tree

LENGTH = 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "GROUP", 20)
    monkeypatch.setattr(blocks, "BLOCK", 60)


@pytest.fixture
def folder(tmp_path):
    return write_lengths(tmp_path / "s" / "train", some_lengths(LENGTH))


def make(folder: Path, workers: int = 1, hashes: bool = False) -> dict[str, bytes]:
    PackMaker(Dataset.open(folder), LENGTH).make(Console(quiet=True), workers, hashes=hashes)
    return tree(packs_folder(folder, LENGTH))


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_only_the_folder_of_packs_is_written(folder):
    before = tree(folder)
    made = make(folder)
    after = tree(folder)
    assert {name: data for name, data in after.items() if not name.startswith("packs/")} == before
    assert sorted(made) == [
        *(f"blocks/00000/0000000{block}.bin" for block in range(4)),
        "groups.bin",
        "packs.json",
        *(f"receipts/00000/0000000{block}.json" for block in range(4)),
    ]
    times = {path: path.stat().st_mtime_ns for path in packs_folder(folder, LENGTH).rglob("*")}
    assert make(folder, hashes=True) == made
    assert {path: path.stat().st_mtime_ns for path in packs_folder(folder, LENGTH).rglob("*")} == times


def change_index(packs: Path, old: str, new: str) -> None:
    """Change the first value behind `old`, which stays as long."""
    text = (packs / "packs.json").read_text()
    before, after = text.replace(" ", "").split(old, 1)
    (packs / "packs.json").write_text(before + new + after[len(new) - len(old) :])


DAMAGES = {
    "block": lambda packs: damage(block_path(packs, 1)),
    "cut": lambda packs: os.truncate(block_path(packs, 1), 40),
    "gone": lambda packs: block_path(packs, 3).unlink(),
    "groups": lambda packs: damage(packs / "groups.bin"),
    "index": lambda packs: (packs / "packs.json").write_bytes(b"{"),
    "hash": lambda packs: change_index(packs, '"xxh3":"', '"xxh3":"0'),
    "totals": lambda packs: change_index(packs, '"cut":', '"cut":1'),
    "no index": lambda packs: (packs / "packs.json").unlink(),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_repaired(folder, name):
    made = make(folder)
    assert not verify_packs(folder).problems
    DAMAGES[name](packs_folder(folder, LENGTH))
    found = verify_packs(folder)
    assert len(found.problems) == 1 and f"data pack {folder} --length {LENGTH}" in found.repairs[0]
    if name not in ("block", "hash", "totals"):  # sizes tell
        with pytest.raises(UserError, match=f"data pack {folder} --length {LENGTH}"):
            check_packs({"s": Dataset.open(folder)}, [LENGTH])
    assert make(folder, hashes=True) == made
    assert not verify_packs(folder).problems
    check_packs({"s": Dataset.open(folder)}, [LENGTH])


@pytest.mark.parametrize("read", ["mmap", "pread"])
def test_damage_is_found_when_opened(folder, read):
    make(folder)
    dataset = Dataset.open(folder, read)
    os.truncate(block_path(packs_folder(folder, LENGTH), 0), 40)
    found = Packs.open(dataset, LENGTH)
    with pytest.raises(UserError, match=f"data pack {folder} --length {LENGTH}"):
        found.packs_of(0)


@pytest.mark.parametrize("read", ["mmap", "pread"])
@pytest.mark.parametrize("place", [24 + 4 * 5 + 2, -8, -6, -4])
def test_damage_within_a_block_is_no_wrong_sample(folder, read, place):
    """Another bit in where a pack begins, and in the document and the tokens of a chunk."""
    make(folder)
    path = block_path(packs_folder(folder, LENGTH), 1)
    data = bytearray(path.read_bytes())
    data[place] ^= 0x40
    path.write_bytes(data)
    found = Packs.open(Dataset.open(folder, read), LENGTH)
    with pytest.raises(UserError, match=f"data pack {folder} --length {LENGTH}"):
        found.chunks(np.arange(found.count))


def test_a_damaged_receipt_gives_no_other_packs(folder):
    """Whatever it says of the packs of its block, the block itself has their number."""
    made = make(folder)
    receipt = packs_folder(folder, LENGTH) / "receipts/00000/00000001.json"
    whole = json.loads(receipt.read_bytes())
    for change in ({"groups": [1, *whole["groups"][1:]]}, {"chunks": 1}):
        receipt.write_text(json.dumps(whole | change))
        assert make(folder, hashes=True) == made


def test_an_index_without_its_blocks_is_damaged(folder):
    make(folder)
    path = packs_folder(folder, LENGTH) / "packs.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"blocks": []}))
    with pytest.raises(UserError, match=f"data pack {folder} --length {LENGTH}"):
        Packs.open(Dataset.open(folder), LENGTH)


def test_packs_of_another_dataset(folder, tmp_path):
    make(folder)
    other = write_lengths(tmp_path / "o" / "train", some_lengths(LENGTH)[:70])
    expected = make(other)
    os.rename(packs_folder(other, LENGTH), tmp_path / "kept")
    os.rename(folder / "packs", other / "packs")
    with pytest.raises(UserError):
        Packs.open(Dataset.open(other), LENGTH)
    assert len(verify_packs(other).problems) == 1
    assert make(other) == expected


def test_finished_packs_need_no_receipts(folder):
    made = make(folder)
    shutil.rmtree(packs_folder(folder, LENGTH) / "receipts")
    assert PackMaker(Dataset.open(folder), LENGTH).state().index is not None
    assert make(folder, hashes=True) == made


def test_lengths_that_were_not_made(folder):
    make(folder)
    with pytest.raises(UserError, match=f"data pack {folder} --length 32`"):
        Packs.open(Dataset.open(folder), 32)
    with pytest.raises(UserError):
        PackMaker(Dataset.open(folder), 0)


@pytest.mark.guard
def test_any_number_of_workers(folder, tmp_path):
    made = make(folder)
    for path in packs_folder(folder, LENGTH).rglob("*.*"):
        path.unlink()
    assert make(folder, workers=3) == made


KILLED = """
import sys, time
from pathlib import Path
from pipeline.common.console import Console
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.packing import blocks
from pipeline.data.packing import job
from pipeline.data.packing.make import PackMaker

blocks.GROUP, blocks.BLOCK = 20, 60
put = job.storage.put_json


def slow(path, value):  # the file of the block is there; its receipt is not
    if len(list(Path(sys.argv[4]).rglob("*.bin"))) >= int(sys.argv[5]):
        time.sleep(60)  # until it is killed, however late that comes
    put(path, value)


job.storage.put_json = slow
PackMaker(Dataset.open(Path(sys.argv[1])), int(sys.argv[2])).make(Console(quiet=True), int(sys.argv[3]))
"""


@pytest.mark.first(1)
@pytest.mark.guard
@pytest.mark.parametrize("workers", [1, 2])
def test_killed(folder, tmp_path, workers):
    expected = make(folder)
    for path in packs_folder(folder, LENGTH).rglob("*.*"):
        path.unlink()
    packs = packs_folder(folder, LENGTH)
    command = [sys.executable, "-c", KILLED, str(folder), str(LENGTH), str(workers), str(packs / "blocks")]
    for blocks_there in (1, 3):
        process = subprocess.Popen([*command, str(blocks_there)])
        while len(list((packs / "blocks").rglob("*.bin"))) < blocks_there:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(UserError):
            Packs.open(Dataset.open(folder), LENGTH)
    done = {path: path.stat().st_mtime_ns for path in (packs / "receipts").rglob("*.json")}
    assert make(folder) == expected
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert {path.name for path in packs.iterdir()} == {"blocks", "receipts", "groups.bin", "packs.json", "leases"}
