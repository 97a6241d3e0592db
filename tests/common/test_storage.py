"""Temporary files: whose they are, and which of them nobody needs any more."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import file_hash
from pipeline.data.datasets.adoption import _remove_stale

MAKE = "import sys; from pathlib import Path; from pipeline.common import storage\n"
MAKE += "tmp = storage.temporary(Path(sys.argv[1])); tmp.touch(); print(tmp, flush=True)\n"


def make(path, *before, after=""):
    """A temporary file by another process; the process, and the file."""
    command = [*before, sys.executable, "-c", MAKE + after, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, type(path)(process.stdout.readline().strip())


def test_what_a_dead_process_left_is_removed_and_a_living_one_s_is_not(tmp_path):
    process, tmp = make(tmp_path / "a.b.bin", after="sys.stdin.read()")
    storage.remove_if_stale(tmp)
    assert tmp.exists()
    process.communicate()
    storage.remove_if_stale(tmp)
    assert not tmp.exists()


@pytest.fixture
def in_a_container():
    """A command line that runs a command with pids of its own."""
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*command, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no namespaces here")
    return command


def test_a_process_of_another_container_is_not_taken_for_dead(tmp_path, in_a_container):
    """It has the same host name, and its pid is nobody's here, or another's."""
    process, tmp = make(tmp_path / "a.bin", *in_a_container, after="sys.stdin.read()")
    own = storage.temporary(tmp_path / "a.bin")
    assert tmp.name.split(".")[3] != own.name.split(".")[3]
    storage.remove_if_stale(tmp)
    assert tmp.exists()
    process.communicate()
    storage.remove_if_stale(tmp)
    assert tmp.exists()  # nobody here can know
    old = time.time() - 7 * 86_400
    os.utime(tmp, (old + 60, old + 60))
    storage.remove_if_stale(tmp)
    assert tmp.exists()
    os.utime(tmp, (old - 60, old - 60))
    storage.remove_if_stale(tmp)
    assert not tmp.exists()


def test_age_says_nothing_about_a_living_process(tmp_path):
    tmp = storage.temporary(tmp_path / "a.bin")
    tmp.touch()
    os.utime(tmp, (0, 0))
    storage.remove_if_stale(tmp)
    assert tmp.exists()


@pytest.mark.parametrize(
    "name", [".a.tmp", "a.host.1.0123abcd.tmp", ".a.host.x.0123abcd.tmp", ".a.host.1.ab.tmp", ".tmp"]
)
def test_other_names_are_not_ours(tmp_path, name):
    (tmp_path / name).touch()
    os.utime(tmp_path / name, (0, 0))
    storage.remove_if_stale(tmp_path / name)
    assert (tmp_path / name).exists()


def test_a_name_is_short(tmp_path):
    assert len(storage.temporary(tmp_path / "x").name) <= len(".x.") + 30


def test_half_an_adoption_of_another_container_stays(tmp_path, in_a_container):
    process, tmp = make(tmp_path / "train", *in_a_container, after="tmp.unlink(); tmp.mkdir(); sys.stdin.read()")
    _remove_stale(tmp_path / "train")
    process.communicate()
    assert tmp.exists()
    os.utime(tmp, (0, 0))
    _remove_stale(tmp_path / "train")
    assert not tmp.exists()


def test_a_killed_process_that_nobody_has_waited_for_is_dead(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        mine = storage.temporary(tmp_path / "a.bin")
        left = mine.with_name(mine.name.replace(f".{os.getpid()}.", f".{process.pid}."))
        left.touch()
        assert not storage.is_stale(left)
        process.kill()
        deadline = time.monotonic() + 10
        while not storage.is_stale(left):  # it is a zombie until somebody waits for it
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()


HOSTILE = ("../out", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "a\nb", "a\0b", "\x1b[2J", "\udcff", 7, None)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_leads_elsewhere_is_none(name: object, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="list.json names .* not a plain file name"):
        storage.plain_name(name, tmp_path / "list.json")


def test_a_plain_name_is_itself(tmp_path: Path) -> None:
    for name in ("__0_0.distcp", ".metadata", "model-00001-of-00002.safetensors", "a b", "é"):
        assert storage.plain_name(name, tmp_path) == name


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    pipe, link, file, device = (tmp_path / name for name in ("pipe", "link", "file", "device"))
    os.mkfifo(pipe)
    file.write_bytes(b"text")
    link.symlink_to(file)
    device.symlink_to("/dev/zero")
    assert storage.read_bytes(file) == storage.read_bytes(link) == b"text"
    for path in (pipe, device, Path("/dev/zero")):
        with pytest.raises(UserError, match="is not a regular file"):
            storage.read_bytes(path)
        with pytest.raises(UserError, match="is not a regular file"):
            file_hash(path)
    with pytest.raises(UserError, match="is a symbolic link"):
        storage.open_regular(link, symlinks=False)
    with pytest.raises(IsADirectoryError):
        storage.open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        storage.open_regular(tmp_path / "none")


def test_files_that_only_say_that_they_are_large_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file takes no room on the disk, and would fill the memory."""
    path = tmp_path / "file.json"
    path.write_bytes(b"{}\n")
    os.truncate(path, 2**40)
    for read in (storage.get_json, storage.read_object, lambda path: storage.read_bytes(path, storage.SMALL_BYTES)):
        with pytest.raises(UserError, match=r"file\.json has 1,099,511,627,776 bytes"):
            read(path)
    monkeypatch.setattr(storage, "_MAX_LINE", 2**10)
    row = b'{"a": 1}\n'
    path.write_bytes(row + bytes(2**22) + b"\n" + row + b'{"b": "' + b"x" * 2**12 + b'"}\n' + row)
    skipped: list[int] = []
    assert list(storage.json_lines(path, lambda: skipped.append(1))) == [{"a": 1}] * 3
    assert len(skipped) == 2
    path.write_bytes(row + bytes(2**22) + b"\n" + row)
    assert list(storage.json_lines_backwards(path)) == [{"a": 1}] * 2
    with path.open("wb") as file:
        file.write(row + b"\0")
        file.seek(2**40)
        file.write(b"\n" + row)
        file.truncate(2**41)
    assert list(storage.json_lines(path)) == list(storage.json_lines_backwards(path)) == [{"a": 1}] * 2
    path.write_bytes(row + bytes(2**22))
    assert list(storage.json_lines(path)) == list(storage.json_lines_backwards(path)) == [{"a": 1}]


@pytest.mark.parametrize("rest", [10, 2**20 + 10, 2**21])
def test_lines_around_one_that_is_too_long_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: int
) -> None:
    monkeypatch.setattr(storage, "_MAX_LINE", 2**16)
    path, rows = tmp_path / "lines.jsonl", [b'{"row": %d}\n' % row for row in range(3010)]
    path.write_bytes(b"".join([*rows[:10], b" " * (2**16 + rest), b"\n", *rows[10:]]))
    left_out: list[int] = []
    found = [row["row"] for row in storage.json_lines(path, lambda: left_out.append(1))]
    assert found == list(range(3010)) and left_out == [1]


def test_a_link_to_itself_is_an_error_of_the_system(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="symbolic links"):
        storage.append_line(loop, b"{}")
