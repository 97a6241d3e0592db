"""Products in fp8, emulated on a CPU: what is rounded, how far from bf16 that is, and what does not know of it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.config.train import Fp8Config, PrecisionConfig, RecomputeConfig
from pipeline.train.distributed.layout import Layout
from pipeline.train.distributed.process_group import destroy
from pipeline.train.fp8.convert import check_fp8, use_fp8
from pipeline.train.fp8.matrices import fp8_fraction, fp8_lines, fp8_matrices, gathers_fp8
from pipeline.train.host.devices import DEVICES
from pipeline.train.model.decoder import Context, Decoder, ModelPart
from pipeline.train.model.decoder_spec import DecoderSpec, decoder_spec
from pipeline.train.model.flops import num_parameters
from pipeline.train.model.recompute import Recompute
from pipeline.train.parallel.compile import compiles
from pipeline.train.parallel.footprint import footprint
from pipeline.train.parallel.parallelize import parallelize
from pipeline.train.parallel.setup import Setup
from pipeline.train.planning.fake import fake_mesh
from pipeline.train.planning.plan import plan
from pipeline.train.planning.traffic import bytes_by_axis
from pipeline.train.rules.layout import check_layout, layout_warnings
from pipeline.train.start.setup import load_for_inference
from tests import tiers
from tests.train import one_process
from tests.train.optim.averages import averages_differ
from tests.train.planning.test_timing import H100, Case
from tests.train.planning.test_timing import LLAMA_8B as MODEL_8B
from tests.train.poison import INF, poison
from tests.train.runs import column, exact, start, train, weights_hash

LLAMA_8B = {"layers": 32, "dim": 4096, "heads": 32, "kv_heads": 8, "ffn_dim": 14336}
TRAIN_8B = "train={duration: 10 steps, sequence_length: 8192, batch_size: 16, micro_batch_size: 2"
SIZES = ("model.dim=64", "model.heads=4", "model.kv_heads=2", "model.ffn_dim=128")
RUN = (*SIZES, "launch.device=cpu", "train.optimizer.lr=3e-3")
FP8 = {
    "tensorwise": "train.precision.fp8={min_size: 16, emulate: true}",
    "rowwise": "train.precision.fp8={min_size: 16, emulate: true, recipe: rowwise}",
    "gather": "train.precision.fp8={min_size: 16, emulate: true, all_gather: true}",
}
CONSTANT = "train.schedule.type=constant"
LOSS, NORM = 1e-3, 4e-2
"""How far losses and gradient norms of 8 steps of a tiny model are from those in bf16, relatively."""


def spec_of(shape: dict[str, Any], vocabulary: int = 128256) -> DecoderSpec:
    return decoder_spec(ModelConfig.model_validate(shape), vocabulary, 8192)


def config_of(**keys: Any) -> Fp8Config:
    return Fp8Config.model_validate(keys)


# Which matrices


def test_all_matrices_of_large_layers() -> None:
    spec, config = spec_of(LLAMA_8B), config_of()
    chosen = fp8_matrices(config, spec, tp=1)
    assert list(chosen) == list(range(32)) and all(len(matrices) == 7 for matrices in chosen.values())
    # All weights but embedding, head and norms.
    elements = sum(matrix.elements for matrices in chosen.values() for matrix in matrices)
    assert elements == num_parameters(spec) - 2 * 4096 * 128256 - 65 * 4096
    # Of a token: 6 FLOPs a weight; scores and their sum 6 * D * S a layer; the head.
    attention = 6 * 4096 * 8192 * 32
    assert fp8_fraction(config, spec, 1, 8192) == pytest.approx(
        6 * elements / (6 * elements + attention + 6 * 4096 * 128256)
    )


def test_what_is_too_small_on_a_process_stays() -> None:
    spec = spec_of(LLAMA_8B)
    # 1,024 rows of keys and values over 2 processes are 512 each; 4,096 of queries over 8 too.
    assert [each.name for each in fp8_matrices(config_of(), spec, tp=2)[0]] == [
        *("mixer.wq", "mixer.wo", "mlp.w1", "mlp.w3", "mlp.w2"),
    ]
    assert [(each.name, each.rows, each.columns) for each in fp8_matrices(config_of(), spec, tp=8)[0]] == [
        *(("mlp.w1", 1792, 4096), ("mlp.w3", 1792, 4096), ("mlp.w2", 4096, 1792)),
    ]
    # Two processes have the weight of each of 8 heads of keys.
    shared = fp8_matrices(config_of(min_size=16), spec, tp=16)[0]
    assert {"mixer.wk", "mixer.wv"}.isdisjoint(each.name for each in shared) and len(shared) == 5


def test_odd_sides_and_spared_layers_stay() -> None:
    odd = spec_of({"layers": 6, "dim": 96, "heads": 2, "ffn_dim": 200})
    chosen = fp8_matrices(config_of(min_size=16, first_layers=1, last_layers=2), odd, 1)
    assert list(chosen) == [1, 2, 3]
    assert [each.name for each in chosen[1]] == ["mixer.wq", "mixer.wk", "mixer.wv", "mixer.wo"]
    # 32 for mxfp8: 96 is a multiple, 48 is none.
    mx = config_of(min_size=16, backend="te", recipe="mxfp8")
    assert fp8_matrices(mx, odd, 1)[0] and not fp8_matrices(mx, spec_of({"layers": 1, "dim": 48, "heads": 2}), 1)


def test_weights_are_sent_in_fp8_where_they_are_shared_evenly() -> None:
    spec = spec_of(LLAMA_8B)
    assert not gathers_fp8(config_of(), spec, Layout(tp=8))
    assert gathers_fp8(config_of(), spec, Layout(dp_shard=8)) and gathers_fp8(config_of(), spec, Layout(cp=2))
    assert not gathers_fp8(config_of(), spec, Layout(dp_shard=3))
    assert not gathers_fp8(config_of(all_gather=False), spec, Layout(dp_shard=8))
    assert not gathers_fp8(config_of(recipe="rowwise"), spec, Layout(dp_shard=8))
    assert not gathers_fp8(config_of(backend="te"), spec, Layout(dp_shard=8))


def test_what_is_said() -> None:
    lines = list(fp8_lines(config_of(first_layers=1, last_layers=2), spec_of(LLAMA_8B), Layout(dp_shard=4, tp=2), 8192))
    first = r"fp8 \(torchao, tensorwise, weights sent in fp8\): 145 of 224 matrices of layers, \d\d % of the FLOPs "
    assert re.match(first, lines[0])
    assert lines[1:] == [
        "not in fp8: mixer.wk, mixer.wv of layers, all of layers 0, 30-31, embedding, norms, attention, head"
    ]


# Products


def rounded(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """To fp8 and back: with one scale, or with one for each line along `dim`, a power of two."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / largest
    if dim is not None:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (x * scale).to(dtype).float() / scale


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_product_by_hand(recipe: str) -> None:
    torch.manual_seed(2)
    part = Decoder(spec_of({"layers": 1, "dim": 64, "heads": 4, "ffn_dim": 96}, 61))
    weight = part.layers["0"].mlp.w1.weight.detach().clone()
    use_fp8(part, config_of(min_size=16, emulate=True, recipe=recipe), Layout())
    module = part.layers["0"].mlp.w1
    x, gradient = torch.randn(48, 64, requires_grad=True), torch.randn(48, 96)
    y = module(x)
    y.backward(gradient)
    fine, wide = torch.float8_e4m3fn, torch.float8_e5m2
    if recipe == "tensorwise":
        x8, w8, g8 = rounded(x.detach(), fine), rounded(weight, fine), rounded(gradient, wide)
        expected = x8 @ w8.T, g8 @ w8, g8.T @ x8
    else:
        lines: Callable[[Tensor, int], Tensor] = lambda tensor, dim: rounded(tensor, fine, dim)  # noqa: E731
        expected = (
            lines(x.detach(), 1) @ lines(weight, 1).T,
            lines(gradient, 1) @ lines(weight, 0),
            lines(gradient, 0).T @ lines(x.detach(), 0),
        )
    for found, wanted in zip((y, x.grad, module.weight.grad), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    # And that is another number than without fp8, if not by much.
    error = ((y - x @ weight.T).norm() / (x @ weight.T).norm()).item()
    assert 1e-3 < error < 0.06


def test_names_and_kinds_of_parameters_stay() -> None:
    spec = spec_of({"layers": 3, "dim": 64, "heads": 4, "bias": "all", "tie_embeddings": True}, 61)
    with torch.device("meta"):
        plain_part, part = Decoder(spec), Decoder(spec)
    use_fp8(part, config_of(min_size=16, emulate=True, first_layers=1), Layout())
    described = [
        [(name, type(each), each.shape, each.dtype) for name, each in model.named_parameters()]
        for model in (part, plain_part)
    ]
    assert described[0] == described[1] and list(part.state_dict()) == list(plain_part.state_dict())
    kinds = {name: type(module) for name, module in part.named_modules()}
    assert kinds["layers.0.mlp.w1"] is nn.Linear and kinds["layers.1.mlp.w1"] is not nn.Linear


def test_recomputation_has_the_same_bits() -> None:
    torch.manual_seed(1)
    model = Decoder(spec_of({"layers": 2, "dim": 64, "heads": 4, "ffn_dim": 96}, 61))
    use_fp8(model, config_of(min_size=16, emulate=True), Layout())
    tokens = torch.randint(61, (2, 16))
    results = []
    for mode in ("none", "full", "selective"):
        for index, block in enumerate(model.layers.values()):
            recompute = RecomputeConfig.model_validate({"mode": mode})
            block.recompute = Recompute.of_layer(recompute, index, model.spec.layers[index])
        model.zero_grad()
        model(tokens, Context())[..., :61].sin().sum().backward()
        results.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
    for found in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(found, results[0], strict=True))


# Whole runs


@pytest.fixture(scope="module")
def bf16(root: Path) -> Path:
    return train(root, "bf16", *RUN)


@pytest.mark.parametrize("kind", tiers.first(1, FP8, rest="slow"))
def test_a_run_is_near_one_in_bf16(root: Path, bf16: Path, kind: str) -> None:
    run = train(root, kind, *RUN, FP8[kind])
    assert column(run, "loss") != column(bf16, "loss")
    assert column(run, "loss") == pytest.approx(column(bf16, "loss"), rel=LOSS)
    assert column(run, "grad_norm") == pytest.approx(column(bf16, "grad_norm"), rel=NORM)
    assert column(run, "validation_loss")[-1] == pytest.approx(column(bf16, "validation_loss")[-1], rel=LOSS)


@pytest.mark.slow
def test_muon(root: Path) -> None:
    runs = [train(root, f"muon{len(fp8)}", *RUN, "train.optimizer.type=muon", *fp8) for fp8 in ((), (FP8["gather"],))]
    assert column(runs[1], "loss") == pytest.approx(column(runs[0], "loss"), rel=LOSS)


@pytest.mark.slow
def test_compiled_layers(root: Path, bf16: Path) -> None:
    run = train(root, "compiled", *RUN, FP8["gather"], "train.compile=true")
    assert column(run, "loss") == pytest.approx(column(bf16, "loss"), rel=LOSS)


def test_what_a_run_says(root: Path) -> None:
    _, out = start(root, "said", *RUN, FP8["gather"], "train.duration=3 steps", "train.compile=false")
    assert "train: fp8 (torchao, tensorwise, weights sent in fp8, emulated): 14 of 14 matrices of layers, " in out
    assert "train: not in fp8: embedding, norms, attention, head" in out
    assert "warning: train.precision.fp8.backend=torchao with train.compile=false" in out


@pytest.mark.guard
@pytest.mark.parametrize("kind", [pytest.param("tensorwise", marks=pytest.mark.slow), "gather"])
def test_a_resumed_run_has_the_same_bits(root: Path, kind: str) -> None:
    values = (*RUN, FP8[kind], CONSTANT, "train.ema.decay=0.8")
    whole = train(root, f"whole-{kind}", *values)
    train(root, f"parts-{kind}", *values, "train.duration=5 steps")
    parts = train(root, f"parts-{kind}", *values)
    rows = {row["step"]: row for row in exact(parts)}
    assert list(rows.values())[-1] == exact(whole)[-1]
    assert weights_hash(parts) == weights_hash(whole)


@pytest.mark.slow
def test_the_average_of_weights_that_are_sent_in_fp8(root: Path) -> None:
    keep = ("train.checkpoint.every_steps=1", "train.checkpoint.keep=99")
    run = train(root, "average", *RUN, FP8["gather"], "train.ema.decay=0.8", *keep)
    assert averages_differ(run, 0.8, first=1, last=8) == []


def test_a_step_that_is_not_finite_changes_no_weight(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {3: INF})
    values = (CONSTANT, "train.checkpoint.every_steps=1", "train.checkpoint.keep=99", "train.duration=3 steps")
    run = train(root, "poisoned", *RUN, FP8["gather"], *values)
    assert [bool(each) for each in column(run, "skipped")] == [False, False, True]
    assert weights_hash(run, 1) != weights_hash(run, 2) == weights_hash(run, 3)


def without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)


@pytest.mark.slow
def test_checkpoints_do_not_know_of_fp8(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = (*RUN, CONSTANT, "train.ema.decay=0.8")
    there = train(root, "there-and-back", *values, FP8["gather"], "train.duration=3 steps")
    with monkeypatch.context() as patched:
        without_torchao(patched)
        for weights in ("model", "ema"):
            config = load(root / "run.yaml", [f"run.dir={there}", *values, FP8["gather"], f"eval.weights={weights}"])
            model = load_for_inference(config, 3).model
            assert type(model.whole.layers["0"].mlp.w1) is nn.Linear
        plain_run = train(root, "there-and-back", *values, "train.duration=6 steps")
    back = train(root, "there-and-back", *values, FP8["gather"], "train.duration=8 steps")
    assert plain_run == back == there
    expected = train(root, "plain", *values)
    assert column(back, "loss") == pytest.approx(column(expected, "loss"), rel=5 * LOSS)


@pytest.mark.slow
def test_nothing_is_imported_that_is_not_used() -> None:
    code = (
        "import sys; sys.modules['torchao'] = sys.modules['transformer_engine'] = None; "
        "import pipeline.train.loop.trainer, pipeline.train.planning.plan"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


# What is refused


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"recipe": "delayed"}, "recipe: delayed does not work with backend: torchao; set recipe to tensorwise or rowwise"),
    ({"backend": "te", "recipe": "rowwise"}, "set recipe to current or delayed or mxfp8, or backend: torchao"),
    ({"all_gather": True, "recipe": "rowwise"}, "all_gather: true does not work with recipe: rowwise"),
    ({"all_gather": True, "backend": "te"}, "all_gather: true does not work with recipe: current"),
    ({"emulate": True, "backend": "te"}, "emulate: true does not work with backend: te; set backend: torchao"),
]


@pytest.mark.parametrize(("keys", "message"), CONFIGS)
def test_keys_that_do_not_go_together(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        config_of(**keys)


def test_only_in_bf16() -> None:
    for compute in ("fp32", "fp16"):
        with pytest.raises(ValidationError, match=f"not {compute}; set compute: bf16, or remove fp8"):
            PrecisionConfig.model_validate({"compute": compute, "fp8": {}})


SMALL = "train.precision.fp8.min_size=16"
TE = ("train.precision.fp8={backend: te, min_size: 16}",)
REFUSED: list[tuple[int, tuple[str, ...], str]] = [
    (
        1,
        ("train.precision.fp8={}",),
        r"min_size=1024: .*\(64 x 64, 32 x 64, 128 x 64, 64 x 128\): set .*min_size=64 or",
    ),
    (1, ("train.precision.fp8={min_size: 16, first_layers: 1, last_layers: 1}",), "are all of the 2 layers"),
    (4, ("train.precision.fp8={min_size: 64}", "parallel.tp=4"), "with parallel.tp=4.*set .*min_size=32"),
    (
        3,
        ("train.precision.fp8={min_size: 16, all_gather: true}",),
        r"mixer.wq \(64 rows\).* to the 3 .*all_gather=false",
    ),
    (
        1,
        (SMALL, "train.sequence_length=20", "train.micro_batch_size=4"),
        "multiple of 16 tokens.*: set train.sequence_length=16 or 32",
    ),
    (
        2,
        (SMALL, "parallel.cp=2", "train.sequence_length=16", "train.micro_batch_size=2"),
        "sequence_length=16 over parallel.cp=2 is not a multiple of 16 tokens.*: set train.sequence_length=32$",
    ),
    (2, (SMALL, "parallel.pp=2", "parallel.pipeline.schedule=zbv", "model.layers=4"), "take one of gpipe, 1f1b"),
    (2, (*TE, "parallel.tp=2"), "backend=te with parallel.tp=2 is not tested.*backend=torchao, or parallel.tp=1"),
    (2, (*TE, "parallel.pp=2"), "backend=te with parallel.pp=2"),
    (2, (*TE, "parallel.cp=2"), "backend=te with parallel.cp=2"),
    (1, (*TE, "train.compile=true"), "set train.compile=false, or train.precision.fp8.backend=torchao"),
    (1, (*TE, "train.recompute.mode=selective"), "set train.recompute.mode=full or none"),
    (1, (*TE, "train.precision.fp8.recipe=delayed", "train.recompute.mode=full"), "recipe=current, or train.recompute"),
    (1, (*TE, "train.precision.fp8.recipe=delayed", "train.deterministic=true"), "or train.deterministic=false"),
]


@pytest.mark.parametrize(("world", "values", "message"), REFUSED)
def test_what_does_not_go_together_is_refused(root: Path, world: int, values: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_layout(load(root / "run.yaml", [*SIZES, *values]), world)


def test_what_goes_together_is_not_refused(root: Path) -> None:
    for values in (
        (SMALL, "parallel.tp=2"),
        (SMALL, "parallel.pp=2", "parallel.pipeline.schedule=interleaved_1f1b", "model.layers=4"),
        (*TE, "train.recompute.mode=full"),
        (*TE, "train.precision.fp8.recipe=delayed"),
    ):
        config = load(root / "run.yaml", [*SIZES, "train.micro_batch_size=1", *values])
        assert not [line for line in layout_warnings(config, check_layout(config, 2)) if "fp8" in line]


def test_lengths_of_validation_are_multiples_on_every_process() -> None:
    """A batch may be shorter than a window: of one window of 64 tokens a process would have 8."""
    destroy()  # tests of a whole run may have come before
    for keys, multiple in (({}, 16), ({"fp8": {"min_size": 16, "emulate": True}}, 128)):
        config = one_process.config_of(
            {"layers": 2, "dim": 64, "heads": 4, "ffn_dim": 128}, parallel={"cp": 8}, precision=keys
        )
        with fake_mesh(Layout(cp=8), 0) as mesh:
            setup = Setup(torch.device("meta"), mesh, decoder_spec(config.model, 61, 512))
            assert parallelize(config, setup).sequence_multiple == multiple


def test_the_device_is_looked_at_before_anything_is_built(root: Path) -> None:
    code, out = start(root, "cpu", *RUN, SMALL)
    assert code == 2
    assert "needs a GPU that multiplies in fp8, but this run is on a CPU" in out and "emulate=true" in out
    assert not list((root / "cpu").glob("checkpoints/step-*"))


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UserError, match="backend=torchao needs torchao.*install the extra `fp8`"):
        check_fp8(config_of(emulate=True), torch.device("cpu"))


@pytest.mark.parametrize(
    ("keys", "capability", "message"),
    [
        ({}, (8, 0), "tensorwise needs a GPU of compute capability 8.9 or above, but Some GPU has 8.0: leave"),
        ({"recipe": "rowwise"}, (8, 9), "rowwise needs a GPU of compute capability 9.0 .*: set .*recipe=tensorwise"),
        ({"backend": "te", "recipe": "mxfp8"}, (9, 0), "mxfp8 needs .* 10.0 or above.* has 9.0: set .*recipe=current"),
    ],
)
def test_old_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], capability: tuple[int, int], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    with pytest.raises(UserError, match=message):
        check_fp8(config_of(**keys), torch.device("cuda"))


def test_layers_of_transformer_engine_are_not_compiled() -> None:
    def compiled(backend: str) -> bool:
        config = one_process.config_of({"layers": 1, "dim": 64, "heads": 4}, precision={"fp8": {"backend": backend}})
        return compiles(config, torch.device("cuda"))

    assert compiled("torchao") and not compiled("te")


# Plans


def test_a_plan_knows_of_fp8(tmp_path: Path) -> None:
    case = Case(tmp_path, 8, MODEL_8B, TRAIN_8B + ", precision: {fp8: {}}}")
    plain_case = Case(tmp_path, 8, MODEL_8B, TRAIN_8B + "}")
    time, plain_time = case.time(H100), plain_case.time(H100)
    weights, head = num_parameters(case.spec) - 2 * 128256 * 4096 - 65 * 4096, 128256 * 4096
    tokens = 8192 * 2
    assert time.seconds.products == pytest.approx(6 * tokens * (weights / 1979e12 + head / 989e12) / 0.6)
    assert time.seconds.total < plain_time.seconds.total
    sent, plain_sent = (bytes_by_axis(each.traffic[0])["dp_shard"] for each in (time, plain_time))
    # Each weight is sent twice, for forward and backward, to 7 of 8 processes: in one byte, not two.
    assert plain_sent - sent == 2 * weights * 7 // 8


def test_devices_without_fp8_are_refused(tmp_path: Path) -> None:
    config = Case(tmp_path, 8, MODEL_8B, TRAIN_8B + ", precision: {fp8: {}}}").config
    with pytest.raises(UserError, match="fp8: a100 does not multiply in fp8"):
        plan(config, DEVICES["a100"], 8)


def test_copies_in_fp8_take_a_byte() -> None:
    spec, layout = spec_of(LLAMA_8B), Layout(dp_shard=8)
    parallel, parts = {"dp_shard": 8, "reshard_after_forward": False}, [ModelPart.whole(spec)]
    rows = [
        footprint(one_process.config_of(LLAMA_8B, parallel=parallel, precision={"fp8": fp8}), layout, spec, parts)
        for fp8 in (None, config_of(), config_of(all_gather=False))
    ]
    elements = num_parameters(spec) - 2 * 4096 * 128256 - 65 * 4096
    assert rows[0] == rows[2] and rows[0].total - rows[1].total == elements


# On a GPU


GPU = ("train.precision.fp8={min_size: 16}", *SIZES, "launch.device=cuda", "train.optimizer.lr=3e-3")


def needs(*capability: int) -> None:
    if torch.cuda.get_device_capability() < capability:
        pytest.skip(f"needs compute capability {capability}")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_torchao_on_a_gpu(root: Path, recipe: str, compiled: str) -> None:
    needs(8, 9) if recipe == "tensorwise" else needs(9, 0)
    pytest.importorskip("torchao.float8")
    values = (*GPU, f"train.compile={compiled}")
    run = train(root, f"gpu-{recipe}-{compiled}", *values, f"train.precision.fp8.recipe={recipe}")
    expected = train(root, f"gpu-bf16-{compiled}", *values, "train.precision.fp8=null")
    assert column(run, "loss") == pytest.approx(column(expected, "loss"), rel=2 * LOSS)


@pytest.mark.gpu
def test_a_gpu_rounds_as_a_cpu_does(root: Path) -> None:
    needs(8, 9)
    pytest.importorskip("torchao.float8")
    run = train(root, "gpu-rounds", *GPU, "train.precision.fp8.all_gather=true", "train.compile=false")
    expected = train(root, "gpu-emulated", *RUN, FP8["gather"])
    assert column(run, "loss") == pytest.approx(column(expected, "loss"), rel=LOSS)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_transformer_engine_on_a_gpu(root: Path, recipe: str) -> None:
    needs(10, 0) if recipe == "mxfp8" else needs(8, 9)
    pytest.importorskip("transformer_engine.pytorch")
    values = (*GPU, "train.precision.fp8.backend=te", f"train.precision.fp8.recipe={recipe}", CONSTANT)
    run = train(root, f"gpu-te-{recipe}", *values)
    expected = train(root, "gpu-te-bf16", *values, "train.precision.fp8=null")
    assert column(run, "loss") == pytest.approx(column(expected, "loss"), rel=5 * LOSS)
    if recipe != "delayed":
        again = train(root, f"gpu-te-{recipe}-full", *values, "train.recompute.mode=full")
        assert column(again, "loss") == pytest.approx(column(run, "loss"), rel=LOSS)
    # The same files as without fp8.
    plain_run = train(root, f"gpu-te-{recipe}", *values, "train.precision.fp8=null", "train.duration=10 steps")
    assert len(column(plain_run, "loss")) == 10
