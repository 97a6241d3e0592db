"""What layouts are refused, with which advice; and that what is advised is accepted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.config.parallel import ZERO_BUBBLE, ScheduleName
from pipeline.data.order.phases import micro_batch_size, plan_journal
from pipeline.train.distributed.layout import Layout
from pipeline.train.doc_tables import PAGES, page
from pipeline.train.parallel.pipeline_schedules import SCHEDULES
from pipeline.train.parallel.step_shapes import step_shapes
from pipeline.train.parallel.tested import TESTED, LayoutKind, nearest_tested
from pipeline.train.rules.layout import RULES, WARNINGS, check_evaluation_layout, check_layout, layout_warnings
from pipeline.train.torch_compat import pipeline_stage
from tests.config.runfile import write

ROOT = Path(__file__).parents[3]
BASE = (
    "model={layers: 8, dim: 64, heads: 8, kv_heads: 4, ffn_dim: 128}",
    "train={duration: 10 steps, sequence_length: 64, batch_size: 32, micro_batch_size: 1}",
)

EXPERTS = "model={layers: 8, dim: 64, heads: 8, mlp: experts, experts: {count: 8, top_k: 2, ffn_dim: 32}}"
MAMBA = "model={layers: 8, dim: 64, mixer: mamba2, mamba2: {heads: 3}}"
GATED = (
    "model={layers: 8, dim: 64, heads: 8, pattern: [a, b], kinds: {a: {mixer: gated_delta, delta: {key_heads: 3, "
    "conv_size: 8}}, b: {}}}"
)
BIASED = EXPERTS.replace("top_k: 2", "top_k: 2, score_bias: true")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write(tmp_path)


def _messages(path: Path, processes: int, *overrides: str) -> list[str]:
    """The violations, a line each; none if the layout is accepted."""
    try:
        check_layout(load(path, (*BASE, *overrides)), processes)
    except UserError as error:
        first, *lines = str(error).splitlines()
        assert first.startswith("the layout (") and first.endswith(("has a problem:", f"has {len(lines)} problems:"))
        return [line.strip() for line in lines]
    return []


SIDES = (
    "model={layers: 8, encoder: {layers: 8}, dim: 64, heads: 8, positions: relative}",
    "train={duration: 10 steps, sequence_length: 96, batch_size: 32, micro_batch_size: 1, "
    "objective: {type: spans, rate: 0.25}}",
)
REFUSED: list[tuple[int, tuple[str, ...], str]] = [
    (2, (*SIDES, "parallel.cp=2"), "parallel.cp=2 does not cut the two sides .* set parallel.cp=1"),
    (
        2,
        (*SIDES, "parallel={pp: 2, pipeline: {schedule: zbv}}"),
        "schedule=zbv splits backward passes, .* or model.positions=rope$",
    ),
    (
        2,
        (*SIDES, "parallel.tp=2"),
        r"train.sequence_length=96 makes positions that .* cannot cut \(81 of the encoder, 33 of the decoder\)",
    ),
    (
        32,
        (*SIDES, "parallel.pp=32"),
        r"model.encoder.layers \+ model.layers=16 are fewer than the 32 stages",
    ),
    (
        16,
        ("parallel.tp=16", "model.ffn_dim=256"),
        "model.heads=8 .* parallel.tp=16: set model.heads=16, or parallel.tp=8$",
    ),
    (
        4,
        ("parallel.tp=4", "model.heads=6", "model.kv_heads=2", "model.head_dim=8"),
        "model.heads=6 .* set model.heads=4 or 8, or parallel.tp=3 or 6$",
    ),
    (
        4,
        ("parallel.tp=4", "model.heads=12", "model.head_dim=8", "model.kv_heads=6"),
        "model.kv_heads=6 .* parallel.tp=4: set model.kv_heads=2 or 4, or parallel.tp=3 or 6$",
    ),
    (
        2,
        ("parallel.tp=2", "model.ffn_dim=127"),
        "model.ffn_dim=127 .* parallel.tp=2: set model.ffn_dim=126 or 128, or parallel.tp=1 or 127$",
    ),
    (
        8,
        ("parallel.tp=8", "model.vocab_multiple=20"),
        "model.vocab_multiple=20 .* set model.vocab_multiple=40, or parallel.tp=5 or 10$",
    ),
    (
        2,
        ("parallel.tp=2", "train.sequence_length=63"),
        "train.sequence_length=63 .* set train.sequence_length=62 or 64, or parallel.sequence_parallel=false$",
    ),
    (
        2,
        ("parallel.tp=2", "blend.phases=[{until: 5 steps}, {sequence_length: 33}]"),
        "set blend.phases.1.sequence_length=32 or 34, or parallel.sequence_parallel=false$",
    ),
    (
        2,
        ("parallel.pp=2", "parallel.pipeline.virtual_stages=2"),
        "virtual_stages=2 .* schedule=1f1b, which has 1 .* set parallel.pipeline.virtual_stages=1$",
    ),
    (
        2,
        ("parallel.pp=2", "parallel.pipeline={schedule: zbv, virtual_stages: 3}"),
        "virtual_stages=3 .* schedule=zbv, which has 2 .* set parallel.pipeline.virtual_stages=2$",
    ),
    (
        2,
        ("parallel.pp=2", "parallel.pipeline={schedule: interleaved_1f1b, virtual_stages: 1}"),
        "which has 2 or more on each rank: set parallel.pipeline.virtual_stages=2$",
    ),
    (
        4,
        ("parallel.pp=4", "parallel.pipeline={schedule: interleaved_1f1b, virtual_stages: 3}"),
        "model.layers=8 are fewer than the 12 stages .*: set parallel.pp=2 or less, fewer "
        "parallel.pipeline.virtual_stages, or at least model.layers=12$",
    ),
    (2, ("parallel.pp=2", "parallel.pipeline.layers_per_stage=[4,2,2]"), "has 3 numbers, but there are 2 stages"),
    (2, ("parallel.pp=2", "parallel.pipeline.layers_per_stage=[4,3]"), "are 7 layers, but model.layers=8"),
    (4, ("parallel.pp=4", "parallel.pipeline.layers_per_stage=[4,0,3,1]"), "stage 1 has nothing to do"),
    (
        4,
        ("parallel.pp=4", "train.micro_batch_size=null"),
        "train.batch_size: 32 windows over 1 .* of 32 make 1 micro-batch per step, .* schedule=1f1b over parallel.pp=4 "
        r"needs 4 "
        r"or more: set train.micro_batch_size=8 \(4 micro-batches\)$",
    ),
    (
        4,
        ("parallel.pp=4", "train.batch_size=3"),
        "3 windows .* make 3 micro-batches .* needs 4 or more: set train.batch_size=4 or more, with "
        "train.micro_batch_size=1, or a smaller parallel.pp$",
    ),
    (
        4,
        ("parallel.pp=4", "train.batch_ramp={start: 2, increment: 10, tokens: 10000}"),
        "train.batch_ramp: 2 windows .* set train.batch_ramp.start=4 or more",
    ),
    (
        4,
        ("parallel.pp=2", "train.batch_size=8", "train.micro_batch_size=3", "parallel.pipeline.schedule=zbv"),
        r"8 windows over 2 .* micro-batches of 3 make 2 .* needs 4 or more: set train.micro_batch_size=1 \(4 micro",
    ),
    (
        2,
        ("parallel.pp=2", "blend.phases=[{until: 5 steps}, {batch_size: 8, micro_batch_size: 8}]"),
        r"blend.phases.1.batch_size: 8 windows .*: set blend.phases.1.micro_batch_size=4 \(2 micro-batches\)$",
    ),
    (
        4,
        ("parallel.pp=4", "train.batch_size=9", "parallel.pipeline.schedule=interleaved_1f1b"),
        "9 micro-batches .* needs fewer than 8, or a number m that m // 4 divides, like 8 or 12: set "
        r"train.micro_batch_size=3 \(3 micro-batches\)$",
    ),
    (
        4,
        ("parallel.pp=2", "parallel.pipeline.schedule=dualpipev", "parallel.reshard_after_forward=true"),
        "reshard_after_forward=true with schedule=dualpipev gives wrong gradients: .* one of gpipe, 1f1b, "
        "interleaved_1f1b$",
    ),
    (
        4,
        ("parallel.pp=2", "parallel.pipeline.schedule=zbv", "parallel.overlap.reduce=each"),
        "overlap.reduce=each with schedule=zbv: .* set parallel.overlap.reduce=last$",
    ),
    (
        2,
        ("parallel.tp=2", "parallel.overlap.async_tp=true", "parallel.sequence_parallel=false"),
        "async_tp=true with parallel.sequence_parallel=false: .* set parallel.sequence_parallel=true, or ",
    ),
    (
        2,
        ("parallel.tp=2", "parallel.overlap.async_tp=true", "launch.device=cpu"),
        "async_tp=true with launch.device=cpu .* set launch.device=auto, or parallel.overlap.async_tp=false$",
    ),
    (
        2,
        ("parallel.tp=2", "parallel.overlap.async_tp=true", "train.compile=false"),
        "async_tp=true with train.compile=false: .* set train.compile=true, or parallel.overlap.async_tp=false$",
    ),
    (
        3,
        ("parallel.cp=3",),
        "train.sequence_length=64 cannot be cut over parallel.cp=3 in two pieces each: set train.sequence_length=60 or "
        "66$",
    ),
    (
        8,
        ("parallel.cp=2", "parallel.tp=4", "parallel.cp_method=ulysses", "train.sequence_length=60"),
        "train.sequence_length=60 cannot be cut over parallel.cp=2 x parallel.tp=4: set train.sequence_length=56 or 64",
    ),
    (
        8,
        ("parallel.cp=8", "parallel.cp_method=ulysses", "model.heads=4", "model.head_dim=16"),
        "model.heads=4 cannot be cut over parallel.tp=1 x parallel.cp=8 with cp_method=ulysses: set model.heads=8, or "
        "parallel.cp_method=all_gather$",
    ),
    (
        3,
        (
            *("parallel.cp=3", "parallel.cp_method=ulysses", "train.sequence_length=33"),
            *("model.heads=6", "model.kv_heads=2", "model.head_dim=8"),
        ),
        "model.kv_heads=2 can neither be cut nor copied evenly over parallel.tp=1 x parallel.cp=3 with "
        "cp_method=ulysses: set model.kv_heads=3, or parallel.cp_method=all_gather$",
    ),
    (
        2,
        (
            *("parallel.cp=2", "parallel.cp_method=ulysses", "model.pattern=[a,b]"),
            "model.kinds={a: {heads: 1, kv_heads: 1}, b: {}}",
        ),
        "model.kinds.a.heads=1 cannot be cut over parallel.tp=1 x parallel.cp=2 with cp_method=ulysses: set "
        "model.kinds.a.heads=2, or parallel.cp_method=all_gather$",
    ),
    (
        8,
        (
            *("parallel.cp=8", "parallel.cp_method=ulysses", "model.heads=4", "model.head_dim=16"),
            *("model.pattern=[a,b]", "model.kinds={a: {rope_theta: 500}, b: {}}"),
        ),
        "model.heads=4 cannot be cut over parallel.tp=1 x parallel.cp=8 with cp_method=ulysses: set model.heads=8, or ",
    ),
    (
        8,
        ("parallel.cp=8", MAMBA, "train.sequence_length=32"),
        "train.sequence_length=32 over parallel.cp=8 with cp_method=all_gather is cut into pieces of 2 positions, but "
        r"Mamba-2 sees the 3 before a piece \(model.mamba2.conv_size=4\), .*: set train.sequence_length=48 or more, or "
        "parallel.cp=4$",
    ),
    (
        1,
        (MAMBA, "train.recompute={mode: selective, keep: [attention]}"),
        r"train.recompute.keep=\[attention\] with mode=selective keeps nothing, .* set train.recompute.keep=",
    ),
    (
        4,
        ("parallel.cp=4", "parallel.cp_method=ulysses", GATED, "train.sequence_length=16"),
        r"pieces of 4 positions, but the gated delta rule sees the 7 before a piece \(model.kinds.a.delta.conv_size=8\)"
        ", .*: set train.sequence_length=28 or more, or parallel.cp=2$",
    ),
    (
        2,
        ("parallel.tp=2", GATED),
        "model.kinds.a.delta.key_heads=3 cannot be cut over parallel.tp=2: set model.kinds.a.delta.key_heads=2 or 4, ",
    ),
    (
        2,
        ("parallel.tp=2", "model.pattern=[a,b]", "model.kinds={a: {ffn_dim: 63}, b: {}}"),
        "model.kinds.a.ffn_dim=63 cannot be cut over parallel.tp=2: set model.kinds.a.ffn_dim=62 or 64",
    ),
    (
        8,
        ("parallel.pp=2", "parallel.tp=2", "parallel.sequence_parallel=false", "parallel.pipeline.schedule=gpipe"),
        r"\(pp with gpipe, dp_shard without resharding, tp without sequence_parallel\) is not tested, .* the nearest "
        "tested ones have .*parallel.pipeline.schedule=1f1b.*parallel.sequence_parallel=true",
    ),
]


@pytest.mark.parametrize(("processes", "overrides", "wanted"), REFUSED)
def test_refused(run_file: Path, processes: int, overrides: tuple[str, ...], wanted: str) -> None:
    messages = _messages(run_file, processes, *overrides)
    assert len(messages) == 1, messages
    assert re.search(wanted, messages[0]), messages[0]


def test_what_the_messages_advise_is_accepted(run_file: Path) -> None:
    """Each `key=value` of the advice, put in place of what was refused."""
    tried = 0
    for processes, overrides, _ in REFUSED:
        (message,) = _messages(run_file, processes, *overrides)
        advice = re.split(r": set |: give | ones have ", message)[-1].split(", with ")[0]
        for key, values in re.findall(r"([\w.]+\.\w+)=([\w]+(?: or \d+)*)", advice):
            for value in values.split(" or "):
                if key in ("train.batch_size", "train.batch_ramp.start") or key == "model.kv_heads" or "layers" in key:
                    continue  # with conditions that are told beside it
                if key in ("parallel.tp", "parallel.pp", "parallel.dp_shard"):
                    continue  # other numbers of processes, and other rules
                tried += 1
                again = [m for m in _messages(run_file, processes, *overrides, f"{key}={value}") if m == message]
                assert not again, f"{overrides} {key}={value}"
    assert tried >= 15


def test_everything_is_told_at_once(run_file: Path) -> None:
    messages = _messages(
        run_file,
        32,
        *("parallel.tp=16", "parallel.pp=2", "train.sequence_length=60", "parallel.pipeline.virtual_stages=2"),
        "train.micro_batch_size=32",
    )
    keys = ["model.heads=8", "train.sequence_length=60", "parallel.pipeline.virtual_stages=2", "train.batch_size"]
    assert [message.split(" ")[0].rstrip(":") for message in messages] == keys


def test_degrees_come_first(run_file: Path) -> None:
    with pytest.raises(UserError, match="launch.processes=4 or 6"):
        check_layout(load(run_file, (*BASE, "parallel.tp=2")), 5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_torch_that_cannot_split_backward_passes(
    run_file: Path, schedule: ScheduleName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_stage, "SPLITS_BACKWARD", False)
    pipeline = (*BASE, f"parallel.pipeline.schedule={schedule}", "train.micro_batch_size=8")
    messages = _messages(run_file, 2, *pipeline, "parallel.pp=2")
    if schedule in ZERO_BUBBLE:
        assert len(messages) == 1, messages
        wanted = f"parallel.pipeline.schedule={schedule} needs torch 2.13 or later, but torch {torch.__version__} is "
        assert messages[0].startswith(wanted), messages[0]
        assert messages[0].endswith("take one of gpipe, 1f1b, interleaved_1f1b"), messages[0]
    else:
        assert messages == []
    assert _messages(run_file, 2, *pipeline) == [], "without a pipeline the key has no effect"
    # An evaluation has no backward pass.
    config = load(run_file, (*pipeline, "parallel.pp=2"))
    assert check_evaluation_layout(config, 2).pp == 2


@pytest.mark.parametrize("row", TESTED, ids=lambda row: row.name)
def test_tested_rows_are_accepted(run_file: Path, row: Any) -> None:
    """By all rules, with the layers and micro-batches that a row names."""
    config = load(
        run_file, (*BASE, f"model.layers={row.layers}", f"train.batch_size={row.micro_batches * row.layout.dp}")
    )
    config = config.model_copy(update={"parallel": row.parallel})
    assert check_layout(config, row.layout.world_size) == row.layout
    assert row.kind == LayoutKind.of(config.parallel, row.layout)


def test_tested_rows() -> None:
    assert len({row.name for row in TESTED}) == len(TESTED) < 130
    assert {row.layout.world_size for row in TESTED} <= {2, 4, 8, 16}
    wanted = {
        "tp2",
        "tp4-no_sp",
        "fsdp4-reshard",
        "fsdp4-keep",
        "hsdp2x2-reshard",
        "ddp2",
        "hsdp2x2-keep-tp2-no_sp",
        "pp2-1f1b-hsdp2x2-keep-tp2",
        "pp2-interleaved_1f1b-hsdp2x2-keep-tp2",
        *(f"pp{pp}-{schedule}" for pp in (2, 4) for schedule in SCHEDULES),
        *(
            f"pp2-{schedule}-{rest}"
            for rest in ("fsdp2-keep-tp2", "fsdp2-keep", "ddp2", "tp2")
            for schedule in SCHEDULES
        ),
        *(
            f"{rest}-{method}{end}"
            for method in ("all_gather", "ulysses")
            for rest, end in [
                ("reshard-cp2", ""),
                ("reshard-cp4", ""),
                ("fsdp2-reshard-cp2", ""),
                ("fsdp2-keep-cp2", ""),
                ("reshard-cp2", "-tp2"),
                ("reshard-cp2", "-tp2-no_sp"),
                ("pp2-1f1b-keep-cp2", ""),
                ("pp2-1f1b-keep-cp2", "-tp2"),
            ]
        ),
        *(f"pp2-{schedule}-fsdp2-reshard" for schedule in ("gpipe", "1f1b", "interleaved_1f1b")),
    }
    assert wanted <= {row.name for row in TESTED}


def test_kinds(run_file: Path) -> None:
    def kind(**keys: Any) -> LayoutKind:
        config = load(run_file, [f"parallel={keys}".replace("'", "")] if keys else [])
        degrees = {axis: keys.get(axis, 1) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
        return LayoutKind.of(config.parallel, Layout(**degrees))

    assert kind() == LayoutKind(frozenset(), None, None, None, None)
    assert kind(tp=8, sequence_parallel="false") == kind(tp=2, sequence_parallel="false") != kind(tp=2)
    assert kind(dp_shard=64) == kind(dp_shard=64, reshard_after_forward="true")
    assert kind(dp_shard=2, pp=2) == kind(dp_shard=2, pp=2, reshard_after_forward="false")
    assert not nearest_tested(kind()) and not nearest_tested(kind(pp=16, dp_shard=32, tp=8))
    untested = kind(pp=2, dp_replicate=2, dp_shard=2, tp=2, reshard_after_forward="true")
    assert "parallel.reshard_after_forward=false" in nearest_tested(untested)


WARNED: list[tuple[int, tuple[str, ...], str]] = [
    (64, (), "steps of 32 windows leave 32 of 64 data-parallel ranks with padding only"),
    (
        3,
        ("train.micro_batch_size=8",),
        "33.3 % of the samples of a step are padding, .* batch size of 32 a multiple of 24",
    ),
    (
        4,
        ("parallel.pp=4", "parallel.pipeline.schedule=gpipe", "train.micro_batch_size=16"),
        "a step has 2 micro-batches, fewer than parallel.pp=4, .* set train.micro_batch_size lower than 16",
    ),
    (
        4,
        ("parallel.pp=4", "parallel.pipeline.schedule=interleaved_1f1b", "train.batch_size=3"),
        "3 micro-batches, .* take a larger batch or a smaller parallel.pp",
    ),
    (
        2,
        ("train.batch_size=10000", "train.micro_batch_size=2"),
        "each process computes 2,500 micro-batches of 2 windows one after the other .* lower train.batch_size",
    ),
    (2, ("parallel.pipeline.schedule=zbv",), "parallel.pipeline has no effect"),
    (1, ("parallel.reshard_after_forward=true",), "reshard_after_forward=true has no effect"),
    (2, ("parallel.sequence_parallel=false",), "sequence_parallel=false has no effect"),
    (1, ("parallel.overlap.forward_prefetch=2",), "overlap.forward_prefetch=2 has no effect: weights are not sharded"),
    (
        2,
        ("parallel.overlap.backward_prefetch=2", "parallel.reshard_after_forward=false"),
        "overlap.backward_prefetch=2 has no effect without reshard_after_forward",
    ),
    (
        2,
        ("parallel.overlap.reduce=last", "train.micro_batch_size=16"),
        "overlap.reduce=last has no effect: every step is one micro-batch",
    ),
    (2, ("parallel.overlap.async_tp=true",), "async_tp=true has no effect with parallel.tp=1"),
    (16, ("parallel.tp=16", "model.heads=16", "model.ffn_dim=256"), "parallel.tp=16: .* over the network"),
    (1, ("train.balance.loss=0.1",), "train.balance has no effect: no layer of the model has experts"),
    (
        1,
        (EXPERTS, "train.balance.bias_rate=0.01"),
        "bias_rate=0.01 has no effect: .* set model.experts.score_bias=true",
    ),
    (1, (BIASED, "train.balance={loss: 0, over: batch}"), "over=batch has no effect with train.balance.loss=0"),
    (1, (EXPERTS, "train.balance.loss=0"), "loss=0: nothing balances the experts, .* set train.balance.loss=0.01"),
    (1, (BIASED, "train.balance={loss: 0, bias_rate: 0}"), "score_bias=true with train.balance.bias_rate=0"),
    (1, (EXPERTS, "train.balance={loss: 0, force: true}"), "force=true deals tokens to experts in turn"),
]


@pytest.mark.parametrize(("processes", "overrides", "wanted"), WARNED)
def test_warnings(run_file: Path, processes: int, overrides: tuple[str, ...], wanted: str) -> None:
    config = load(run_file, (*BASE, *overrides))
    (line,) = layout_warnings(config, check_layout(config, processes))
    assert re.search(wanted, line), line


def test_no_warnings(run_file: Path) -> None:
    config = load(run_file, (*BASE, "parallel.pp=2", "parallel.tp=2"))
    assert layout_warnings(config, check_layout(config, 8)) == []
    for experts, balance in ((EXPERTS, "{}"), (BIASED, "{loss: 0}"), (BIASED, "{loss: 0.0001, over: batch}")):
        config = load(run_file, (*BASE, experts, f"train.balance={balance}"))
        assert layout_warnings(config, check_layout(config, 1)) == []


class _Endless:
    """A dataset that no run comes to the end of."""

    tokens = 10**15
    documents = 10**6

    def document_start(self, number: int) -> int:
        return number * 10**9


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_shapes_of_steps_are_those_of_the_planned_run(run_file: Path, data: st.DataObject) -> None:
    """The journal of a run has segments; their batches, windows and micro-batches must be the ones that rules see."""
    draw, small = data.draw, st.integers(1, 6)
    train: dict[str, Any] = {"sequence_length": draw(small) * 8, "micro_batch_size": draw(st.none() | small)}
    start, increment = draw(small), draw(small)
    train["batch_size"] = start + increment * draw(small)
    if draw(st.booleans()):
        train["batch_ramp"] = {"start": start, "increment": increment, "tokens": draw(st.integers(1, 5000))}
    phases: list[dict[str, Any]] = []
    for number in range(draw(st.integers(0, 3))):
        keys = draw(st.sets(st.sampled_from(["sequence_length", "batch_size", "micro_batch_size"])))
        phases.append({key: draw(small) * (8 if key == "sequence_length" else 1) for key in sorted(keys)})
        phases[-1]["until"] = f"{(number + 1) * 40} steps" if draw(st.booleans()) else f"{(number + 1) * 60_000} tokens"
    if phases:
        del phases[-1]["until"]
    values = load(run_file).model_dump(mode="json")
    values["train"] = {"duration": "10 steps", **train}
    values["blend"]["phases"] = phases
    config, ranks = Config.model_validate(values), draw(st.integers(1, 9))
    try:
        journal = plan_journal(config, {"words": _Endless()})
    except UserError:
        return  # a phase that ends before it begins
    planned = [
        (segment.batch_size, segment.sequence_length, micro_batch_size(config, journal, number, ranks))
        for number, segment in enumerate(journal.segments)
    ]
    shapes = [(shape.batch_size, shape.sequence_length, shape.micro_batch_size) for shape in step_shapes(config, ranks)]
    assert set(planned) == set(shapes)


def test_padding_and_micro_batches_are_the_loaders(run_file: Path) -> None:
    from pipeline.data.order.locate import RankSamples

    for batch, micro, ranks in [(32, 1, 1), (32, 5, 3), (7, 4, 8), (10, 2, 5), (1, 1, 4)]:
        config = load(run_file, (*BASE, f"train.batch_size={batch}", f"train.micro_batch_size={micro}"))
        (shape,) = step_shapes(config, ranks)
        shares = [RankSamples(batch, shape.micro_batch_size, rank, ranks) for rank in range(ranks)]
        assert {len(share.micro_batches) for share in shares} == {shape.micro_batches}
        windows = sum(len(samples) for share in shares for samples in share.micro_batches)
        computed = ranks * shape.micro_batches * shape.micro_batch_size
        assert windows == batch and shape.padding == pytest.approx(1 - batch / computed)


def test_docs_are_current() -> None:
    for name in PAGES:
        text = (ROOT / "docs" / name).read_text()
        assert page(name, text) == text, "run `make docs`"
    assert all(rule.text.endswith(".") and rule.keys for rule in (*RULES, *WARNINGS))
