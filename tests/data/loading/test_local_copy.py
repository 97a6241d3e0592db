"""Copies on the node's own disk: checked, complete, made once, whatever happens meanwhile."""

import errno
import fcntl
import itertools
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from pipeline.common import retry
from pipeline.common.errors import MachineError, UserError
from pipeline.common.hashing import file_hash
from pipeline.config.blend import StageConfig
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.indexed import HashedFile, IndexedWriter, part_files, part_prefix
from pipeline.data.datasets.manifest import PART, write_dataset
from pipeline.data.datasets.packing.files import block_path, packs_folder
from pipeline.data.datasets.packing.packs import Packs
from pipeline.data.loading import local_copy
from pipeline.data.loading.local_copy import copy_locally
from pipeline.data.order.blend import UNIT
from pipeline.data.order.journal import Journal
from pipeline.data.order.segments import Segment, SourceState
from pipeline.data.packing.make import PackMaker
from pipeline.data.tokenization.tokenizer import Tokenizer
from tests.data.runs import make_config

PARTS, DOCUMENTS, LENGTH = 6, 10, 50


def write(folder, seed=0, parts=PARTS):
    """A dataset of parts of 10 documents of 50 tokens, all different; part 2 is empty."""
    tokenizer = Tokenizer.train(iter(["a text"]), TokenizerConfig.model_validate({"train": {"vocab_size": 300}}))
    chance = np.random.default_rng(seed)
    table = np.zeros(parts, PART)
    for unit in range(parts):
        prefix = part_prefix(folder, unit)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        documents = 0 if unit == 2 else DOCUMENTS
        with IndexedWriter(prefix, tokenizer.dtype) as writer:
            for _ in range(documents):
                writer.add_document(chance.integers(1, 200, LENGTH))
        part_files(prefix)[2].write_bytes(bytes(24 * documents))
        table[unit] = (LENGTH * documents, documents, unit, 0, writer.bin.hash, writer.idx.hash, 0, 0)
    about = {"source": "s", "split": "train", "text_bytes": 1, "config_hash": "", "code_version": "", "settings": {}}
    write_dataset(folder, table, tokenizer, about)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write(tmp_path_factory.mktemp("made") / "train")


@pytest.fixture
def shared(made, tmp_path):
    return shutil.copytree(made, tmp_path / "shared" / "s" / "train")


def local_config(root, directory, data="local", **options):
    config = make_config(root, [{"name": "s", "dataset": str(root / "shared" / "s")}], **options)
    return config.model_copy(update={"stage": StageConfig(data=data, dir=directory)})


def journal_of(*segments):
    """Segments of 10 steps of 2 samples, each {source: documents}."""
    return Journal(
        seed=1,
        segments=[
            Segment(
                first_step=10 * number,
                first_sample=20 * number,
                batch_size=2,
                sequence_length=8,
                sources={
                    name: SourceState(
                        tokens=100, documents=documents, weight=UNIT // len(sources), offset=0, lap=0, cursor=0
                    )
                    for name, documents in sources.items()
                },
            )
            for number, sources in enumerate(segments)
        ],
    )


ALL = journal_of({"s": None})


def stage(root, directory, journal=ALL, datasets=None, **options):
    datasets = datasets or {"s": Dataset.open(root / "shared" / "s" / "train")}
    return copy_locally(local_config(root, directory), datasets, journal, **options)


def parts_of(folder):
    """Files of parts below a folder, by name: content."""
    return {path.name: path.read_bytes() for path in folder.rglob("parts/*/*") if path.suffix in (".bin", ".idx")}


def temporary(folder):
    return [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


def own(folder):
    """Where this user's copies are."""
    return folder / f"pipeline-data-{os.geteuid()}"


def identity(path):
    """Of a file; inodes alone are used again."""
    return path.stat().st_ino, path.stat().st_mtime_ns


def test_shared_is_as_it_is(shared, tmp_path):
    dataset = Dataset.open(shared)
    config = local_config(tmp_path, tmp_path / "node", data="shared")
    assert copy_locally(config, {"s": dataset}, ALL)["s"] is dataset
    assert not (tmp_path / "node").exists()


def test_a_copy_is_the_same_dataset(shared, tmp_path, capsys):
    dataset = Dataset.open(shared)
    copy = stage(tmp_path, tmp_path / "node")["s"]
    assert copy.folder == own(tmp_path / "node") / dataset.fingerprint
    assert (copy.fingerprint, copy.manifest) == (dataset.fingerprint, dataset.manifest)
    assert copy.read(0, copy.tokens).tolist() == dataset.read(0, dataset.tokens).tolist()
    assert copy.document_starts(0, copy.tokens).tolist() == dataset.document_starts(0, dataset.tokens).tolist()
    assert parts_of(copy.folder) == parts_of(shared)
    assert "copying 12 files of datasets" in capsys.readouterr().out
    assert temporary(tmp_path) == []
    assert not list(copy.folder.rglob("*.prov"))  # training does not need it


def test_packs_are_copied(shared, tmp_path):
    dataset = Dataset.open(shared)
    packing = PackMaker(dataset, 8)
    packing.make(Console(quiet=True), 1)
    config = local_config(tmp_path, tmp_path / "node", loader={"packing": "best_fit"})
    assert config.pack_lengths == [8]

    def packs():
        copy = copy_locally(config, {"s": dataset}, ALL)["s"]
        found = Packs.open(copy, 8)
        return copy.folder / "packs" / "8", found.chunks(np.arange(found.count))

    folder, chunks = packs()
    expected = Packs.open(dataset, 8)
    assert [each.tolist() for each in chunks] == [each.tolist() for each in expected.chunks(np.arange(expected.count))]
    block = folder / "blocks" / "00000" / "00000000.bin"
    kept = {path: identity(path) for path in folder.rglob("*.*")}
    assert sorted(path.name for path in kept) == ["00000000.bin", "groups.bin", "packs.json"]
    os.truncate(block, 40)
    packs()
    assert block.read_bytes() == block_path(packs_folder(shared, 8), 0).read_bytes()
    assert [path for path in kept if identity(path) != kept[path]] == [block]
    block_path(packs_folder(shared, 8), 0).write_bytes(bytes(block.stat().st_size))
    block.unlink()
    with pytest.raises(UserError, match=f"pipeline data pack {shared} --length 8`"):
        packs()
    packing.make(Console(quiet=True), 1, hashes=True)
    packs()


def test_by_default_in_the_folder_for_temporary_files(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    (tmp_path / "node").mkdir()
    assert stage(tmp_path, None)["s"].folder.parent == own(tmp_path / "node")


def test_read_by_pread(shared, tmp_path):
    config = local_config(tmp_path, tmp_path / "node", loader={"read": "pread"})
    assert copy_locally(config, {"s": Dataset.open(shared)}, ALL)["s"].read_by == "pread"


def test_a_second_start_reads_nothing(shared, tmp_path, monkeypatch, capsys):
    first = stage(tmp_path, tmp_path / "node")["s"]
    monkeypatch.setattr(local_copy, "_make", None)
    capsys.readouterr()
    shutil.rmtree(shared / "parts")  # not needed any more
    again = stage(tmp_path, tmp_path / "node")["s"]
    assert again.read(0, again.tokens).tolist() == first.read(0, first.tokens).tolist()
    assert capsys.readouterr().out == ""


def test_a_file_that_was_changed_is_copied_again(shared, tmp_path):
    copy = stage(tmp_path, tmp_path / "node")["s"]
    files = sorted(path for path in copy.folder.rglob("parts/*/*"))
    kept = {path: identity(path) for path in files}
    files[0].write_bytes(bytes(files[0].stat().st_size))
    os.truncate(files[3], 10)
    files[5].unlink()
    copy = stage(tmp_path, tmp_path / "node")["s"]
    assert parts_of(copy.folder) == parts_of(shared)
    # The others are the same files as before.
    assert [identity(path) == kept[path] for path in files] == [number not in (0, 3, 5) for number in range(12)]


def test_without_receipts_files_are_read_and_kept(shared, tmp_path, monkeypatch):
    copy = stage(tmp_path, tmp_path / "node")["s"]
    (copy.folder / "checked.jsonl").unlink()
    monkeypatch.setattr(local_copy._Transfer, "_copy", None)
    stage(tmp_path, tmp_path / "node")
    monkeypatch.setattr(local_copy, "_make", None)
    stage(tmp_path, tmp_path / "node")


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ((0, 10), [0]),
        ((9, 11), [0, 1]),
        ((10, 20), [1]),
        ((19, 21), [1, 3]),
        ((0, 50), [0, 1, 3, 4, 5]),
        ((49, 50), [5]),
    ],
)
def test_only_parts_of_the_slice(shared, tmp_path, documents, expected):
    """Part 2 is empty."""
    dataset = Dataset.open(shared)
    copy = stage(tmp_path, tmp_path / "node", journal_of({"s": documents}))["s"]
    assert sorted(parts_of(copy.folder)) == sorted(f"{n:08d}.{kind}" for n in expected for kind in ("bin", "idx"))
    first, end = (dataset.document_start(document) for document in documents)
    assert copy.read(first, end - first).tolist() == dataset.read(first, end - first).tolist()
    # What a later start needs beside it is added.
    copy = stage(tmp_path, tmp_path / "node")["s"]
    assert parts_of(copy.folder) == parts_of(shared)


def test_sources_of_one_dataset_share_the_copy(shared, tmp_path):
    datasets = {name: Dataset.open(shared) for name in ("a", "b")}
    copies = stage(tmp_path, tmp_path / "node", journal_of({"a": (0, 10), "b": (40, 50)}), datasets)
    assert copies["a"].folder == copies["b"].folder
    assert sorted(parts_of(copies["a"].folder)) == ["00000000.bin", "00000000.idx", "00000005.bin", "00000005.idx"]


def test_segments_that_are_over_need_nothing(shared, tmp_path):
    other = Dataset.open(write(tmp_path / "shared" / "o" / "train", seed=1))
    datasets = {"s": Dataset.open(shared), "o": other}
    journal = journal_of({"s": (0, 10), "o": None}, {"s": (10, 20)}, {"s": (30, 40)})
    copies = stage(tmp_path, tmp_path / "node", journal, datasets, first_step=10)
    assert copies["o"] is other  # it never comes again
    assert sorted(parts_of(copies["s"].folder)) == ["00000001.bin", "00000001.idx", "00000004.bin", "00000004.idx"]


def test_what_was_not_copied_is_read_where_it_came_from(shared, tmp_path):
    """Where slices begin is asked of parts that no step draws, and a run may go back to a phase that is over."""
    dataset = Dataset.open(shared)
    journal = journal_of({"s": (0, 10)}, {"s": (10, 20)})
    copy = stage(tmp_path, tmp_path / "node", journal, first_step=10)["s"]
    assert sorted(parts_of(copy.folder)) == ["00000001.bin", "00000001.idx"]
    every = range(dataset.documents + 1)
    assert [copy.document_start(n) for n in every] == [dataset.document_start(n) for n in every]
    assert copy.read(0, copy.tokens).tolist() == dataset.read(0, dataset.tokens).tolist()


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_damaged_part(shared, tmp_path, suffix):
    path = shared / "parts" / "00000" / f"00000003.{suffix}"
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(UserError, match=r"other xxh3.*pipeline data verify.*pipeline preprocess") as error:
        stage(tmp_path, tmp_path / "node")
    assert str(path) in str(error.value)
    assert temporary(tmp_path) == []
    there = parts_of(tmp_path / "node")
    assert f"00000003.{suffix}" not in there
    assert there.items() <= parts_of(shared).items()
    path.write_bytes(sound)
    assert parts_of(stage(tmp_path, tmp_path / "node")["s"].folder) == parts_of(shared)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_missing_part(shared, tmp_path, suffix):
    path = shared / "parts" / "00000" / f"00000003.{suffix}"
    path.unlink()
    with pytest.raises(UserError, match=f"{path} is missing; run `pipeline preprocess"):
        stage(tmp_path, tmp_path / "node")
    assert parts_of(tmp_path / "node") == {}


def test_errors_that_pass(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "PAUSES_S", (0.0, 0.0, 0.0))
    commit, failed = HashedFile.commit, []

    def fails(self):
        if len(failed) < 3:
            failed.append(self.final)
            raise OSError(errno.EIO, "Input/output error")
        commit(self)

    monkeypatch.setattr(HashedFile, "commit", fails)
    copy = stage(tmp_path, tmp_path / "node")["s"]
    assert len(failed) == 3
    assert parts_of(copy.folder) == parts_of(shared)
    assert temporary(tmp_path) == []


def test_errors_that_do_not_pass(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "PAUSES_S", (0.0, 0.0, 0.0))

    def fails(self):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(HashedFile, "commit", fails)
    with pytest.raises(MachineError, match=r"copying it to .*node/pipeline-data.* failed 4 times, ESTALE"):
        stage(tmp_path, tmp_path / "node")
    assert temporary(tmp_path) == []


def test_a_folder_that_cannot_be_used(shared, tmp_path):
    (tmp_path / "node").write_text("a file")
    with pytest.raises(MachineError, match=r"stage.dir: .*node/pipeline-data-\d+ cannot be used: .*; set stage.dir to"):
        stage(tmp_path, tmp_path / "node")


def test_only_this_user_may_write_to_the_folder(shared, tmp_path):
    previous = os.umask(0)
    try:
        stage(tmp_path, tmp_path / "node")
    finally:
        os.umask(previous)
    assert own(tmp_path / "node").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o2775])
def test_a_folder_that_others_may_replace(shared, tmp_path, mode):
    """Whoever may write to the folder above can put one of theirs in the place of the copies, while they are read."""
    node = tmp_path / "team" / "node"
    node.mkdir(parents=True)
    (node / "of others").touch()
    for folder in (node, node.parent):
        os.chown(folder, -1, os.getegid() + (os.geteuid() == 0))  # a group that is not the user's own
        folder.chmod(mode)
        with pytest.raises(MachineError, match=rf"others may write to {folder}, and put a folder of theirs"):
            stage(tmp_path, node)
        folder.chmod(mode | 0o1000)
        stage(tmp_path, node)
        folder.chmod(0o755)


def test_a_folder_of_copies_alone_is_closed_to_others(shared, tmp_path):
    """With a umask of 0002, earlier versions left it open."""
    previous = os.umask(0o002)
    try:
        stage(tmp_path, tmp_path / "a" / "node")
        assert {each.stat().st_mode & 0o777 for each in (tmp_path / "a", tmp_path / "a" / "node")} == {0o755}
        (tmp_path / "a" / "node").chmod(0o777)
        stage(tmp_path, tmp_path / "a" / "node")
    finally:
        os.umask(previous)
    assert (tmp_path / "a" / "node").stat().st_mode & 0o777 == 0o755


def test_a_lock_that_cannot_be_had(shared, tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(MachineError, match=r"stage.dir: .* cannot be used: No locks available"):
        stage(tmp_path, tmp_path / "node")


@pytest.mark.parametrize("kind", ["of another user", "everybody's", "link", "link to nothing", "file"])
def test_what_another_user_planted_is_not_touched(shared, tmp_path, monkeypatch, kind):
    """The name of the folder can be guessed, and /tmp is everybody's."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    place = own(tmp_path / "node")
    place.parent.mkdir()
    planted = place
    if kind == "link":
        planted = tmp_path / "theirs"
        place.symlink_to(planted)
    if kind == "link to nothing":
        place.symlink_to(tmp_path / "nothing")
    elif kind == "file":
        place.write_text("")
    else:
        planted.mkdir()
        (planted / "lock").symlink_to(precious)
        folder = planted / Dataset.open(shared).fingerprint
        folder.mkdir()
        (folder / "checked.jsonl").symlink_to(precious)
    if kind == "everybody's":
        place.chmod(0o777)
    if kind == "of another user":
        if os.geteuid() == 0:
            os.chown(place, 12345, 12345)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
            place.rename(own(place.parent))
    with pytest.raises(MachineError, match=r"stage.dir: .*/node/pipeline-data-\d+ cannot be used: "):
        stage(tmp_path, tmp_path / "node")
    assert precious.read_text() == "mine"
    assert not (tmp_path / "nothing").exists()
    assert not list(tmp_path.rglob("parts/*/*.bin.*")) and not list((tmp_path / "node").rglob("*.bin"))


@pytest.fixture
def small_disk(tmp_path):
    """mount(options) makes a small disk, or changes it; skips where this process may not mount."""
    folder = tmp_path / "node"
    folder.mkdir()
    mounted = []

    def mount(options):
        how = ["-o", f"remount,{options}"] if mounted else ["-t", "tmpfs", "-o", options, "tmpfs"]
        result = subprocess.run(["mount", *how, str(folder)], capture_output=True, text=True)
        if result.returncode:
            pytest.skip(f"mounting a tmpfs is not possible here: {result.stderr.strip()}")
        mounted.append(folder)

    yield mount
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_too_little_space_is_found_before(shared, tmp_path, small_disk, monkeypatch):
    small_disk("size=64k")
    monkeypatch.setattr(local_copy, "_ROOM", 60 * 2**10)
    (own(tmp_path / "node") / "another").mkdir(parents=True)
    with pytest.raises(MachineError) as error:
        stage(tmp_path, tmp_path / "node")
    needed = sum(map(len, parts_of(shared).values()))
    text = str(error.value)
    assert text.startswith(f"stage.dir: {own(tmp_path / 'node')} has ")
    assert f"the parts that the run reads need {needed / 1000:.1f} kB more" in text
    assert f"remove copies of other datasets that no run needs ({own(tmp_path / 'node')}/another)" in text
    assert "stage.data: shared" in text
    assert parts_of(tmp_path / "node") == {}


def test_a_disk_that_fills_up(shared, tmp_path, small_disk, monkeypatch):
    """Others write there too: at any write, nothing half-copied stays, and it goes on when there is room."""
    monkeypatch.setattr(local_copy, "_ROOM", -(2**30))
    failed, copy = 0, None
    for pages in range(4, 64, 2):
        small_disk(f"size={4096 * pages}")
        try:
            copy = stage(tmp_path, tmp_path / "node")["s"]
        except (MachineError, OSError) as error:
            failed += 1
            assert "stage.dir" in str(error) or "No space left" in str(error)
            assert temporary(tmp_path) == []
            assert parts_of(tmp_path / "node").items() <= parts_of(shared).items()
        else:
            break
    assert failed > 3 and copy is not None
    assert parts_of(copy.folder) == parts_of(shared)


class Gated:
    """A process that stages, and after so many writes waits for the file `go`. A fork, so nothing is imported again."""

    def __init__(self, root, allowed=10**9):
        reading, writing = os.pipe()
        self.process = multiprocessing.get_context("fork").Process(target=self._run, args=(root, allowed, writing))
        self.process.start()
        os.close(writing)
        self.stdout = os.fdopen(reading)
        self.pid = self.process.pid

    def _run(self, root, allowed, writing):
        sys.stdout = os.fdopen(writing, "w", buffering=1)
        write, numbers = HashedFile.write, itertools.count()

        def gated(file, data):
            write(file, data)
            file.file.flush()
            while next(numbers) >= allowed and not (root / "go").exists():
                time.sleep(0.01)

        HashedFile.write, local_copy.CHUNK_BYTES = gated, 200
        copy = stage(root, root / "node")["s"]
        print("sum", int(copy.read(0, copy.tokens).sum()))

    def end(self):
        """Wait for its end. Returns what it said and its exit code."""
        with self.stdout:
            said = self.stdout.read()
        self.process.join(60)
        return said, self.process.exitcode

    def kill(self):
        self.process.kill()
        return self.end()


def wait_for(condition, gated):
    end = time.monotonic() + 60
    while not condition():
        assert gated.process.is_alive(), gated.end()
        assert time.monotonic() < end
        time.sleep(0.005)


def test_killed_while_copying(shared, tmp_path):
    process = Gated(tmp_path, 25)  # a .bin takes 5
    wait_for(lambda: parts_of(tmp_path / "node") and temporary(tmp_path / "node"), process)
    process.kill()
    there = parts_of(tmp_path / "node")
    assert there and there.items() < parts_of(shared).items()
    assert temporary(tmp_path / "node")
    kept = {path: identity(path) for path in (tmp_path / "node").rglob("parts/*/*") if path.name in there}
    copy = stage(tmp_path, tmp_path / "node")["s"]
    assert parts_of(copy.folder) == parts_of(shared)
    assert temporary(tmp_path) == []
    assert {path: identity(path) for path in kept} == kept


def test_one_process_copies_and_others_wait(shared, tmp_path):
    one = Gated(tmp_path, 5)
    wait_for(lambda: temporary(tmp_path / "node"), one)
    others = [Gated(tmp_path) for _ in range(2)]
    expected = f"waiting for process {one.pid}, which copies datasets to {own(tmp_path / 'node')}\n"
    assert [other.stdout.readline() for other in others] == [expected] * 2
    (tmp_path / "go").touch()
    dataset = Dataset.open(shared)
    total = f"sum {dataset.read(0, dataset.tokens).sum()}\n"
    (said, code), *rest = [process.end() for process in (one, *others)]
    assert said.startswith("copying 12 files") and said.endswith(total) and code == 0
    assert rest == [(total, 0)] * 2


def test_a_dead_copier_frees_the_others(shared, tmp_path):
    one = Gated(tmp_path, 2)
    wait_for(lambda: temporary(tmp_path / "node"), one)
    other = Gated(tmp_path)
    assert other.stdout.readline().startswith(f"waiting for process {one.pid}")
    one.kill()
    said, code = other.end()
    assert code == 0 and said.startswith("copying"), said
    folder = next(path for path in own(tmp_path / "node").iterdir() if path.is_dir())
    assert parts_of(folder) == parts_of(shared)
    assert temporary(tmp_path) == []


def test_hashes_are_those_of_the_files(shared):
    """What the tests rest on."""
    table = np.fromfile(shared / "parts.bin", PART)
    for unit in range(PARTS):
        bin_path, idx_path, _ = part_files(part_prefix(Path(shared), unit))
        assert (file_hash(bin_path), file_hash(idx_path)) == (table[unit]["bin"], table[unit]["idx"])
