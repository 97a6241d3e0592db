"""Runs of Megatron Core that are continued here with their optimizer: its own next losses, and what is refused."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file

from pipeline.common.errors import MachineError
from pipeline.common.problems import Problems
from pipeline.config.load import load
from pipeline.data.datasets.open import open_datasets
from pipeline.data.loading.loader import open_loader
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.checkpoint import weight_files
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.tensors import Stored, read
from pipeline.train.foreign.convert import from_megatron
from pipeline.train.foreign.distributed import DistributedFiles
from pipeline.train.foreign.megatron_tensors import BucketTensors
from pipeline.train.start.checks import TRAIN_CHECKS, TrainScope
from tests import tiny
from tests.train.distributed.ranks import run as run_ranks
from tests.train.foreign.make_megatron import ARGUMENTS
from tests.train.foreign.test_megatron import run as convert
from tests.train.foreign.test_megatron import write
from tests.train.runs import column, exact, start, train

STEPS, SAMPLES, LENGTH, ITERATION = 5, 8, 32, 10
VOCABULARY = {"arguments": {"padded_vocab_size": 384}}
CASES: dict[str, dict[str, Any]] = {
    "llama over tp 2": {"kind": "llama", "tp": 2, "sharding": "fully_reshardable"},
    "qwen2 over dp 2, buckets": {"kind": "qwen2", "dp": 2, "sharding": "dp_reshardable", "bucket_size": 5000},
    "qwen2 over pp 2": {"kind": "qwen2", "pp": 2, "sharding": "fully_reshardable"},
    "gpt over dp 2, one bucket": {"kind": "gpt", "dp": 2, "sharding": "dp_reshardable"},
    "mixtral": {"kind": "mixtral", "sharding": "fully_reshardable"},
    "qwen3 over tp 2, dp 2": {"kind": "qwen3", "tp": 2, "dp": 2, "sharding": "fully_reshardable"},
}
# Megatron's scheduler counts the tokens before a step, and ours those up to its end.
ITS_RATES = f"train.init_from.tokens={(ITERATION - 1) * SAMPLES * LENGTH}"
SETTINGS = {
    "train.batch_size": SAMPLES,
    "train.micro_batch_size": 2,
    "train.sequence_length": LENGTH,
    "train.duration": f"{STEPS} steps",
    "train.schedule": {"type": "cosine", "warmup": f"{4 * SAMPLES * LENGTH} tokens", "min_ratio": 0.1},
    "train.precision": {"compute": "fp32"},
    "train.balance": {"loss": 0.0},
    "train.validation": {"samples": 0},
    "train.checkpoint": {"every_steps": 2, "keep": 9},
}
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp_shard 2": ("parallel.dp_shard=2",),
    "tp 2": ("parallel.tp=2",),
    "pp 2": ("parallel.pp=2", "train.micro_batch_size=4", "parallel.pipeline.schedule=gpipe"),
    "tp 2, dp_shard 2": ("parallel.tp=2", "parallel.dp_shard=2"),
}


def made(out: Path, case: dict[str, Any], tokens: torch.Tensor) -> list[tuple[float, float]]:
    """Let Megatron Core train and save; returns loss and norm of the gradient of the steps on `tokens` behind it."""
    out.mkdir(parents=True)
    torch.save(tokens, out / "tokens.pt")
    case = {**case, "arguments": {**VOCABULARY["arguments"], **case.get("arguments", {})}}
    words = [sys.executable, "-W", "ignore", "-m", "tests.train.foreign.make_megatron_run", str(out), json.dumps(case)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return list(torch.load(out / "losses.pt"))


def run_file(root: Path, part: Path, name: str) -> str:
    """A run file with the model and the optimizer of a converted folder."""
    section = yaml.safe_load(part.read_text())
    train = section["train"]
    changes = {"model": section["model"], "train.init_from": train["init_from"], "train.optimizer": train["optimizer"]}
    tiny.write_run(root, {**SETTINGS, **changes}, name=name)
    return name


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, preprocessed."""
    folder = tmp_path_factory.mktemp("corpus")
    preprocess(load(tiny.write_run(folder, SETTINGS)))
    return folder


@pytest.fixture(scope="module")
def batches(root: Path) -> torch.Tensor:
    """The samples of the first steps of a run here, int64 [steps, samples, length + 1]."""
    config = load(root / "run.yaml", [f"run.dir={root / 'batches'}"])
    steps = open_loader(config, open_datasets(config, "train"), whole_steps=True).iterate(0, STEPS)
    found = [step.micro_batches[0] for step in steps]
    return torch.stack([torch.cat([each.tokens, each.targets[:, -1:]], 1) for each in found])


def check_losses(run: Path, wanted: list[tuple[float, float]]) -> None:
    """Losses and norms of a run are those of Megatron's steps."""
    losses, norms = column(run, "loss"), column(run, "grad_norm")
    assert len(losses) == STEPS
    for (loss, norm), ours, our_norm in zip(wanted, losses, norms, strict=True):
        assert abs(loss - ours) < 1e-5 and abs(norm - our_norm) < 1e-5 * max(1, norm), (wanted, losses, norms)


FEW = pytest.param(next(iter(CASES)), ["tp 2, dp_shard 2"], marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("case", "layouts"), [FEW, *(pytest.param(case, [*LAYOUTS], marks=pytest.mark.slow) for case in CASES)]
)
def test_the_next_losses_are_those_of_megatron(
    root: Path, tmp_path: Path, batches: torch.Tensor, case: str, layouts: list[str]
) -> None:
    pytest.importorskip("megatron.core")
    wanted = made(tmp_path / "run", CASES[case], batches)
    code, text = convert(tmp_path / "run", tmp_path / "out", "--optimizer")
    assert code == 0, text
    file = run_file(root, tmp_path / "out" / "model.yaml", f"{tmp_path.name}.yaml")
    check_losses(train(root, f"{tmp_path.name}-one", ITS_RATES, file=file), wanted)
    for layout in layouts:
        overrides = LAYOUTS[layout]
        run = root / f"{tmp_path.name}-{layout.replace(' ', '-')}"
        world = 4 if "," in layout else 2
        run_ranks(world, start_in_ranks, (ITS_RATES, *overrides), root, run.name, file, connect=False)
        check_losses(run, wanted)


def start_in_ranks(arguments: tuple[str, ...], root: Path, name: str, file: str) -> None:
    """A rank of a training that ends well."""
    code, out = start(root, name, *arguments, file=file)
    assert code == 0, out


# Made without Megatron


def states(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """States of an optimizer in the layout of the model; the masters round to the weights in bf16."""
    generator = torch.Generator().manual_seed(2)
    found = {}
    for name, weight in model.items():
        found[f"optimizer.state.param.{name}"] = weight.float()
        found[f"optimizer.state.exp_avg.{name}"] = torch.randn(weight.shape, generator=generator)
        found[f"optimizer.state.exp_avg_sq.{name}"] = torch.rand(weight.shape, generator=generator)
    return found


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint that `write` made."""
    files = DistributedFiles(folder / "iter_0000010")
    return {name: files.read(name, []) for name in files.tensors}


GROUP = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 10.0}
GROUPS = [GROUP, {**GROUP, "weight_decay": 0.0}]
TRAINED = {"clip_grad": 1.0, "optimizer": "adam", "adam_eps": 1e-8, "transformer_impl": "local"}


def with_optimizer(
    folder: Path,
    more: dict[str, torch.Tensor | None] | None = None,
    *,
    kind: str | None = "fully_reshardable",
    groups: Any = GROUPS,
    **arguments: Any,
) -> Path:
    """A checkpoint with the states of an optimizer, written by torch alone."""
    arguments = {**TRAINED, **arguments}
    write(folder / "plain", arguments)
    return write(
        folder / "run",
        arguments,
        {**states(model_of(folder / "plain")), **(more or {})},
        {
            "optimizer": {"optimizer": {"param_groups": groups}},
            "content_metadata": {} if kind is None else {"distrib_optim_sharding_type": kind},
        },
    )


def test_states_come_with_weights(tmp_path: Path) -> None:
    files = DistributedFiles(with_optimizer(tmp_path))
    code, text = convert(tmp_path / "run", tmp_path / "out", "--optimizer")
    assert code == 0, text
    for moment in ("exp_avg", "exp_avg_sq"):
        found = load_file(tmp_path / "out" / "optimizer" / moment / "model.safetensors")
        fused = files.read(f"optimizer.state.{moment}.decoder.layers.self_attention.linear_qkv.weight", [])[2]
        # Two groups of 32 rows: 16 of two query heads, 8 of the key, 8 of the value.
        assert torch.equal(found["layers.2.mixer.wq.weight"], torch.cat((fused[:16], fused[32:48])))
        assert torch.equal(found["layers.2.mixer.wv.weight"], torch.cat((fused[24:32], fused[56:])))
    about = json.loads((tmp_path / "out" / "export.json").read_text())["optimizer"]
    assert (about["step"], about["samples"], about["tokens"]) == (10, 100, 100 * 64)
    assert about["betas"] == [0.9, 0.95] and about["weight_decay"] == 0.1
    section = yaml.safe_load((tmp_path / "out" / "model.yaml").read_text())["train"]
    assert section["init_from"]["optimizer"] is True and section["optimizer"]["lr"] == ARGUMENTS["lr"]
    code, shown = convert(tmp_path / "run", "--optimizer", "--dry-run")
    assert code == 0 and yaml.safe_load(shown)["train"]["optimizer"] == section["optimizer"]


NORM = "decoder.final_layernorm.weight"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a parameter without moments": (
        {"more": {f"optimizer.state.exp_avg.{NORM}": None}},
        f"optimizer.state.exp_avg.{NORM}",
    ),
    "moments in bf16": (
        {"more": {f"optimizer.state.exp_avg_sq.{NORM}": torch.zeros(32).bfloat16()}},
        f"optimizer.state.exp_avg_sq.{NORM} is of torch.bfloat16",
    ),
    "another shape": ({"more": {f"optimizer.state.exp_avg.{NORM}": torch.zeros(16)}}, f"exp_avg.{NORM} is"),
    "moments of something else": (
        {"more": {"optimizer.state.exp_avg.decoder.adapter": torch.zeros(2)}},
        "optimizer.state.exp_avg.decoder.adapter",
    ),
    "two entries in one place": (
        {"more": {f"chained_1.optimizer.state.exp_avg.{NORM}": torch.zeros(32)}},
        "twice",
    ),
    "masters of other weights": (
        {"more": {f"optimizer.state.param.{NORM}": torch.full((32,), 7.0)}},
        "norm.weight",
    ),
    "another optimizer": ({"optimizer": "muon"}, "optimizer: 'muon'"),
    "weight decay in the gradient": ({"decoupled_weight_decay": False}, "decoupled_weight_decay"),
    "a precision-aware optimizer": (
        {"use_precision_aware_optimizer": True, "exp_avg_dtype": "fp8"},
        "exp_avg_dtype: 'fp8'",
    ),
    "another way of saving": ({"kind": "fully_sharded_model_space"}, "--dist-ckpt-optim-fully-reshardable"),
    "not the distributed optimizer": ({"kind": None}, "--use-distributed-optimizer"),
    "buckets of two groups": (
        {
            "kind": "dp_reshardable",
            "more": {
                "optimizer.distributed.dp_group_idx_1.gbuf_idx_0.dtype_(a, b).bucket_idx_0.param": torch.zeros(64)
            },
        },
        "tensor and pipeline parallelism of 1",
    ),
    "no step": ({"groups": [{**GROUP, "step": "ten"}]}, "step: 'ten'"),
    "groups apart": ({"groups": [GROUP, {**GROUP, "step": 11.0}]}, "step: groups differ"),
    "betas that are none": ({"groups": [{**GROUP, "betas": (0.9, 1.5)}]}, "betas"),
    "no count of samples": ({"consumed_train_samples": None}, "consumed_train_samples"),
}
FIRST, *OTHERS = REFUSED


@pytest.mark.parametrize("case", [FIRST, *(pytest.param(case, marks=pytest.mark.guard) for case in OTHERS)])
def test_what_cannot_be_continued_is_refused_by_name(tmp_path: Path, case: str) -> None:
    changes, named = REFUSED[case]
    with_optimizer(tmp_path, **changes)
    code, text = convert(tmp_path / "run", tmp_path / "out", "--optimizer")
    assert code == 2 and named in text, text
    assert not [each for each in tmp_path.iterdir() if each.name not in ("plain", "run")], "nothing is left over"
    assert convert(tmp_path / "run", tmp_path / "out")[0] == 0, "the weights alone"


class Flat:
    """Files with one flat bucket, of random numbers."""

    folder = Path("here")

    def __init__(self, sizes: list[int], aligned: int = 64) -> None:
        ends, self._borders = 0, {0}
        for size in sizes:
            first = -(-ends // aligned) * aligned
            ends = first + size
            self._borders |= {first, ends}
        self.values = torch.randn(ends, generator=torch.Generator().manual_seed(3))
        self.tensors = {"bucket": Stored((ends,), torch.float32)}

    def borders(self, name: str) -> set[int]:
        """See `DistributedFiles`."""
        return self._borders

    def read(self, name: str, part: list[slice]) -> torch.Tensor:
        """See `DistributedFiles`."""
        return self.values[part[0]]


SHAPES = {
    "output_layer.weight": (10, 7),
    "embedding.word_embeddings.weight": (10, 7),
    "decoder.layers.0.input_layernorm.weight": (7,),
    "decoder.layers.0.self_attention.linear_proj.weight": (7, 20),
    "decoder.layers.0.self_attention.linear_qkv.weight": (60, 7),
    "decoder.layers.0.pre_mlp_layernorm.weight": (7,),
    "decoder.layers.0.mlp.linear_fc1.weight": (30, 7),
    "decoder.layers.0.mlp.linear_fc2.weight": (7, 15),
    "decoder.final_layernorm.weight": (7,),
}
SIZES = {"local": [70, 7, 105, 210, 7, 420, 140, 7, 70], "transformer_engine": [70, 7, 105, 210, 7, 420, 7, 140, 70]}


@pytest.mark.parametrize("implementation", SIZES)
def test_parameters_of_a_bucket_are_found_by_their_order(implementation: str) -> None:
    files: Any = Flat(SIZES[implementation])
    found = BucketTensors(files, ["bucket"], SHAPES, implementation)
    with found.opened() as read_part:
        # Behind the head (70), the last norm (from 128 on), fc2 (192), fc1 (320), a norm (576) comes qkv.
        qkv = files.values[640 : 640 + 420].view(60, 7)
        name = "decoder.layers.0.self_attention.linear_qkv.weight"
        assert torch.equal(read_part(name, (slice(8, 20), slice(2, 5))), qkv[8:20, 2:5])
        assert torch.equal(read_part("decoder.final_layernorm.weight"), files.values[128:135])
    other = next(each for each in SIZES if each != implementation)
    for wrong in (Flat(SIZES[other]), Flat([*SIZES[implementation][:-1], 69]), Flat(SIZES[implementation], 128)):
        with pytest.raises(ValueError, match=r"bucket"):
            BucketTensors(wrong, ["bucket"], SHAPES, implementation)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mlp.router.weight"):
        BucketTensors(files, ["bucket"], {**SHAPES, "decoder.layers.0.mlp.router.weight": (4, 7)}, implementation)


@pytest.mark.guard
def test_files_that_were_cut_and_full_disks_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_optimizer(tmp_path)
    writing = weight_files._write

    def full(file: Path, *arguments: Any) -> Any:
        if "exp_avg_sq" in str(file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writing(file, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(weight_files, "_write", full)
        with pytest.raises(MachineError, match="free some space"):
            from_megatron(tmp_path / "run", tmp_path / "out", optimizer=True, console=Console(quiet=True))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["plain", "run"]
    shard = next(path.glob("*.distcp"))
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 100)
    code, text = convert(tmp_path / "run", tmp_path / "out", "--optimizer")
    assert code == 2 and shard.name in text, text
    assert sorted(each.name for each in tmp_path.iterdir()) == ["plain", "run"]


# Runs that begin with them


@pytest.fixture(scope="module")
def exported(root: Path) -> Path:
    """A converted folder with an optimizer, and a run file that begins with it."""
    with_optimizer(root / "foreign", seq_length=LENGTH, padded_vocab_size=384, consumed_train_samples=80)
    code, text = convert(root / "foreign" / "run", root / "converted", "--optimizer")
    assert code == 0, text
    run_file(root, root / "converted" / "model.yaml", "continued.yaml")
    return root / "converted"


def test_a_run_takes_moments_steps_and_the_place_in_the_schedule(root: Path, exported: Path) -> None:
    overrides = ("train.duration=2 steps", "train.optimizer.lr=1e-2")
    found = Problems()
    config = load(root / "continued.yaml", [f"run.dir={root / 'continued'}", *overrides])
    assert found.look(TRAIN_CHECKS, TrainScope(config, 1)) and not found.problems
    assert any("continues behind 2,560 tokens" in line for line in found.warnings)
    code, out = start(root, "continued", *overrides, file="continued.yaml")
    assert code == 0, out
    assert "of 10 updates" in out and "continues behind 2,560 tokens" in out
    assert "train.optimizer.lr: 0.0001 where the moments are from -> 0.01 here" in out
    # Cosine from 4 steps of warm-up to the end of 12 steps, of which ten are done.
    rates = [1e-2 * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - 4) / 8))) for step in (11, 12)]
    assert column(root / "continued", "lr") == pytest.approx(rates)
    checkpoint = Checkpoints.of_run(root / "continued").at(2)
    state = read(checkpoint, "optimizer", {"state.norm.weight.step": Stored((), torch.float32)})
    assert state["state.norm.weight.step"] == 12
    assert checkpoint.state()["origin"]["optimizer_step"] == 10


@pytest.mark.guard
def test_a_run_resumes_without_the_folder_it_began_with(root: Path, exported: Path) -> None:
    whole = train(root, "whole", file="continued.yaml")
    shutil.copytree(whole, root / "part")
    shutil.rmtree(root / "part/checkpoints/step-00000005")
    (root / "part/checkpoints/latest").write_text("step-00000004\n")
    code, out = start(root, "part", f"train.init_from.path={root / 'nowhere'}", file="continued.yaml")
    assert code == 0, out
    assert column(root / "part", "lr") == column(whole, "lr") and exact(root / "part") == exact(whole)


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "another optimizer": (("train.optimizer.type=muon",), "train.optimizer.type is muon"),
    "weights alone": (("train.init_from.path={plain}",), "has weights alone"),
    "a run of ours": (("train.init_from.path={root}/sea",), "pipeline fork"),
    "a schedule that is too long": (("train.schedule.warmup=5000 tokens",), "2,560 of them before it"),
    "moments of another model": (("train.init_from.path={other}",), "exp_avg"),
}


@pytest.mark.guard
@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_the_run_is_refused(root: Path, exported: Path, case: str) -> None:
    overrides, named = WRONG[case]
    plain, other = root / "plain", root / "other"
    if not plain.exists():
        assert convert(root / "foreign" / "run", plain)[0] == 0
        shutil.copytree(exported, other)
        moments = other / "optimizer/exp_avg/model.safetensors"
        save_file({**load_file(moments), "norm.weight": torch.zeros(16)}, moments)
    values = [each.format(plain=plain, root=root, other=other) for each in overrides]
    code, out = start(root, f"wrong-{len(named)}", *values, file="continued.yaml")
    assert code == 2 and named in out, out


@pytest.mark.guard
def test_moments_that_changed_are_refused(root: Path, exported: Path) -> None:
    changed = root / "changed"
    shutil.copytree(exported, changed)
    with (changed / "optimizer/exp_avg_sq/model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    code, out = start(root, "changed-run", f"train.init_from.path={changed}", file="continued.yaml")
    assert code == 2 and "optimizer/exp_avg_sq/model.safetensors has changed" in out, out
