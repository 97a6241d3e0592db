"""`pipeline checkpoint`: what it tells of real checkpoints, what it removes, and the weights that it writes."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from pipeline.cli.main import main
from pipeline.common.errors import UserError
from pipeline.common.hashing import file_hash
from pipeline.common.run_files import RunFiles
from pipeline.config.checkpoint import CheckpointConfig
from pipeline.config.load import load
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint import committed
from pipeline.train.checkpoint.export import average, export
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.tensors import Stored, groups
from pipeline.train.checkpoint.weight_files import split_into_files, write_weight_files
from pipeline.train.export import commands
from pipeline.train.run.attempts import attempts
from tests.train.runs import train

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OVERRIDES = (
    "train.duration=6 steps",
    "train.checkpoint.every_steps=2",
    "train.checkpoint.keep=3",
    "train.validation.samples=0",
    "train.ema.decay=0.5",
)


@pytest.fixture(scope="module")
def trained(root: Path) -> Path:
    """Steps 2, 4 and 6."""
    return train(root, "trained", *OVERRIDES)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`pipeline checkpoint` in this process; returns exit code, output and error output."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["pipeline", "checkpoint", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        assert isinstance(left.value.code, int)
        return (left.value.code, *capfd.readouterr())

    return call


def folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def tensors(run: Path, step: int, section: str = "model") -> dict[str, torch.Tensor]:
    """All tensors of a section, by torch alone."""
    reader = FileSystemReader(folder(run, step))
    entries = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if key.startswith(f"{section}.")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return {key.removeprefix(f"{section}."): value for key, value in state.items()}


def quiet() -> Console:
    return Console(file=io.StringIO())


def test_list_shows_what_is_there_and_what_is_left_of_others(run: Path, call: Any) -> None:
    checkpoints = Checkpoints.of_run(run)
    checkpoints.rewind(4, lambda line: None)
    (folder(run, 2) / "state.json").unlink()
    checkpoints.begin(9, 3)
    code, out, _ = call("list", run, "train.checkpoint.keep_every=4", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    states = [(row["step"], row["state"], row["latest"], row["permanent"]) for row in rows.values()]
    assert states == [
        (2, "damaged", False, False),
        (4, "ok", True, True),
        (6, "abandoned", False, False),
        (9, "temporary", False, False),
    ]
    four = rows["step-00000004"]
    assert (four["parent"], four["attempt"], four["layout"]) == (2, 1, "1 process")
    assert four["bytes"] == sum(file.stat().st_size for file in folder(run, 4).iterdir() if file.name != "COMMIT")
    assert "state.json is missing" in rows["step-00000002"]["problems"][0]
    code, out, _ = call("list", run, "train.checkpoint.keep_every=4")
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines[1:5]] == ["2", "4", "6", "9"]
    assert lines[2].endswith("ok         latest, kept for ever")


def test_list_of_a_run_without_checkpoints(root: Path, call: Any, tmp_path: Path) -> None:
    assert call("list", root / "run.yaml", f"run.dir={tmp_path}") == (0, "no checkpoints\n", "")


def test_show_tells_where_a_checkpoint_comes_from_and_its_tensors(run: Path, call: Any) -> None:
    code, out, _ = call("show", run, "--step", 4)
    assert code == 0
    assert "descends from step-00000002" in out
    assert f"torch {torch.__version__}" in out
    model = tensors(run, 4)
    for name, tensor in model.items():
        shape = " x ".join(map(str, tensor.shape))
        assert any(line.split("  ")[1:2] == [name] and shape in line and "float32" in line for line in out.splitlines())
    numbers = sum(tensor.numel() for tensor in model.values())
    assert f"model: {len(model)} tensors, {numbers:,} numbers" in out
    assert "exp_avg" not in out
    assert "exp_avg" in call("show", run, "--step", 4, "--all")[1]


def test_show_as_json_has_the_whole_state(run: Path, call: Any) -> None:
    code, out, _ = call("show", run, "--json")
    value = json.loads(out)
    assert code == 0
    assert value["state"] == json.loads((folder(run, 6) / "state.json").read_bytes())
    assert value["fingerprint"] == f"{file_hash(folder(run, 6) / 'COMMIT'):016x}"
    shapes = {name: list(tensor.shape) for name, tensor in tensors(run, 6).items()}
    assert {name: each["shape"] for name, each in value["tensors"]["model"].items()} == shapes
    assert set(value["tensors"]) == {"model", "optimizer", "ema"}


def test_show_does_not_read_a_list_of_tensors_that_has_changed(run: Path, call: Any) -> None:
    flip(folder(run, 6) / ".metadata", 100)
    code, _, said = call("show", run)
    assert code == 2
    assert ".metadata has changed" in said


def test_verify_names_each_damaged_file(run: Path, call: Any) -> None:
    code, out, _ = call("verify", run)
    assert code == 0
    *lines, trust = out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step-00000002", "step-00000004", "step-00000006"]
    assert "do not prove who wrote" in trust
    weights = folder(run, 4) / "__0_0.distcp"
    flip(weights, weights.stat().st_size // 2)
    (folder(run, 6) / "tokenizer.json").unlink()
    code, out, said = call("verify", run)
    assert code == 1
    assert [line.split(":")[0] for line in out.splitlines()] == ["step-00000002"]
    assert f"bad: {weights} has changed" in said
    assert f"bad: {folder(run, 6) / 'tokenizer.json'} is missing" in said
    assert call("verify", run, "--step", 2)[0] == 0
    assert call("verify", run, "--step", 4)[0] == 1
    assert call("verify", run, "--step", 5)[0] == 2


def test_what_a_run_removes_meanwhile_is_not_damaged(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, said = Checkpoints.of_run(run), []
    everything = checkpoints.all()

    def report(line: str) -> None:
        said.append(line)
        checkpoints.remove(everything[1:2])  # the next one, of which nothing has been read

    assert commands.verify(checkpoints, None, quiet(), report) == {2: [], 6: []}
    assert said[1] == "step-00000004: removed meanwhile"
    monkeypatch.setattr(checkpoints, "all", lambda: everything)
    assert [row.step for row in commands.rows(checkpoints, CheckpointConfig())] == [2, 6]


def test_a_checkpoint_that_goes_while_it_is_read_is_not_damaged(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, original = Checkpoints.of_run(run), committed.file_hash

    def file_hash(path: Path, *arguments: Any, **options: Any) -> int:
        if path.parent == folder(run, 4):
            checkpoints.remove([checkpoints.find(4)])
        return original(path, *arguments, **options)

    monkeypatch.setattr(committed, "file_hash", file_hash)
    assert commands.verify(checkpoints, None, quiet(), lambda line: None) == {2: [], 6: []}
    with pytest.raises(UserError, match="does not have a checkpoint of step 4"):
        commands.verify(checkpoints, 4, quiet(), lambda line: None)


def test_prune_removes_by_the_policy_or_by_step(run: Path, call: Any) -> None:
    code, out, _ = call("prune", run, "--keep", 1, "--dry-run")
    assert (code, out.splitlines()) == (0, [f"would remove {folder(run, 2)}", f"would remove {folder(run, 4)}"])
    assert call("prune", run)[1] == "nothing to remove\n"
    code, out, _ = call("prune", run, "--steps", "2")
    assert (code, out) == (0, f"removed {folder(run, 2)}\n")
    code, _, said = call("prune", run, "--steps", "4,6")
    assert code == 2
    assert "step 6 is the one that the run resumes from and stays" in said
    assert [each.step for each in Checkpoints.of_run(run).all()] == [4, 6]
    weights = folder(run, 6) / "__0_0.distcp"
    flip(weights, 1000)
    code, _, said = call("prune", run, "--steps", "4")
    assert code == 2
    assert "step 4 is the newest valid one" in said
    assert call("prune", run, "--keep", 1)[1] == "nothing to remove\n"
    assert call("prune", run, "--steps", "4,x")[0] == 2


def test_prune_leaves_alone_what_is_being_exported(run: Path, call: Any) -> None:
    tmp = run / "hf" / ".step-00000002.host.1234.01234567.tmp"
    tmp.mkdir(parents=True)
    kept, gone = f"kept {folder(run, 2)}: its export is not done", f"would remove {folder(run, 4)}"
    assert call("prune", run, "--keep", 1, "--dry-run")[1].splitlines() == [kept, gone]
    code, _, said = call("prune", run, "--steps", "2")
    assert code == 2 and "step 2 is being exported" in said
    tmp.rmdir()
    assert len(call("prune", run, "--keep", 1, "--dry-run")[1].splitlines()) == 2


def test_prune_leaves_alone_what_is_still_to_be_exported(run: Path, call: Any) -> None:
    """The queue of a run that trains, or that was stopped: what is missing, unless this attempt has given it up."""

    def pruned(*words: object, key: str = "{every_steps: 2}") -> list[str]:
        _, out, said = call("prune", run, f"train.checkpoint.export={key}", "--dry-run", *words)
        return [line.partition(":")[0].replace(f"{run}/checkpoints/", "") for line in (out + said).splitlines()]

    two, four = "step-00000002", "step-00000004"
    assert pruned("--keep", 1) == [f"kept {two}", f"kept {four}", "nothing to remove"]
    assert pruned("--keep", 1, key="{every_steps: 4}") == [f"kept {four}", f"would remove {two}"]
    code, _, said = call("prune", run, "train.checkpoint.export={every_steps: 2}", "--steps", "4")
    assert code == 2 and "step 4 is still to be exported" in said and "train.checkpoint.export=null" in said
    assert pruned("--keep", 1, key="null") == [f"would remove {two}", f"would remove {four}"]
    # One that is there, and one that would be removed at once, need no checkpoint.
    (run / "hf" / four).mkdir(parents=True)
    assert pruned("--keep", 1) == [f"kept {two}", f"would remove {four}"]
    assert pruned("--keep", 1, key="{every_steps: 2, keep: 1}") == [f"would remove {two}", f"would remove {four}"]
    # A failed one is made again by a later attempt alone.
    (attempt,) = (each.number for each in attempts(run))
    for number, expected in ((attempt, [f"would remove {two}", f"would remove {four}"]), (attempt - 1, None)):
        row = {"step": 2, "attempt": number, "failed": "why"}
        RunFiles(run).exports.write_text(json.dumps(row) + "\n")
        assert pruned("--keep", 1) == (expected or [f"kept {two}", f"would remove {four}"])


def test_prune_says_what_cannot_be_removed(run: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.replace

    def replace(old: Path, new: Path, **folders: int) -> None:
        if Path(old).name == "step-00000002":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        original(old, new, **folders)

    monkeypatch.setattr(os, "replace", replace)
    code, out, said = call("prune", run, "--keep", 1)
    assert (code, out) == (1, f"removed {folder(run, 4)}\n")
    assert said == "error: step-00000002 cannot be removed (Read-only file system)\n"
    assert [each.step for each in Checkpoints.of_run(run).all()] == [2, 6]


def test_prune_takes_a_number_to_keep_or_steps_not_both(run: Path, call: Any) -> None:
    code, _, said = call("prune", run, "--keep", 2, "--steps", "4")
    assert code == 2 and "either --keep or --steps" in said
    assert [each.step for each in Checkpoints.of_run(run).all()] == [2, 4, 6]


def test_a_run_that_is_not_there_may_have_been_a_file_or_a_folder(run: Path, call: Any) -> None:
    code, _, said = call("list", "nothere")
    assert code == 2 and "error: no run file or run folder nothere; " in said
    for inside in (run / "checkpoints", folder(run, 4)):
        code, _, said = call("list", inside)
        assert code == 2 and f"{inside} is not a run folder" in said and f"name the run folder, {run}\n" in said


def full(folder: Path) -> None:
    """No room for a file that is made there or below."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("this machine does not let this user mount a tmpfs")


@pytest.mark.parametrize("kind", [("export", "--step", 4), ("average", "--last", 2)], ids=lambda kind: kind[0])
def test_a_folder_that_cannot_be_written_is_named_as_it_was_given(
    run: Path, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: tuple[Any, ...]
) -> None:
    monkeypatch.chdir(tmp_path)

    def refused(to: str, *reasons: str) -> None:
        code, _, said = call(kind[0], run, "--to", to, *kind[1:])
        assert code == 1 and said.startswith(f"error: --to {to} cannot be written ("), said
        assert all(reason in said for reason in reasons), said
        assert "run.dir" not in said and ".tmp" not in said

    (tmp_path / "file").touch()
    refused("file/out", "a part of the path is a file")
    refused("x" * 300, "File name too long")
    refused("x" * 250, "File name too long")
    disk = tmp_path / "disk"
    disk.mkdir()
    full(disk)
    try:
        refused("disk/out", "No space left on device", "free some space")
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        refused("disk/new/out", "Read-only file system", "name another folder")
    finally:
        subprocess.run(["umount", "-l", disk], check=False)


def test_prune_removes_what_the_run_has_gone_back_from_only_when_asked(run: Path, call: Any) -> None:
    Checkpoints.of_run(run).rewind(4, lambda line: None)
    assert call("prune", run)[1] == "nothing to remove\n"
    old = run / "checkpoints" / "abandoned" / "step-00000006"
    assert call("prune", run, "--abandoned")[1] == f"removed {old}\n"
    assert list(old.parent.iterdir()) == []


def test_export_has_the_weights_that_torch_reads(run: Path, call: Any, tmp_path: Path) -> None:
    to = tmp_path / "new" / "out"
    code, out, _ = call("export", run, "--to", to, "--step", 4)
    assert out.endswith(f"\nnext: pipeline eval {run} --weights {to}\n")
    assert code == 0
    assert out.startswith(f"{to}: the weights of step 4, ")
    files = {"model.safetensors", "config.yaml", "tokenizer.json", "special_tokens.json", "export.json"}
    assert {path.name for path in to.iterdir()} == files
    theirs = load_file(to / "model.safetensors")
    ours = tensors(run, 4)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    origin = json.loads((to / "export.json").read_bytes())
    record = [(to / "model.safetensors").stat().st_size, f"{file_hash(to / 'model.safetensors'):016x}"]
    assert origin["files"] == {"model.safetensors": record}
    fingerprint = f"{file_hash(folder(run, 4) / 'COMMIT'):016x}"
    assert origin["checkpoints"] == [{"step": 4, "fingerprint": fingerprint}]
    assert Tokenizer.open(to).fingerprint == origin["fingerprints"]["tokenizer"]
    assert load(to / "config.yaml").model_dump() == load(run / "config.yaml").model_dump()


def test_export_of_the_moving_average(run: Path, tmp_path: Path) -> None:
    export(Checkpoints.of_run(run), tmp_path / "ema", step=None, weights="ema", max_shard=None, console=quiet())
    theirs, ours = load_file(tmp_path / "ema" / "model.safetensors"), tensors(run, 6, "ema")
    assert theirs.keys() == tensors(run, 6).keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    assert any(not torch.equal(ours[name], value) for name, value in tensors(run, 6).items())


def test_shards_are_complete_and_no_larger_than_asked_for(run: Path, call: Any, tmp_path: Path) -> None:
    to = tmp_path / "out"
    assert call("export", run, "--to", to, "--max-shard", "20KB")[0] == 0
    index = json.loads((to / "model.safetensors.index.json").read_bytes())
    ours = tensors(run, 6)
    assert index["metadata"]["total_size"] == sum(4 * value.numel() for value in ours.values())
    assert index["weight_map"].keys() == ours.keys()
    shards = {name: load_file(to / name) for name in set(index["weight_map"].values())}
    assert {path.name for path in to.glob("*.safetensors")} == shards.keys()
    for shard in shards.values():
        assert len(shard) == 1 or sum(4 * value.numel() for value in shard.values()) <= 20_000
    for name, value in ours.items():
        assert torch.equal(shards[index["weight_map"][name]][name], value)


def test_the_average_is_the_mean_in_double_precision(run: Path, call: Any, tmp_path: Path) -> None:
    assert call("average", run, "--to", tmp_path / "all", "--last", 3)[0] == 0
    assert call("average", run, "--to", tmp_path / "two", "--steps", "6,2")[0] == 0
    for name, steps in (("all", (2, 4, 6)), ("two", (2, 6))):
        theirs = load_file(tmp_path / name / "model.safetensors")
        of_steps = [tensors(run, step) for step in steps]
        for key, value in theirs.items():
            stack = np.stack([each[key].numpy().astype(np.float64) for each in of_steps])
            assert np.array_equal(value.numpy(), stack.mean(axis=0).astype(np.float32))
        origin = json.loads((tmp_path / name / "export.json").read_bytes())
        assert [each["step"] for each in origin["checkpoints"]] == list(steps)


def test_the_average_of_several_runs(run: Path, root: Path, call: Any, tmp_path: Path) -> None:
    other = train(root, "soup", *OVERRIDES[:-1], "run.seed=2")
    to = tmp_path / "soup"
    assert call("average", run, "--with", other, "--to", to, "--last", 1)[0] == 0
    theirs, of_runs = load_file(to / "model.safetensors"), [tensors(folder, 6) for folder in (run, other)]
    for key, value in theirs.items():
        mean = np.stack([each[key].numpy().astype(np.float64) for each in of_runs]).mean(axis=0)
        assert np.array_equal(value.numpy(), mean.astype(np.float32))
    origin = json.loads((to / "export.json").read_bytes())
    assert origin["run"] == str(run)
    assert [(each["run"], each["step"]) for each in origin["checkpoints"]] == [(str(other), 6), (str(run), 6)]


def test_what_cannot_be_exported_is_said_and_leaves_nothing(run: Path, root: Path, tmp_path: Path) -> None:
    checkpoints, to = Checkpoints.of_run(run), tmp_path / "out"

    def refused(message: str, function: Any = export, **options: Any) -> None:
        with pytest.raises(UserError, match=message):
            function(checkpoints, to, **{"weights": "model", "max_shard": None, "console": quiet()} | options)
        assert not list(tmp_path.glob("*out*")) or to.is_file()

    refused("step 5 .*steps there: 2, 4, 6", step=5)
    refused("at least two", average, steps=[2], last=None)
    refused("at least two", average, steps=[2, 2], last=None)
    refused("either --steps", average, steps=[2, 4], last=2)
    refused("--last is 4, but .* has 3", average, steps=None, last=4)
    flip(folder(run, 4) / "__0_0.distcp", 5000)
    refused("step-00000004 is damaged", step=4)
    refused("step-00000004 is damaged", average, steps=None, last=3)
    to.write_text("")
    refused("exists already", step=6)
    to.unlink()
    other = train(root, "other", *OVERRIDES[:-1], "model.dim=16", "run.seed=2")
    shutil.rmtree(folder(run, 4))
    shutil.copytree(folder(other, 4), folder(run, 4))
    refused("cannot be averaged: model.dim is 32 in the one and 16 in the other", average, steps=[2, 4], last=None)
    refused("no moving average", step=4, weights="ema")


def test_weights_of_all_types_and_shapes_open_in_safetensors(tmp_path: Path) -> None:
    values = {
        "half": torch.arange(3, dtype=torch.float16),
        "brain": torch.randn(2, 5).to(torch.bfloat16),
        "scalar": torch.tensor(3.5),
        "long": torch.arange(6).reshape(1, 2, 3),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
        "double": torch.randn(3, dtype=torch.float64),
    }
    stored = {name: Stored(tuple(value.shape), value.dtype) for name, value in values.items()}
    shards = split_into_files(stored, None)
    seen: list[int] = []
    files = write_weight_files(tmp_path, shards, lambda wanted: ((name, values[name]) for name in wanted), seen.append)
    path = tmp_path / "model.safetensors"
    assert files == {path.name: (path.stat().st_size, f"{file_hash(path):016x}")}
    assert sum(seen) == sum(value.nbytes for value in values.values())
    theirs = load_file(path)
    assert theirs.keys() == values.keys()
    for name, value in values.items():
        assert theirs[name].dtype == value.dtype
        assert torch.equal(theirs[name], value)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_tensors_are_read_in_groups_that_fit_into_memory() -> None:
    counts = {"a": 40, "b": 24, "c": 1, "d": 100, "e": 1, "f": 62}
    sizes = {name: Stored((count, 2**19), torch.float32) for name, count in counts.items()}
    assert [list(group) for group in groups(sizes)] == [["a", "b"], ["c"], ["d"], ["e", "f"]]
