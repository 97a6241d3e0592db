"""`pipeline train --check`: what it prints, against what is built or counted elsewhere."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.config.model import MtpConfig
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.distributed.layout import Layout
from pipeline.train.model.decoder import Decoder, ModelPart
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.flops import layer_parameters, num_parameters
from pipeline.train.parallel.footprint import end_parameters, footprint, layer_sizes
from pipeline.train.rules.layout_check import check, world_size
from tests import tiny
from tests.config.runfile import write
from tests.train.models import FAMILIES
from tests.train.one_process import config_of

LLAMA_405B = (
    "model={layers: 126, dim: 16384, heads: 128, kv_heads: 8, ffn_dim: 53248}",
    "tokenizer.train.vocab_size=128256",
    "train={duration: 10 steps, sequence_length: 8192, batch_size: 2048, micro_batch_size: 1}",
    "launch.processes=4096",
    "parallel={tp: 8, pp: 16}",
)


def _printed(config: Config, environment: dict[str, str] | None = None) -> str:
    stream = io.StringIO()
    check(config, Console(file=stream, width=200), environment or {})
    return stream.getvalue()


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write(tmp_path)


def test_a_large_layout(run_file: Path) -> None:
    text = _printed(load(run_file, LLAMA_405B))
    assert "layout: pp 16 x dp_shard 32 x tp 8 = 4,096 processes" in text
    # tp innermost, pp outermost: 8 neighbours, then 32 such groups, then 16 of those.
    assert re.search(r"tp +8  .* over ranks 0-7, and so on", text)
    assert re.search(r"dp_shard +32  .* over ranks 0, 8, 16, \.\.\., 248, and so on", text)
    assert re.search(r"pp +16  .* over ranks 0, 256, 512, \.\.\., 3840, and so on", text)
    assert "vocabulary of 128,256 (as tokenizer.train.vocab_size says; the tokenizer is not trained yet)" in text
    assert "2,048 windows of 8,192 tokens over 32 data-parallel ranks: 64 micro-batches of 1 on each\n" in text
    assert "pipeline: 1f1b, 16 stages, 1 on each pp rank, balanced" in text
    # Cheaper stages at both ends lengthen nothing; the bubble of 16 equal ones is 15 / (64 + 15) = 19.0 %.
    (bubble,) = re.findall(r"64 micro-batches: ([\d.]+) % of the time is waiting", text)
    assert 19.0 <= float(bubble) < 20.5
    # The published size of Llama 3.1 405B, whose vocabulary is a multiple of 128.
    assert "model: 405,853,388,800 parameters" in text
    assert "warning" not in text


def test_a_small_layout_is_told_in_the_singular(run_file: Path) -> None:
    """One group of ranks has no others after it, and one micro-batch is no plural."""
    text = _printed(load(run_file, ["parallel={pp: 2, pipeline: {schedule: gpipe}}", "model.layers=2"]))
    assert "over ranks 0-1\n" in text and "and so on" not in text
    assert re.search(r"over 1 data-parallel rank: 1 micro-batch of \d+ on each\n", text)
    assert "  1 micro-batch: " in text
    assert re.search(r"^ +0 +0  0 +embedding ", text, re.M)


def test_stages_of_the_table_are_all_of_the_model(run_file: Path) -> None:
    rows = re.findall(r"^ +(\d+) +(\d+)  (\S+) .*? ([\d,]+) +([\d.]+) %$", _printed(load(run_file, LLAMA_405B)), re.M)
    assert [(int(stage), int(rank)) for stage, rank, *_ in rows] == [(n, n) for n in range(16)]
    spans = [tuple(map(int, layers.split("-"))) for _, _, layers, _, _ in rows]
    assert [index for first, last in spans for index in range(first, last + 1)] == list(range(126))
    assert sum(int(parameters.replace(",", "")) for *_, parameters, _ in rows) == 405_853_388_800
    assert sum(float(share) for *_, share in rows) == pytest.approx(100, abs=1)


def test_memory_of_one_process(run_file: Path) -> None:
    """GPT-2 small, whose size is published: 16 bytes of a parameter, and 2 more for bf16."""
    config = load(
        run_file,
        [
            "model={layers: 12, dim: 768, heads: 12, norm: layernorm, mlp: gelu, bias: all, positions: learned, "
            "tie_embeddings: true, vocab_multiple: 1}",
            "tokenizer.train.vocab_size=50257",
            "train.sequence_length=1024",
        ],
    )
    text = _printed(config)
    assert "layout: one process\n" in text
    gib = 124_439_808 / 2**30
    assert f"124,439,808 parameters: {16 * gib:.3g} weights, moments, gradients + " in text
    assert f" + {2 * gib:.3g} unsharded in bf16 = " in text
    assert f"= {18 * gib:.3g}\n" in text
    assert f" = {20 * gib:.3g}\n" in _printed(config.model_copy(update={"train": _precision(config, "fp32")}))


def _precision(config: Config, compute: str) -> Any:
    precision = config.train.precision.model_copy(update={"compute": compute})
    return config.train.model_copy(update={"precision": precision})


# What tensor parallelism cuts, by name: written down here once more, to find what the counting forgets.
_CUT = re.compile(r"(w[q13]\.|w[okv2]\.weight|embedding\.weight|head\.weight|w[kv]\.bias)")
_WHOLE = re.compile(r"(norm\.|w[o2]\.bias|position_embedding|of_embedding|of_stream)")


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_a_rank_are_those_of_the_module(family: str, depth: int, tp: int) -> None:
    mtp = MtpConfig(depth=depth) if depth else None
    spec = decoder_spec(FAMILIES[family].config.model_copy(update={"mtp": mtp}), 97, 64)
    kv_heads = spec.layers[0].mixer.kv_heads
    for part in (
        ModelPart.whole(spec),
        ModelPart(range(1), True, False),
        ModelPart(range(1, 2), False, False),
        ModelPart(range(3, 3), False, True),
    ):
        with torch.device("meta"):
            model = Decoder(spec, part)
        expected = 0
        for name, parameter in model.named_parameters():
            shared = re.search(r"w[kv]\.", name) is not None and kv_heads % tp > 0
            whole = _WHOLE.search(name) is not None
            assert whole or _CUT.search(name), name
            expected += parameter.numel() // (1 if whole or shared else tp)
        sizes = layer_sizes(spec, part, tp)
        assert end_parameters(spec, part, tp) + sum(sizes.values()) == expected
        assert [sizes[index] for index in part.layers] == [
            layer_parameters(spec.layers[index], tp) for index in part.layers
        ]
    whole = ModelPart.whole(spec)
    assert end_parameters(spec, whole, 1) + sum(layer_sizes(spec, whole, 1).values()) == num_parameters(spec)


def test_footprint_by_hand() -> None:
    model = FAMILIES["llama"].config.model_copy(update={"layers": 4, "vocab_multiple": 100})
    spec = decoder_spec(model, 97, 64)
    # q and o 32 * 32, k and v 32 * 16, three of 32 * 48, two norms; two tables of 100 * 32 and a norm.
    layer, ends = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 64, 2 * 3200 + 32
    everything = 4 * layer + ends

    def of(
        layout: Layout, parts: list[ModelPart], *, averages: bool = False, optimizer: Any = None, **keys: Any
    ) -> tuple[int, int, int, int]:
        config = config_of(
            model,
            parallel={**layout.degrees, **keys},
            optimizer=optimizer or {},
            ema={"decay": 0.9} if averages else None,
        )
        row = footprint(config, layout, spec, parts)
        return row.parameters, row.states, row.compute, row.accumulated

    whole = [ModelPart.whole(spec)]
    assert of(Layout(), whole) == (everything, 16 * everything, 2 * everything, 0)
    assert of(Layout(), whole, averages=True) == (everything, 20 * everything, 2 * everything, 0)
    assert of(Layout(dp_replicate=8), whole) == (everything, 16 * everything, 2 * everything, 0)
    assert of(Layout(dp_shard=4), whole) == (everything, 4 * everything, 2 * (2 * layer + ends), 0)
    kept = of(Layout(dp_shard=4), whole, reshard_after_forward=False)
    assert kept == (everything, 4 * everything, 2 * everything, 0)
    # Moments in bf16; and of the matrices of layers one rather than two.
    assert of(Layout(), whole, optimizer={"states": "bf16"})[1] == 12 * everything
    muon = {"type": "muon"}
    assert of(Layout(), whole, optimizer=muon)[1] == 16 * everything - 4 * 4 * (layer - 64)
    assert of(Layout(), whole, optimizer={**muon, "states": "bf16"})[1] == 12 * everything - 2 * 4 * (layer - 64)
    # With a pipeline whole gradients are added up before they are sharded.
    middle = [ModelPart(range(1, 3), False, False)]
    assert of(Layout(pp=4, dp_shard=4), middle) == (2 * layer, 8 * layer, 4 * layer, 8 * layer)
    assert of(Layout(pp=4), middle) == (2 * layer, 32 * layer, 4 * layer, 0)


def test_processes(run_file: Path) -> None:
    config = load(run_file, ["parallel={tp: 2, dp_shard: 3}"])
    assert world_size(config, {}) == 6
    assert world_size(config, {"WORLD_SIZE": "12"}) == 12
    assert world_size(load(run_file, ["launch.processes=8"]), {"WORLD_SIZE": "12"}) == 8
    with pytest.raises(UserError, match="WORLD_SIZE='many'"):
        world_size(config, {"WORLD_SIZE": "many"})
    assert "dp_shard 12 = 12 processes" in _printed(load(run_file), {"WORLD_SIZE": "12"})


def test_the_runs_own_tokenizer(tmp_path: Path) -> None:
    config = load(tiny.write_run(tmp_path, {"tokenizer.train.vocab_size": 290}))
    assert "vocabulary of 290 (as tokenizer.train.vocab_size says" in _printed(config)
    preprocess(config)
    text = _printed(config)
    (tokens,) = re.findall(r"vocabulary of ([\d,]+) \(of the run's tokenizer\)", text)
    saved = json.loads((config.data_dir / "tokenizer/tokenizer.json").read_text())
    assert int(tokens) == 1 + max([*saved["model"]["vocab"].values(), *(one["id"] for one in saved["added_tokens"])])


def test_virtual_stages_and_phases(run_file: Path) -> None:
    overrides = [
        "model.layers=4",
        "parallel={pp: 2, pipeline: {schedule: zbv, layers_per_stage: [0, 1, 2, 1]}}",
        "train={duration: 10 steps, batch_size: 8, micro_batch_size: 1}",
        "blend.phases=[{until: 5 steps}, {batch_size: 5}]",
    ]
    text = _printed(load(run_file, overrides))
    assert "pipeline: zbv, 4 stages, 2 on each pp rank, as given" in text
    rows = re.findall(r"^ +(\d) +(\d)  (none|\d(?:-\d)?) +((?:embedding|head)?)", text, re.M)
    assert rows == [
        ("0", "0", "none", "embedding"),
        ("1", "1", "0", ""),
        ("2", "1", "1-2", ""),
        ("3", "0", "3", "head"),
    ]
    assert "5 micro-batches: " in text and "8 micro-batches: " in text
    assert "step (blend.phases.1.batch_size): 5 windows" in text


def test_a_ramp_shows_its_fewest_and_its_most_micro_batches(run_file: Path) -> None:
    overrides = [
        "parallel.pp=2",
        "train={duration: 10 steps, batch_size: 20, micro_batch_size: 1, "
        "batch_ramp: {start: 2, increment: 2, tokens: 1M}}",
    ]
    text = _printed(load(run_file, overrides))
    assert re.findall(r"(\d+) micro-batches: ", text) == ["2", "20"]
    assert text.count("step (train.batch_ramp): ") + text.count("step (train.batch_size): ") == 8
    assert "\n  (2 more)\n" in text


@pytest.mark.guard
def test_refused_with_exit_code_2_and_without_a_trace(run_file: Path, tmp_path: Path) -> None:
    """In a process of its own, as on a login node; it must not join, or wait for, other processes."""
    environment = {**os.environ, "WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pipeline", "train", str(run_file), "--check", f"run.dir={tmp_path / 'run'}"]

    def ends(*overrides: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *overrides], env=environment, capture_output=True, text=True, timeout=300)

    good = ends("parallel.tp=2")
    assert (good.returncode, good.stderr) == (0, "")
    assert "layout: dp_shard 2 x tp 2 = 4 processes" in good.stdout
    bad = ends("parallel.tp=2", "model.heads=1")
    assert bad.returncode == 2 and not bad.stdout
    assert "error: the layout (dp_shard 2 x tp 2) has a problem:" in bad.stderr and "Traceback" not in bad.stderr
    assert not (tmp_path / "run").exists()
