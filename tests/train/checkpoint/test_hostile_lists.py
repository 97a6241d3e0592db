"""Lists of files that come with weights and datasets of a stranger: none leads out of its folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import put_sealed
from pipeline.common.storage import json_lines_backwards
from pipeline.config.load import load_written
from pipeline.data.datasets.verify import verify
from pipeline.data.work.receipts import files_are_there
from pipeline.train.checkpoint.weight_source import open_weights, tensors_of
from pipeline.train.huggingface.folder import HuggingFaceFolder
from pipeline.train.run.heartbeat import read_beat, read_beats
from pipeline.train.run.lock import holder, is_held
from slurm.record.sweep_folder import noted
from tests.train.runs import start

ELSEWHERE = "../secret.safetensors"


def exported(folder: Path, files: Any) -> Path:
    about = {"files": files, "weights": "model", "fingerprints": {"model": {}}, "run": "", "checkpoints": []}
    storage.put_json(folder / "export.json", {**about, "positions": 8})
    return folder


@pytest.mark.parametrize("files", [{ELSEWHERE: [1, "0"]}, {"/dev/zero": [1, "0"]}, [], {"a": 1}, {"a": ["x", "0"]}])
def test_an_export_lists_files_beside_it(files: Any, root: Path, tmp_path: Path) -> None:
    folder = exported(tmp_path, files)
    with pytest.raises(UserError, match=r"export\.json"):
        open_weights(folder, None, "model")
    code, said = start(root, "child", f"train.init_from.path={folder}", "train.duration=3 steps")
    assert code == 2 and "export.json" in said


def test_a_pipe_is_no_file_of_weights(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="not a regular file"):
        open_weights(exported(tmp_path, {"model.safetensors": [0, "0"]}), None, "model")
    with pytest.raises(UserError, match="not a regular file"):
        tensors_of(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", [ELSEWHERE, "/etc/passwd", 7])
def test_an_index_of_hugging_face_names_files_beside_it(name: object, tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 8}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 1}
    storage.put_json(
        tmp_path / "config.json", {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes, **layers}
    )
    storage.put_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"lm_head.weight": name}})
    with pytest.raises(UserError, match=r"index\.json names .* not a plain file name"):
        HuggingFaceFolder(tmp_path).tensors  # noqa: B018
    storage.put_json(tmp_path / "model.safetensors.index.json", {"weight_map": name})
    with pytest.raises(UserError, match=r"index\.json is damaged: weight_map"):
        HuggingFaceFolder(tmp_path).tensors  # noqa: B018


def test_plans_and_receipts_name_splits_of_their_source(root: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(root / "data", tmp_path / "data"))
    plan = data / "sea" / "plan.json"
    whole = orjson.loads(plan.read_bytes())
    put_sealed(plan, {**whole, "splits": [*whole["splits"], "../../elsewhere"]})
    assert any(f"{plan} names '../../elsewhere'" in problem for problem in verify(data).problems)
    put_sealed(plan, whole)
    file = data / "sea" / "receipts" / "00000" / "00000000.json"
    receipt = orjson.loads(file.read_bytes())
    receipt["splits"]["../../elsewhere"] = receipt["splits"]["train"]
    put_sealed(file, receipt)
    assert any(f"{file} names '../../elsewhere'" in problem for problem in verify(data).problems)
    with pytest.raises(UserError, match=r"\.\./\.\./elsewhere"):
        files_are_there(data / "sea", receipt)


def test_a_part_of_a_dataset_is_a_file(root: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(root / "data", tmp_path / "data"))
    part = next((data / "sea" / "train").rglob("*.bin"))
    part.unlink()
    os.mkfifo(part)
    assert any(f"{part} is not a regular file" in problem for problem in verify(data).problems)


def test_a_sweep_names_folders_in_its_own(tmp_path: Path) -> None:
    storage.put_json(tmp_path / "sweep.json", {"members": {"../../run": {}}})
    with pytest.raises(UserError, match=r"sweep\.json names '\.\./\.\./run'"):
        noted(tmp_path)


def test_a_pipe_in_a_run_folder_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "heartbeats").mkdir()
    beats = ("heartbeats/rank-0000.json", "heartbeats/node-0000.jsonl")
    for name in ("config.yaml", "metrics.jsonl", "exit.json", "lock", *beats):
        os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="not a regular file"):
        load_written(tmp_path / "config.yaml")
    with pytest.raises(UserError, match="not a regular file"):
        next(json_lines_backwards(tmp_path / "metrics.jsonl"))
    assert read_beat(tmp_path) is None and read_beats(tmp_path) == {}
    with pytest.raises(UserError, match="not a regular file"):
        holder(tmp_path)
    assert is_held(tmp_path)
    (tmp_path / beats[1]).unlink()
    (tmp_path / beats[1]).symlink_to("/dev/zero")
    assert read_beat(tmp_path) is None
