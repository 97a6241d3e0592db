"""A checkpoint of a stranger is data: no command runs what it asks for, reads beside it, or believes its claims."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from pipeline.cli.main import main
from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.train.checkpoint.committed import Checkpoint
from pipeline.train.checkpoint.dcp_metadata import read_metadata
from pipeline.train.checkpoint.tensors import Stored, read, stored
from pipeline.train.start.fork import fork
from tests.train.runs import start, train

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SETTINGS = ("train.duration=2 steps", "train.validation.samples=0", "train.ema.decay=0.5")
LONGER = ("train.duration=3 steps", *SETTINGS[1:])


class Asks:
    """Unpickled by anything that trusts a pickle, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


@pytest.fixture(scope="module")
def trained(root: Path) -> Path:
    return train(root, "trained", *SETTINGS)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """What a checkpoint would make if code of it ran."""
    yield tmp_path / "made"
    assert not (tmp_path / "made").exists()


def folder_of(run: Path) -> Path:
    return run / "checkpoints" / "step-00000002"


def metadata_of(run: Path) -> Metadata:
    found: Metadata = pickle.loads((folder_of(run) / ".metadata").read_bytes())
    return found


def rewrite(folder: Path, name: str, data: bytes) -> Checkpoint:
    """Change a file as a stranger would: with its size and hash in COMMIT."""
    (folder / name).write_bytes(data)
    commit = orjson.loads((folder / "COMMIT").read_bytes())
    commit["files"][name] = [len(data), xxhash.xxh3_64_hexdigest(data)]
    (folder / "COMMIT").write_bytes(orjson.dumps(commit))
    checkpoint = Checkpoint(folder, 2)
    assert not checkpoint.problems(), "its hashes are right"
    return checkpoint


def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """`pipeline` in this process: its exit code, and all that it says."""
    monkeypatch.setattr("sys.argv", ["pipeline", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    assert isinstance(left.value.code, int)
    out, said = capfd.readouterr()
    return left.value.code, out + said


COMMANDS: dict[str, Callable[[Path, Path], list[object]]] = {
    "show": lambda root, run: ["checkpoint", "show", run],
    "verify": lambda root, run: ["checkpoint", "verify", run],
    "export": lambda root, run: ["checkpoint", "export", run, "--to", run / "to"],
    "to-hf": lambda root, run: ["convert", "to-hf", run, run / "to"],
    "to-hf of a checkpoint": lambda root, run: ["convert", "to-hf", folder_of(run), run / "to"],
    "fork": lambda root, run: [
        *("fork", run, root / "run.yaml", "--step", "2", f"run.dir={run.parent / 'child'}"),
        *(f"data.dir={root / 'data'}", *LONGER),
    ],
    "fork --dry-run": lambda root, run: [*COMMANDS["fork"](root, run), "--dry-run"],
    "eval": lambda root, run: ["eval", run / "config.yaml", f"run.dir={run}"],
    "generate": lambda root, run: ["generate", run / "config.yaml", f"run.dir={run}", "--prompt", "a"],
    "serve": lambda root, run: ["serve", run, "--port", "0"],
    "init_from a run": lambda root, run: [
        *("train", root / "run.yaml", f"run.dir={run.parent / 'child'}", f"train.init_from.path={run}", *SETTINGS),
    ],
    "init_from a checkpoint": lambda root, run: [
        *("train", root / "run.yaml", f"run.dir={run.parent / 'child'}", *SETTINGS),
        f"train.init_from.path={folder_of(run)}",
    ],
    "resume": lambda root, run: ["train", run / "config.yaml", f"run.dir={run}", *LONGER],
}


@pytest.mark.first(4)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_what_a_list_of_tensors_asks_for(
    command: str,
    root: Path,
    run: Path,
    marker: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    metadata = metadata_of(run)
    metadata.planner_data = Asks(marker)  # all else is as it was
    rewrite(folder_of(run), ".metadata", pickle.dumps(metadata))
    code, said = call(monkeypatch, capfd, *COMMANDS[command](root, run))
    assert code == (1 if command == "verify" else 2), said
    assert "posix.mkdir" in said and ".metadata" in said


@pytest.mark.parametrize("key", ["model.embedding.weight", "optimizer.state.embedding.weight.exp_avg"])
def test_no_pickle_stands_for_a_tensor(key: str, root: Path, run: Path, marker: Path) -> None:
    folder, metadata = folder_of(run), metadata_of(run)
    pickled = io.BytesIO()
    torch.save(Asks(marker), pickled)
    weights = (folder / "__0_0.distcp").read_bytes()
    assert isinstance(metadata.state_dict_metadata[key], TensorStorageMetadata)
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    metadata.storage_data = {index: place for index, place in metadata.storage_data.items() if index.fqn != key}
    metadata.storage_data[MetadataIndex(key)] = _StorageInfo("__0_0.distcp", len(weights), len(pickled.getvalue()))
    rewrite(folder, "__0_0.distcp", weights + pickled.getvalue())
    rewrite(folder, ".metadata", pickle.dumps(metadata))
    settings = [f"data.dir={root / 'data'}", *LONGER]
    code, said = start(run.parent, "run", *settings, file=str(root / "run.yaml"))
    assert code == 2 and key.removeprefix("model.") in said


def test_a_list_of_tensors_is_read_as_torch_reads_it(run: Path) -> None:
    ours, theirs = read_metadata(Checkpoint(folder_of(run), 2)), metadata_of(run)
    assert ours.storage_data == theirs.storage_data
    for entry in theirs.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata) and hasattr(entry.properties, "strides"):
            entry.properties.strides = None  # which 2.15 writes, and does not ask for when it loads
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert any(isinstance(entry, BytesStorageMetadata) for entry in ours.state_dict_metadata.values())


def listed(folder: Path, metadata: object, size: int = 10**6) -> Checkpoint:
    """A checkpoint that has nothing but a list of tensors, in two files that COMMIT speaks of."""
    data = metadata if isinstance(metadata, bytes) else pickle.dumps(metadata)
    (folder / ".metadata").write_bytes(data)
    files = {".metadata": [len(data), xxhash.xxh3_64_hexdigest(data)], "state.json": [0, ""]}
    files |= {f"__{rank}_0.distcp": [size, ""] for rank in range(2)}
    (folder / "COMMIT").write_bytes(orjson.dumps({"files": files}))
    return Checkpoint(folder, 1)


def sharded() -> Metadata:
    """A tensor of 6 x 4 in four uneven pieces, one without a row, and a scalar."""
    boxes = [((0, 0), (4, 3)), ((0, 3), (4, 1)), ((4, 0), (2, 4)), ((6, 0), (0, 4))]
    chunks = [ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, size in boxes]
    places = {
        MetadataIndex("w", offset, number): _StorageInfo(f"__{number % 2}_0.distcp", 2000 * number, 1500)
        for number, (offset, _) in enumerate(boxes)
    }
    places[MetadataIndex("s", ())] = _StorageInfo("__0_0.distcp", 9000, 1200)
    scalar = ChunkStorageMetadata(torch.Size(()), torch.Size(()))
    return Metadata(
        {
            "w": TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size((6, 4)), chunks),
            "s": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(()), [scalar]),
        },
        {"w": ("w",), "s": ("s",)},
        places,
        StorageMeta(Path("/somewhere"), "save", "load", []),
    )


def test_uneven_pieces_are_read(tmp_path: Path) -> None:
    found = read_metadata(listed(tmp_path, sharded()))
    assert found.state_dict_metadata == sharded().state_dict_metadata
    assert found.storage_data == sharded().storage_data


def test_the_path_of_other_versions_of_python_is_known(tmp_path: Path) -> None:
    own, other = b"\x8c\x07pathlib\x94", b"\x8c\x0epathlib._local\x94"  # the second one is that of 3.13
    data = pickle.dumps(sharded())
    own, other = (own, other) if own in data else (other, own)
    data = data.replace(own, other)
    assert other in data
    frames_are_hints = data.replace(b"\x95" + (len(data) - 18).to_bytes(8, "little"), b"", 1)
    assert read_metadata(listed(tmp_path, frames_are_hints)).state_dict_metadata == sharded().state_dict_metadata


class EarlyPython(pickle.Pickler):
    """Pickles enums as Python 3.11.0 to 3.11.4 do, Debian 12's among them: a call of `getattr` with a name."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_enums_of_python_3_11_2_are_known(tmp_path: Path) -> None:
    file = io.BytesIO()
    EarlyPython(file).dump(sharded())
    assert b"getattr" in file.getvalue()
    found = read_metadata(listed(tmp_path, file.getvalue()))
    assert found.state_dict_metadata == sharded().state_dict_metadata and found.storage_data == sharded().storage_data


FORGERIES: dict[str, Callable[[Any, Any], object]] = {
    "path above": lambda w, place: setattr(place, "relative_path", "../__0_0.distcp"),
    "absolute path": lambda w, place: setattr(place, "relative_path", "/etc/passwd"),
    "file that COMMIT does not list": lambda w, place: setattr(place, "relative_path", "COMMIT"),
    "beyond the end": lambda w, place: setattr(place, "offset", 10**6 - 100),
    "before the start": lambda w, place: setattr(place, "offset", -1),
    "bytes of another": lambda w, place: setattr(place, "offset", 4100),
    "too short": lambda w, place: setattr(place, "length", 2),
    "transformed": lambda w, place: setattr(place, "transform_descriptors", ["zstd"]),
    "size is huge": lambda w, place: setattr(w, "size", torch.Size((10**15, 4))),
    "piece is huge": lambda w, place: setattr(w, "chunks", [ChunkStorageMetadata(torch.Size((0, 0)), w.size)] * 9),
    "pieces overlap": lambda w, place: setattr(w.chunks[1], "offsets", torch.Size((0, 2))),
    "piece outside": lambda w, place: setattr(w.chunks[1], "offsets", torch.Size((3, 3))),
    "piece missing": lambda w, place: w.chunks.pop(2),
    "axis missing": lambda w, place: setattr(w.chunks[0], "sizes", torch.Size((4,))),
    "no list": lambda w, place: setattr(w, "chunks", 7),
    "no type": lambda w, place: setattr(w.properties, "dtype", "float32"),
    "no number": lambda w, place: setattr(place, "offset", True),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_list_is_refused_before_anything_is_allocated(forgery: str, tmp_path: Path) -> None:
    metadata = sharded()
    FORGERIES[forgery](metadata.state_dict_metadata["w"], metadata.storage_data[MetadataIndex("w", (0, 0))])
    with pytest.raises(UserError, match=r"\.metadata is damaged or forged"):
        read_metadata(listed(tmp_path, metadata))


def test_a_tensor_of_the_size_of_its_claim_needs_the_bytes(tmp_path: Path) -> None:
    """One piece, whole and alone: a million times what the files have."""
    size = torch.Size((10**12,))
    metadata = Metadata(
        {"w": TensorStorageMetadata(TensorProperties(), size, [ChunkStorageMetadata(torch.Size((0,)), size)])},
        storage_data={MetadataIndex("w", (0,)): _StorageInfo("__0_0.distcp", 0, 10**6)},
    )
    with pytest.raises(UserError, match="w needs 4,000,000,000,000 bytes"):
        read_metadata(listed(tmp_path, metadata))


PROTO = b"\x80\x04"
NAME = b"\x8c%torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93"
ENUM = NAME.replace(b"\x08Metadata", b"\x14_MEM_FORMAT_ENCODING")
GETATTR = b"\x8c\x08builtins\x8c\x07getattr\x93"
PICKLES = {
    "empty": b"",
    "cut": pickle.dumps(sharded())[:-200],
    "a number": pickle.dumps(7),
    "a place in the memo that takes 64 GB": PROTO + b"Nr\xff\xff\xff\xff.",
    "bytes that are not there": PROTO + b"\x96" + (2**40).to_bytes(8, "little") + b".",
    "a key that takes for ever": PROTO + b"})\x94" + b"".join(b"h%c" % n * 2 + b"\x86\x94" for n in range(99)) + b"Ns.",
    "a key that is too deep": PROTO + b"})" + b"\x85" * 300_000 + b"Ns.",
    "a persistent object": PROTO + b"NQ.",
    "a name as text": b"cos\nsystem\n.",
    "the state of a class": PROTO + NAME + b"}b.",
    "a call of no class": PROTO + b"N)R.",
    "a name whose words would never end": PROTO
    + b")\x94"
    + b"".join(b"h%c" % n * 2 + b"\x86\x94" for n in range(60))
    + (NAME + b")\x81}(\x8c\x13state_dict_metadata}\x8c\x0cstorage_data}")
    + (NAME.replace(b"\x08Metadata", b"\x0dMetadataIndex") + b")\x81}\x8c\x03fqnh\x3csb")
    + b"\x8c'torch.distributed.checkpoint.filesystem\x8c\x0c_StorageInfo\x93)\x81}("
    + b"\x8c\x0drelative_path\x8c\x01x\x8c\x06offsetK\0\x8c\x06lengthK\0ubsub.",
    "an attribute of another class": PROTO + GETATTR + NAME + b"\x8c\x08__init__\x86R.",
    "an attribute of an attribute": PROTO + 2 * GETATTR + ENUM + 2 * b"\x8c\x08__init__\x86R" + b".",
    "a call of an attribute": PROTO + GETATTR + ENUM + b"\x8c\x08__init__\x86R)R.",
    "the state of an attribute in place of a list": PROTO + GETATTR + ENUM + b"\x8c\x08__init__\x86R}b.",
    "an attribute whose name is a class": PROTO + GETATTR + ENUM + ENUM + b"\x86R.",
    "an attribute with a default": PROTO + GETATTR + ENUM + b"\x8c\x01xN\x87R.",
    "a name that is computed": PROTO + GETATTR + b"\x8c\x06system\x93.",
    "an extension": PROTO + b"\x82\x01.",
}


@pytest.mark.parametrize("name", PICKLES)
def test_what_no_list_of_tensors_has_ends_at_once(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\.metadata"):
        read_metadata(listed(tmp_path, PICKLES[name]))


@pytest.mark.parametrize(
    "module, name", [("builtins", "eval"), ("os", "system"), ("torch", "load"), ("torch", "ops.x")]
)
def test_no_other_name_is_imported(module: str, name: str, tmp_path: Path) -> None:
    data = PROTO + b"".join(b"\x8c%c%s" % (len(text), text.encode()) for text in (module, name)) + b"\x93."
    with pytest.raises(UserError, match=rf"asks for {module}\.{name}"):
        read_metadata(listed(tmp_path, data))


def test_a_list_larger_than_its_tensors_can_need_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not read"):
        read_metadata(listed(tmp_path, pickle.dumps(sharded()) + bytes(2**20), size=100))


@pytest.mark.first(5)
@pytest.mark.parametrize(
    "key, value",
    [
        *(("parent", 7), ("parent", {"name": "x"}), ("journal", None), ("journal", {"segments": 5})),
        *(("layout", [1]), ("config", []), ("versions", 1), ("tokens", "many")),
    ],
)
def test_a_state_of_other_kinds_is_refused(
    key: str, value: object, root: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    state = orjson.loads((folder_of(run) / "state.json").read_bytes())
    rewrite(folder_of(run), "state.json", orjson.dumps(state | {key: value}))
    for command in ("show", "fork"):
        code, said = call(monkeypatch, capfd, *COMMANDS[command](root, run))
        assert code in (0, 2) and "bug in the program" not in said, said


def test_a_damaged_state_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    state = folder_of(run) / "state.json"
    state.write_bytes(state.read_bytes().replace(b"attempt", b"Attempt", 1))
    code, said = call(monkeypatch, capfd, "checkpoint", "show", run)
    assert code == 2 and "state.json has changed" in said


def test_a_compressed_tensor_is_not_read(run: Path) -> None:
    """torch would inflate a small file to any size."""
    folder = folder_of(run)
    key, small = "model.embedding.weight", io.BytesIO()
    metadata = metadata_of(run)
    (index,) = (index for index in metadata.storage_data if index.fqn == key)
    place = metadata.storage_data[index]
    data = (folder / place.relative_path).read_bytes()
    tensor = zipped(torch.zeros(metadata.state_dict_metadata[key].size))
    with (
        zipfile.ZipFile(io.BytesIO(tensor)) as archive,
        zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for each in archive.namelist():
            packed.writestr(each, archive.read(each))
    body = small.getvalue()
    assert len(body) < place.length
    # Behind the last tensor, with a length that its numbers would need.
    rewrite(folder, place.relative_path, data + body.rjust(place.length, b"\0"))
    place.offset = len(data)
    checkpoint = rewrite(folder, ".metadata", pickle.dumps(metadata))
    name = key.removeprefix("model.")
    with pytest.raises(UserError, match="damaged or forged: there is no tensor"):
        read(checkpoint, "model", {name: stored(checkpoint)["model"][name]})


def test_a_tensor_that_is_another_pickle_is_not_read(run: Path, marker: Path) -> None:
    folder, metadata = folder_of(run), metadata_of(run)
    key = "model.embedding.weight"
    (index,) = (index for index in metadata.storage_data if index.fqn == key)
    place = metadata.storage_data[index]
    for pickled in (zipped(Asks(marker)), pickle.dumps(Asks(marker))):
        data = (folder / place.relative_path).read_bytes()
        place.offset, place.length = len(data), max(place.length, len(pickled))
        rewrite(folder, place.relative_path, data + pickled.rjust(place.length, b"\0"))
        checkpoint = rewrite(folder, ".metadata", pickle.dumps(metadata))
        with pytest.raises(UserError):
            read(checkpoint, "model", {"embedding.weight": stored(checkpoint)["model"]["embedding.weight"]})


def zipped(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_a_tensor_of_another_size_than_it_says_is_not_read(run: Path) -> None:
    checkpoint = Checkpoint(folder_of(run), 2)
    with pytest.raises(UserError):
        read(checkpoint, "model", {"embedding.weight": Stored((3, 5), torch.float32)})


@pytest.mark.parametrize(
    "name", ["../../../../victim", "/etc/hostname", "..", "", "a/b", "a\\b", "a\nb", "a\0b", "\x1b[2J"]
)
def test_a_list_of_files_names_none_elsewhere(name: str, root: Path, run: Path) -> None:
    folder, child = folder_of(run), run.parent / "new" / "child"
    victim, theirs = child.parent / "victim", run.parent / "victim"
    child.parent.mkdir()
    victim.write_text("mine")
    theirs.write_text("theirs")
    commit = orjson.loads((folder / "COMMIT").read_bytes())
    commit["files"][name] = [6, xxhash.xxh3_64_hexdigest(b"theirs")]
    (folder / "COMMIT").write_bytes(orjson.dumps(commit))
    (problem,) = Checkpoint(folder, 2).problems()
    assert f"COMMIT names {name!a}" in problem
    config = load(root / "run.yaml", [f"run.dir={child}", f"data.dir={root / 'data'}", *LONGER])
    with pytest.raises(UserError, match="COMMIT names"):
        fork(run, 2, config, quiet())
    assert victim.read_text() == "mine"


def quiet() -> Any:
    from rich.console import Console

    return Console(file=io.StringIO())


@pytest.mark.parametrize("kind", ["link", "device", "pipe", "folder"])
def test_only_files_of_its_own_are_in_a_checkpoint(kind: str, run: Path) -> None:
    folder = folder_of(run)
    name = "tokenizer.json"
    private = run.parent / "private"
    shutil.move(folder / name, private)
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to("/dev/zero" if kind == "device" else private)
    (problem,) = Checkpoint(folder, 2).problems()
    assert name in problem and "not a regular file" in problem


@pytest.mark.first(3)
@pytest.mark.parametrize("name", ["COMMIT", "state.json", "tokenizer.json", ".metadata"])
def test_a_pipe_or_a_device_does_not_hold_a_command(
    name: str, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = folder_of(run) / name
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        file.unlink()
        make(file)
        code, said = call(monkeypatch, capfd, "checkpoint", "verify", run)
        assert code == 1 and name in said
        assert call(monkeypatch, capfd, "checkpoint", "export", run, "--to", run / "to")[0] == 2


def test_the_folder_of_a_checkpoint_may_be_a_link(run: Path) -> None:
    moved = run.parent / "elsewhere"
    shutil.move(folder_of(run), moved)
    folder_of(run).symlink_to(moved)
    checkpoint = Checkpoint(folder_of(run), 2)
    assert not checkpoint.problems() and stored(checkpoint)["model"]
