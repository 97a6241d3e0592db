"""Compiled layers in one process: what is compiled how often, and that it computes the same.

The tests that are not slow compile with torch's own tracing alone, which needs no C++ compiler. What inductor makes of
it is compared with one process in `tests/train/parallel/test_layouts.py`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.nn.attention import flex_attention

from pipeline.config.model import ModelConfig
from pipeline.config.train import RecomputeConfig
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.kernels.attention_mask import Kernel
from pipeline.train.model.kernels.flex import Flex
from pipeline.train.model.kernels.packed import Varlen
from pipeline.train.model.kernels.sdpa import Sdpa
from pipeline.train.model.recompute import Recompute
from pipeline.train.parallel import compile
from pipeline.train.parallel.compile import check_compiler, choose_compiling, compile_layers, compiles
from pipeline.train.torch_compat.compiler import close_torch_folder, keep_compiled_code_private
from tests import tiers
from tests.train.one_process import config_of
from tests.train.runs import column, start, train

ROOT = Path(__file__).parents[3]
TRACED, PARTITIONED = "aot_eager", "aot_eager_decomp_partition"
"""Backends that trace forward and backward as inductor's do and run torch's kernels; the second cuts the two as
inductor does."""

pytestmark = pytest.mark.usefixtures("fresh_compiler")

PHASES = (
    "train.precision.compute=fp32",
    "blend.phases=[{name: short, until: 3 steps, sequence_length: 16}, {name: long}]",
    "train.duration=6 steps",
    "train.validation.every_steps=3",
    "train.metrics.layers_every_steps=2",
    "model.document_attention=true",
    "model.layers=3",
)
"""Two lengths of windows, two micro-batches a step, observed steps of each length, validation, ragged documents."""


@pytest.mark.slow
def test_each_shape_is_compiled_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train(root, "plain", *PHASES)
    monkeypatch.setattr(compile, "BACKEND", TRACED)
    compiled = train(root, "compiled", *PHASES, "train.compile=true")
    for key in ("loss", "grad_norm"):
        assert column(compiled, key) == pytest.approx(column(plain, key), rel=1e-4)
    assert column(compiled, "validation_loss")[-1] == pytest.approx(column(plain, "validation_loss")[-1], rel=1e-4)
    # Two lengths, observed and not; three equal layers share each.
    assert counters["stats"]["unique_graphs"] == 4
    assert not counters["graph_break"]


@pytest.mark.slow
def test_layers_of_two_kinds_are_two_codes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With it the operations that are kept are objects that a compiler tells apart by nothing but their identity.
    importlib.import_module("pipeline.train.model.kernels.flex")
    values = ("train.precision.compute=fp32", "train.duration=3 steps", "model.layers=4", "train.validation.samples=0")
    plain = train(root, "plain-2", *values)
    monkeypatch.setattr(compile, "BACKEND", TRACED)
    run = train(root, "kinds", *values, "train.compile=true", "train.recompute={mode: selective, every: 2}")
    assert column(run, "loss") == pytest.approx(column(plain, "loss"), rel=1e-5)
    assert column(run, "grad_norm") == pytest.approx(column(plain, "grad_norm"), rel=1e-4)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.first(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_layers_have_every_gradient(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """In 2.11 those of queries and keys in fp32 were lost in the rotation; losses hardly show it at first."""
    monkeypatch.setattr(compile, "BACKEND", TRACED)
    shape = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "vocab_multiple": 8}
    tokens = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(1))
    gradients = []
    for compiled in (False, True):
        torch.manual_seed(1)
        model = Decoder(decoder_spec(ModelConfig.model_validate(shape), 61, 24)).to(dtype)
        if compiled:
            compile_layers(model, RecomputeConfig())
        model(tokens, Context())[..., :61].float().sin().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    for name, expected in gradients[0].items():
        assert (gradients[1][name] - expected).abs().max() <= limit * expected.abs().max(), name


def test_less_budget_keeps_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "BACKEND", PARTITIONED)
    shape = {"layers": 2, "dim": 64, "heads": 4, "vocab_multiple": 8}
    tokens = torch.randint(61, (2, 24))
    kept, gradients = [], []
    for mode, budget in (("none", 0.5), ("budget", 0.5), ("budget", 0.0)):
        torch._dynamo.reset()  # or the code of the first budget is found again
        torch.manual_seed(1)
        model = Decoder(decoder_spec(ModelConfig.model_validate(shape), 61, 24))
        parameters = {parameter.data_ptr() for parameter in model.parameters()}
        compile_layers(model, RecomputeConfig.model_validate({"mode": mode, "budget": budget}))
        saved: dict[int, int] = {}

        def keep(x: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            storage = x.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            logits = model(tokens, Context())
        kept.append(sum(size for place, size in saved.items() if place not in parameters))
        logits[..., :61].sin().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert kept[0] > kept[1] > kept[2], kept
    for some in gradients[1:]:
        torch.testing.assert_close(some, gradients[0])


@pytest.mark.first(1)
@pytest.mark.parametrize("recompute", tiers.first(1, ["none", "selective"], rest="guard"))
@pytest.mark.parametrize(
    ("kernel", "cap", "sinks"),
    tiers.first(
        2,
        [
            (partial(Sdpa, on_gpu=True), None, True),
            (Flex, 2.0, True),
            (Varlen, None, True),
            *(
                pytest.param(kernel, None, False, marks=pytest.mark.slow)
                for kernel in (partial(Sdpa, on_gpu=True), Varlen, Flex)
            ),
        ],
        rest="guard",
    ),
)
def test_a_layer_for_a_gpu_is_one_graph_for_all_documents(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable[[], Kernel], cap: float | None, sinks: bool, recompute: str
) -> None:
    """Forward and backward of layers with torch's kernels for GPUs, traced on tensors without data, in bf16."""
    monkeypatch.setattr(compile, "BACKEND", TRACED)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # it knows GPUs by name
    shape = {"layers": 3, "dim": 32, "heads": 4, "kv_heads": 2, "vocab_multiple": 8}
    terms = {"attention_soft_cap": cap, "sinks": sinks}
    with torch.device("meta"):
        model = Decoder(decoder_spec(ModelConfig.model_validate(shape | terms), 61, 40)).bfloat16()
    model.kernel = kernel()
    compile_layers(model, RecomputeConfig())
    for block in model.layers.values():
        block.recompute = Recompute.of_layer(
            RecomputeConfig.model_validate({"mode": recompute}), 0, model.spec.layers[0]
        )
    tokens = torch.zeros(1, 40, dtype=torch.int64, device="meta")
    for begins in ([0], [0, 20, 33], [0, 7, 8, 28]):
        starts = torch.tensor(begins, dtype=torch.int32)
        model(tokens, Context(bounds_BS=tokens, starts=starts)).float().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.skipif(
    torch.version.cuda is None or find_spec("triton") is None or torch.cuda.is_available(),
    reason="for a torch with CUDA on a machine without a GPU",
)
@pytest.mark.parametrize("terms", [[], ["terms"]])
@pytest.mark.parametrize(("kernel", "templates"), [("varlen", 0), ("flex", 2)])
def test_triton_compiles_a_layer_for_a_gpu(tmp_path: Path, kernel: str, templates: int, terms: list[str]) -> None:
    """To machine code of an H200, which nothing here can run; FlexAttention is a template for each pass."""
    folders = {name: str(tmp_path) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    command = [sys.executable, "-m", "tests.train.model.gpu_kernels", kernel, *terms]
    done = subprocess.run(command, env=os.environ | folders, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    kinds = json.loads(done.stdout.splitlines()[-1])
    assert kinds.get("tem", 0) == templates
    # Norms reduce, and what is between products is fused.
    assert kinds["poi"] > 0 and kinds.get("per", 0) + kinds.get("red", 0) > 0
    assert list(tmp_path.rglob("*.cubin"))


def test_a_missing_compiler_is_told_before_anything_is_built(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    code, out = start(root, "missing", "train.compile=true", "launch.device=cpu")
    assert code == 2
    assert "train.compile needs a C++ compiler, but there is no no-such-compiler in PATH" in out
    assert "set train.compile=false" in out
    assert not list((root / "missing").glob("checkpoints/step-*"))
    monkeypatch.delenv("CXX")
    check_compiler(torch.device("cpu"))


MODEL = ModelConfig(layers=1, dim=32, heads=2)


def test_where_layers_are_compiled_by_default() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    plain = config_of(MODEL)
    assert compiles(plain, gpu) and not compiles(plain, cpu)
    assert compiles(config_of(MODEL, compile=True), cpu) and not compiles(config_of(MODEL, compile=False), gpu)
    assert not compiles(config_of(MODEL, parallel={"pp": 2, "pipeline": {"schedule": "zbv"}}), gpu)
    assert compiles(config_of(MODEL, parallel={"pp": 2}), gpu)
    assert not compiles(config_of(MODEL, recompute={"mode": "full", "offload": True}), gpu)


@pytest.mark.parametrize(
    ("keys", "flops", "compiler", "compiled", "words"),
    [
        ({}, 1e13, True, False, "short, 50 s of"),
        ({}, 1e16, True, True, "long, 13 h 53 min"),
        ({}, 1e16, False, False, "no C++ compiler"),
        ({"compile": False}, 1e16, True, False, "train.compile"),
        ({"compile": True}, 1e13, True, True, "train.compile"),
        ({"recompute": {"mode": "full", "offload": True}}, 1e16, True, False, "other settings"),
    ],
)
def test_long_runs_on_a_cpu_are_compiled(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], flops: float, compiler: bool, compiled: bool, words: str
) -> None:
    monkeypatch.setattr(compile, "_missing_program", lambda *_: None if compiler else "a C++ compiler")
    config = config_of(MODEL, **keys)
    found, said = choose_compiling(config, torch.device("cpu"), flops, threads=2)
    assert found is compiled and words in said
    # Layers that are compiled round otherwise: what a run began with stays, unless the run file says something.
    for before in (True, False):
        later, _ = choose_compiling(config, torch.device("cpu"), flops, threads=2, before=before)
        assert later is (before if config.train.compile is None else compiled)


@pytest.mark.slow
def test_a_longer_run_is_compiled_as_it_was(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(root, "short", "train.duration=2 steps")
    monkeypatch.setattr(compile, "_LONG_SECONDS", 0.0)
    monkeypatch.setattr(compile, "BACKEND", TRACED)
    train(root, "short", "train.duration=4 steps")
    assert not counters["stats"]["unique_graphs"]
    fresh = train(root, "fresh", "train.duration=4 steps")
    assert counters["stats"]["unique_graphs"]
    assert column(run, "loss") == pytest.approx(column(fresh, "loss"), rel=1e-4)


@pytest.mark.parametrize("made_before", [False, True])
def test_compiled_code_of_others_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_before: bool) -> None:
    """A folder in /tmp that others may write to counts as theirs, whoever made it."""
    usual = tmp_path / f"pipeline-compiled-{os.getuid()}"
    if made_before:
        usual.mkdir()
        usual.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    of_torch = Path(default_cache_dir())
    of_torch.mkdir()
    of_torch.chmod(0o777)  # as torch makes it where the umask lets others write
    keep_compiled_code_private()
    close_torch_folder()
    assert of_torch.stat().st_mode & 0o777 == 0o755
    chosen = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert (chosen == usual) is not made_before
    assert chosen.parent == tmp_path and chosen.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    keep_compiled_code_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
