"""Checkpoints of Megatron Core: the logits that it computes itself, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from typer.testing import CliRunner

from pipeline.cli.main import app
from pipeline.common.errors import UserError
from pipeline.train.checkpoint.inert_pickle import InertObject
from pipeline.train.foreign.distributed import DistributedFiles
from pipeline.train.foreign.megatron import MegatronCheckpoint
from pipeline.train.foreign.pickles import read_saved
from pipeline.train.model.context import Context
from pipeline.train.model.decoder import Decoder
from tests.train.foreign.make_megatron import ARGUMENTS, KINDS

CASES: dict[str, dict[str, Any]] = {
    "llama over tp 2, pp 2": {"kind": "llama", "tp": 2, "pp": 2},
    "mixtral over ep 2": {"kind": "mixtral", "ep": 2},
    "gpt over tp 2": {"kind": "gpt", "tp": 2},
    "llama in one process": {"kind": "llama"},
    **{kind: {"kind": kind} for kind in ("llama-interleaved", "llama-scaled", "llama-window", "pre-softmax")},
    "qwen2 over tp 2": {"kind": "qwen2", "tp": 2},
    "qwen3 over tp 2, pp 2": {"kind": "qwen3", "tp": 2, "pp": 2},
    "qwen3, interleaved": {"kind": "qwen3", "arguments": {"rotary_interleaved": True}},
    "neox over pp 2": {"kind": "neox", "pp": 2},
    "squared-relu": {"kind": "squared-relu"},
}


SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in [*CASES][1:]]


def made(out: Path, case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a checkpoint with Megatron Core; returns token ids and its logits."""
    words = [sys.executable, "-W", "ignore", "-m", "tests.train.foreign.make_megatron", str(out), json.dumps(case)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    ids, logits = torch.load(out / "logits.pt")
    return ids, logits


@pytest.mark.parametrize("case", [pytest.param(next(iter(CASES)), marks=pytest.mark.guard), *SLOW])
def test_logits_are_those_of_megatron_core(tmp_path: Path, case: str) -> None:
    pytest.importorskip("megatron.core")
    ids, wanted = made(tmp_path, CASES[case])
    found = MegatronCheckpoint(tmp_path)
    model = Decoder(found.spec)
    model.load_state_dict(found.read(found.tensors), strict=False)
    logits = model.eval()(ids, Context())[..., : wanted.shape[-1]]
    assert wanted.abs().max() > 1, "logits that say something"
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)


def write(
    folder: Path,
    changes: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    common: dict[str, Any] | None = None,
) -> Path:
    """A checkpoint of random weights with Megatron's names, written by torch alone."""
    arguments = {**ARGUMENTS, **(changes or {})}
    layers, dim, ffn = arguments["num_layers"], arguments["hidden_size"], arguments["ffn_hidden_size"]
    groups, heads, size = 2, arguments["num_attention_heads"], arguments["kv_channels"]
    shapes = {
        "embedding.word_embeddings.weight": (arguments["padded_vocab_size"], dim),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (layers, dim),
        "decoder.layers.self_attention.linear_qkv.weight": (layers, (heads + 2 * groups) * size, dim),
        "decoder.layers.self_attention.linear_proj.weight": (layers, dim, heads * size),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": (layers, dim),
        "decoder.layers.mlp.linear_fc1.weight": (layers, 2 * ffn, dim),
        "decoder.layers.mlp.linear_fc2.weight": (layers, dim, ffn),
        "decoder.final_layernorm.weight": (dim,),
        "output_layer.weight": (arguments["padded_vocab_size"], dim),
    }
    generator = torch.Generator().manual_seed(1)
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    state |= tensors or {}
    path = folder / "iter_0000010"
    path.mkdir(parents=True)
    dcp.save({name: each for name, each in state.items() if each is not None}, checkpoint_id=path, no_dist=True)
    torch.save({"args": Namespace(**arguments), "iteration": 10, **(common or {})}, path / "common.pt")
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (folder / "latest_checkpointed_iteration.txt").write_text("10\n")
    return path


def run(*words: object) -> tuple[int, str]:
    """A command, its code and what it printed."""
    done = CliRunner().invoke(app, ["convert", "from-megatron", *map(str, words)], env={"COLUMNS": "500"})
    error = done.exception
    if isinstance(error, UserError):
        return error.exit_code, done.output + str(error)
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    write(folder)
    return folder


def test_what_is_converted_is_what_is_read(folder: Path, tmp_path: Path) -> None:
    code, text = run(folder, tmp_path / "out")
    assert code == 0, text
    found, weights = MegatronCheckpoint(folder), load_file(tmp_path / "out" / "model.safetensors")
    assert weights.keys() == found.tensors.keys()
    assert all(torch.equal(value, weights[name]) for name, value in found.read(found.tensors).items())
    name = "decoder.layers.self_attention.linear_qkv.weight"
    fused = DistributedFiles(folder / "iter_0000010").read(name, [slice(2, 3)])[0]
    # Two groups of 32 rows: 16 of two query heads, 8 of the key, 8 of the value.
    assert torch.equal(weights["layers.2.mixer.wq.weight"], torch.cat((fused[:16], fused[32:48])))
    assert torch.equal(weights["layers.2.mixer.wk.weight"], torch.cat((fused[16:24], fused[48:56])))
    assert torch.equal(weights["layers.2.mixer.wv.weight"], torch.cat((fused[24:32], fused[56:])))
    code, shown = run(folder, "--dry-run")
    assert code == 0 and "kv_heads: 2" in shown and "iteration 10; the run had read 100 samples" in shown
    assert f"path: {tmp_path / 'out'}" in (tmp_path / "out" / "model.yaml").read_text()


SHARED: Any = "x"
for _ in range(45):
    SHARED = (SHARED, SHARED)
DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown argument of the model": ({"attention_of_tomorrow": 3}, "attention_of_tomorrow: 3"),
    "latent attention": ({"multi_latent_attention": True}, "multi_latent_attention"),
    "mtp": ({"mtp_num_layers": 1}, "mtp_num_layers"),
    "a window in some layers": ({"window_size": (4, 0), "window_attn_skip_freq": 2}, "window_attn_skip_freq"),
    "a score that is not known": (
        {"num_experts": 4, "moe_router_score_function": "sigmoid"},
        "moe_router_score_function",
    ),
    "sinkhorn": ({"num_experts": 4, "moe_router_load_balancing_type": ["sinkhorn"]}, "sinkhorn"),
    "shared tuples": ({"attention_x": SHARED}, "attention_x"),
    "a deep list": ({"hidden_size": DEEP}, "hidden_size"),
    "no position": ({"max_position_embeddings": "abc"}, "max_position_embeddings: 'abc'"),
    "absurd positions": ({"max_position_embeddings": 10**30}, "max_position_embeddings"),
    "another number of layers": ({"num_layers": 5}, "num_layers 5"),
    "a size that is no number": ({"hidden_size": "32"}, "hidden_size"),
    "another width": ({"hidden_size": 64}, "embedding.word_embeddings.weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_compute_something_else_is_refused_by_name(tmp_path: Path, case: str) -> None:
    changes, named = REFUSED[case]
    path = write(tmp_path)
    torch.save({"args": Namespace(**{**ARGUMENTS, **changes})}, path / "common.pt")
    code, text = run(tmp_path, tmp_path / "out")
    assert code == 2 and named in text, text
    assert not (tmp_path / "out").exists()


def test_an_argument_that_the_user_knows_is_ignored(tmp_path: Path) -> None:
    path = write(tmp_path)
    torch.save({"args": Namespace(**ARGUMENTS, attention_of_tomorrow=3)}, path / "common.pt")
    assert run(tmp_path, tmp_path / "out", "--ignore", "attention_of_tomorrow")[0] == 0


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def refused(number: int, named: str, tensors: dict[str, Any] | None = None) -> Path:
        path = write(tmp_path / str(number), tensors=tensors)
        if tensors is not None:
            code, text = run(path, tmp_path / "out")
            assert code == 2 and named in text, text
        return path

    refused(1, "mtp.layers.0.eh_proj.weight", {"mtp.layers.0.eh_proj.weight": torch.zeros(2, 2)})
    refused(2, "linear_fc2", {"decoder.layers.mlp.linear_fc2.weight": None})
    refused(3, "decoder.layers.0.mlp.more", {"decoder.layers.mlp.more": torch.zeros(4, 2)})
    refused(4, "torch.float8_e4m3fn", {"output_layer.weight": torch.zeros(256, 32).to(torch.float8_e4m3fn)})
    path = refused(5, "")
    shard = next(path.glob("*.distcp"))
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 100)
    code, text = run(path, tmp_path / "out")
    assert code == 2 and ".metadata" in text and shard.name in text, text
    shard.unlink()
    code, text = run(path, tmp_path / "out")
    assert code == 2 and shard.name in text, text
    (path / ".metadata").unlink()
    code, text = run(path, tmp_path / "out")
    assert code == 2 and "not complete" in text, text
    assert not (tmp_path / "out").exists()


def test_an_optimizer_beside_the_model_is_left_out(tmp_path: Path) -> None:
    more = {"chained_0.optimizer.state.exp_avg.x": torch.zeros(3), "optimizer.state.exp_avg.y": torch.zeros(3)}
    write(tmp_path, tensors=more)
    assert run(tmp_path, tmp_path / "out")[0] == 0
    assert run(tmp_path / "iter_0000010", tmp_path / "again", "--step", 10)[0] == 0


def test_links_and_other_types_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    shard = next(path.glob("*.distcp"))
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    code, text = run(tmp_path, tmp_path / "out")
    assert code == 2 and "is a link" in text
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9" * 5000)
    assert run(tmp_path, tmp_path / "out")[0] == 2


def test_other_formats_are_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    (path / "metadata.json").write_text('{"sharded_backend": "fsdp_dtensor"}')
    assert "fsdp_dtensor" in run(tmp_path, tmp_path / "out")[1]
    (path / "mp_rank_00").mkdir()
    assert "--ckpt-convert-format torch_dist" in run(tmp_path, tmp_path / "out")[1]
    assert "it has 10" in run(tmp_path, tmp_path / "out", "--step", 20)[1]


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/harm",)


def test_pickles_run_nothing(tmp_path: Path) -> None:
    file = tmp_path / "common.pt"
    torch.save({"args": Namespace(num_layers=1, backend=_Evil(), dtype=torch.bfloat16, tensor=torch.zeros(2))}, file)
    state = read_saved(file)["args"].state
    assert state["num_layers"] == 1
    assert isinstance(state["backend"], InertObject) and state["backend"].kind == "posix.system"
    assert not Path("/tmp/harm").exists()
    file.write_bytes(pickle.dumps({"args": 1}))
    with pytest.raises(UserError, match="not a file of torch.save"):
        read_saved(file)


def test_every_kind_has_arguments_that_are_known() -> None:
    assert all(set(changes) <= set(ARGUMENTS) for changes in KINDS.values())
