"""`pipeline plan`: what it says of a run, against the journal, the rules, and what is built or counted elsewhere."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.data.order.run_length import run_length
from pipeline.data.order.sampler import Sampler
from pipeline.data.plan.build import Assumed, planned_journal
from pipeline.train.host.devices import DEVICES
from pipeline.train.model.flops import flops_per_token
from pipeline.train.parallel.step_shapes import step_counts
from pipeline.train.planning.exchange import _even
from pipeline.train.planning.plan import RESERVE, plan
from pipeline.train.planning.published import LEAST, MOST, PUBLISHED, TYPICAL
from pipeline.train.planning.show import plan_lines
from pipeline.train.planning.timing import StepSeconds
from pipeline.train.rules.layout_check import planned_spec
from slurm.forecast import device_of, processes_of
from tests.config.runfile import write

H100 = DEVICES["h100"]
PIPELINE = [
    "parallel={pp: 2, tp: 2}",
    "model.layers=4",
    "train={duration: 10 steps, batch_size: 8, micro_batch_size: 1}",
]


@pytest.mark.slow
def test_parts_of_a_plan_belong_together(run_file: Path) -> None:
    config = load(run_file, PIPELINE)
    found = plan(config, H100, 8, job_seconds=60)
    assert found.layout.degrees == {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}
    (phase,) = found.phases
    assert found.steps == 10 and found.tokens == 10 * 8 * 2048 and phase.shape.micro_batches == 4
    # 1F1B with equal stages waits (p - 1) / (m + p - 1) of the time; the head makes the second one longer.
    assert 1 / 5 < phase.bubble < 0.8
    assert phase.seconds.bubble == pytest.approx(
        phase.bubble / (1 - phase.bubble) * (_sum_of_works(phase.seconds)), rel=1e-9
    )
    flops = flops_per_token(planned_spec(config), 2048, causal=True)
    assert phase.mfu_causal == pytest.approx(8 * 2048 * flops / (phase.seconds.total * 8 * 989e12))
    assert found.hours == pytest.approx(10 * phase.seconds.total / 3600)
    assert found.jobs == 1
    assert [rank.pp_rank for rank in found.memory] == [0, 1] and found.fits
    assert found.memory_limit == int(81_559 * 2**20 * (1 - RESERVE))


def _sum_of_works(seconds: StepSeconds) -> float:
    """What the ranks of a pipeline do between its first and last action."""
    inside = sum(seconds.communication.get(axis, 0.0) for axis in ("tp", "cp", "pp"))
    return seconds.products + seconds.attention + seconds.recompute + seconds.elementwise + inside


def test_steps_are_those_of_the_journal(run_file: Path) -> None:
    """Phases of other lengths and batches, and a ramp, with an end within a phase."""
    config = load(
        run_file,
        [
            "train={duration: 400_000 tokens, sequence_length: 64, batch_size: 16, "
            "batch_ramp: {start: 4, increment: 4, tokens: 50_000}}",
            "blend={phases: [{until: 200_000 tokens}, {until: 300_000 tokens, sequence_length: 128, batch_size: 4}, "
            "{sequence_length: 256}]}",
        ],
    )
    journal, _ = planned_journal(config, {"words": Assumed(10**9)})
    steps = run_length(config, Sampler(journal)).steps
    expected: Counter[tuple[int, int]] = Counter()
    for segment, samples in journal.drawn(steps):
        expected[segment.batch_size, segment.sequence_length] += samples // segment.batch_size
    counts = step_counts(config, 2)
    assert sum(counts.values()) == steps
    found: Counter[tuple[int, int]] = Counter()
    for shape, count in counts.items():
        found[shape.batch_size, shape.sequence_length] += count
    assert found == expected
    priced = plan(config, H100, 2)
    assert priced.steps == steps and priced.tokens == journal.tokens(steps)
    # Memory is that of the longest windows.
    assert (
        priced.memory
        == plan(load(run_file, ["train={duration: 1 steps, sequence_length: 256, batch_size: 16}"]), H100, 2).memory
    )


@pytest.mark.guard
def test_jobs_are_as_many_as_the_time_takes(run_file: Path) -> None:
    found = plan(load(run_file, PIPELINE), H100, 8)
    assert found.jobs is None
    assert replace(found, job_seconds=found.expected.seconds / 2.5).jobs == 3
    assert replace(found, job_seconds=-1.0).jobs is None
    assert any("leaves no time for steps" in line for line in plan_lines(replace(found, job_seconds=-1.0)))


@pytest.mark.parametrize(
    ("values", "nodes", "environment", "processes"),
    [
        ([], 3, {}, 24),
        (["launch.processes=6"], None, {"WORLD_SIZE": "3"}, 6),
        (["launch.processes=6"], 1, {}, 8),
        ([], None, {"WORLD_SIZE": "3"}, 3),
        (["parallel={tp: 2, pp: 2}"], None, {}, 4),
        (["slurm.nodes=2"], None, {}, 16),
        (["slurm={nodes: 2, processes_per_node: 4}"], None, {}, 8),
        (["slurm={nodes: 2, processes_per_node: 4}"], 3, {}, 12),
        (["slurm={nodes: 2, profile: SITE}"], None, {}, 8),
        (["slurm={nodes: 2, profile: SITE}"], 3, {}, 12),
    ],
)
def test_how_many_processes(
    run_file: Path, values: list[str], nodes: int | None, environment: dict[str, str], processes: int
) -> None:
    site = run_file.with_name("site.yaml")
    site.write_text("gpus_per_node: 4\n")
    config = load(run_file, [value.replace("SITE", str(site)) for value in values])
    assert processes_of(config, device_of(config, "h100"), nodes, environment) == processes


@pytest.mark.slow
def test_links_end_where_nodes_do(run_file: Path) -> None:
    """Eight ranks of tp over nodes of four devices send through the network."""
    large = "model={layers: 2, dim: 4096, heads: 32}"
    values = [large, "parallel.tp=8", "train={duration: 10 steps, batch_size: 8, micro_batch_size: 8}"]
    seconds = []
    for size in (8, 4):
        config = load(run_file, [*values, f"slurm={{nodes: {8 // size}, processes_per_node: {size}}}"])
        device = device_of(config, "H100")
        assert device.node_devices == size
        seconds.append(plan(config, device, 8).main.seconds.communication["tp"])
    assert seconds[1] > 1.5 * seconds[0]
    assert device_of(config, "NVIDIA_A100-SXM4-80GB").name == "a100"


def _without_tokenizer(folder: Path, *values: str) -> Config:
    return load(write(folder), [f"tokenizer={{path: {folder / 'none'}}}", *values])


def test_the_size_of_the_vocabulary_is_enough(tmp_path: Path) -> None:
    assert planned_spec(_without_tokenizer(tmp_path, "model.vocab_size=1000")).vocab_padded == 1024
    with pytest.raises(UserError, match=r"model\.vocab_size: the vocabulary size .* set model\.vocab_size"):
        planned_spec(_without_tokenizer(tmp_path))


def test_times_of_published_runs_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs/planning.md").read_text()
    table = page.split("| time over its plan |")[1].split("\n\n")[0].splitlines()[2:]
    times = [float(row.strip(" |").rpartition("|")[2]) for row in table]
    assert sorted(times) == sorted(PUBLISHED.values())
    assert f"{statistics.median(times):g}" == f"{TYPICAL:g}" == "1.24" and (min(times), sorted(times)[-2]) == (
        LEAST,
        MOST,
    )


SCHEMA = {
    "": "fits layout device parameters parameters_padded active_parameters experts checkpoint_bytes "
    "memory_limit_bytes memory phases steps tokens hours hours_least hours_most hours_planned device_hours links "
    "assumptions warnings",
    "layout": "pp dp_replicate dp_shard cp tp dp world_size",
    "device": "name memory_bytes flops source shares measured",
    "memory": "pp_rank parameters weights moments gradients unsharded activations working total when",
    "phases": "steps batch_size sequence_length micro_batch_size micro_batches tokens_per_step flops_per_token "
    "flops_per_token_causal recompute_flops_per_token bubble traffic_bytes seconds tokens_per_second_per_device mfu "
    "mfu_causal",
}
"""Names that programs may rely on."""


def test_json_has_its_names(run_file: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    code, text, _ = call(run_file, "launch.processes=8", *PIPELINE, "--json")
    found = json.loads(text)
    assert code == 0 and found["fits"] is True
    for section, names in SCHEMA.items():
        part = found[section] if section else found
        assert list(part[0] if isinstance(part, list) else part) == names.split(), section
    (phase,) = found["phases"]
    assert set(phase["traffic_bytes"]) == {"tp", "pp", "dp_shard"}
    parts = {name: value for name, value in phase["seconds"].items() if name != "total"}
    assert sum(parts.values()) == pytest.approx(phase["seconds"]["total"])
    assert {"products", "attention", "communication_tp", "bubble", "optimizer"} <= parts.keys()
    for rank in found["memory"]:
        total = sum(rank[name] for name in SCHEMA["memory"].split()[2:-2])
        assert rank["total"] == total


def test_a_machine_without_gpus_is_told_what_the_figures_are_of(
    run_file: Path, call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    note = "this machine has no GPU: the figures are those of a machine with h100"
    assert note not in call(run_file)[1]
    monkeypatch.setattr("slurm.forecast.visible_gpus", lambda: 0)
    assert note in call(run_file)[1]
    for words in (("slurm.nodes=1",), ("--device", "h100")):
        assert note not in call(run_file, *words)[1]


def test_recorded_losses_have_a_size(run_file: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    code, text, _ = call(run_file, "train.metrics.windows=true", "--json")
    found = json.loads(text)
    samples = sum(phase["steps"] * phase["batch_size"] for phase in found["phases"])
    assert code == 0 and found["losses_bytes"] == 32 + 2 * samples


def test_exports_have_a_size(run_file: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    def found(dtype: str) -> tuple[int, int, int]:
        export = f"train.checkpoint.export={{every_steps: 5, keep: 2, dtype: {dtype}}}"
        code, text, _ = call(run_file, "train.duration=20 steps", export, "--json")
        assert code == 0
        values = json.loads(text)
        return values["parameters"], values["export_bytes"], values["exports"]

    assert [bytes / parameters for parameters, bytes, _ in map(found, ("fp32", "bf16"))] == [4, 2]
    assert found("bf16")[2] == 3  # two that stay, and one that is being written


@pytest.mark.guard
def test_what_does_not_fit_ends_with_2(run_file: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    large = "model={layers: 48, dim: 8192, heads: 64}"
    code, text, _ = call(run_file, large, "train.batch_size=1")
    device, first, second = text.splitlines()[:3]
    assert device == "device: h100 (assumed; --device NAME for another)"
    assert code == 2 and first.startswith("does not fit, as estimated: a process needs ")
    assert second.startswith("change: more processes in parallel.dp_shard")
    assert first.endswith("in steps of 1 x 2,048 tokens (train)")
    code, text, _ = call(run_file, large, "train.batch_size=8", "--nodes", 1)
    assert code == 2 and text.splitlines()[2].startswith("change: more nodes (--nodes) in parallel.dp_shard")
    full = [run_file, large, "train.batch_size=64", "--nodes", 8, "--device", "b200", "train.recompute.mode=full"]
    code, text, _ = call(*full)
    assert code == 0 and text.startswith("fits, as estimated: ") and "devices: 64 x b200" in text
    assert text.count("assumes: ") == 1 and "NVIDIA DGX B200 datasheet" in text
    _, verbose, _ = call(*full, "--verbose")
    assert f"; --verbose lists {verbose.count('assumes: ') - 1} further assumptions" in text


def test_what_is_refused(run_file: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    code, _, error = call(run_file, "parallel.tp=3", "--nodes", 3)
    assert code == 2 and "model.heads=4" in error
    code, _, error = call(run_file, "--device", "h300")
    assert code == 2 and "--device h300: this device is unknown; take one of a100, h100" in error


@pytest.mark.guard
def test_advice_leaves_out_what_is_set(run_file: Path) -> None:
    def advice(*values: str) -> str:
        config = load(run_file, ["model={layers: 4, dim: 4096, heads: 32}", *values])
        first, second = list(plan_lines(plan(config, H100, 1)))[:2]
        assert "in steps of " in first and "(blend.phases.1)" in first
        return second

    phases = "blend={phases: [{until: 5 steps}, {sequence_length: 131_072}]}"
    steps = "duration: 10 steps, sequence_length: 2048, batch_size: 8"
    open_ = advice(phases, f"train={{{steps}, micro_batch_size: 8}}")
    assert "a smaller train.micro_batch_size" in open_ and "recompute.mode=selective or full" in open_
    phases = phases.replace("131_072", "524_288")
    set_ = advice(phases, f"train={{{steps}, micro_batch_size: 1, recompute: {{mode: full}}}}")
    assert "micro_batch_size" not in set_ and "recompute" not in set_ and "parallel.tp or parallel.cp" in set_


EXPERTS = [
    "model={layers: 2, dim: 256, heads: 4, mlp: experts, experts: {count: 16, top_k: 4, ffn_dim: 128}}",
    "train={duration: 10 steps, batch_size: 16, micro_batch_size: 1}",
]


@pytest.mark.slow
def test_experts_of_a_plan(run_file: Path) -> None:
    """Break-even of 3 E F / k tokens; uneven rows need more; a group of more than a node is warned of."""
    config = load(run_file, [*EXPERTS, "parallel.ep=16"])
    found = plan(config, H100, 16)
    experts = found.experts
    assert experts is not None and (experts.layers, experts.count, experts.on_rank) == (2, 16, 1)
    assert experts.break_even == 3 * 16 * 128 / 4
    assert experts.gathered_bytes == 2 * 3 * 128 * 256
    # Scores in fp32, as logits too; rows, and of their hidden layers four.
    assert experts.kept_bytes == 8 * 16 + 2 * 4 * (256 + 4 * 128)
    assert experts.uneven_bytes is not None and experts.uneven_bytes > found.peak_bytes
    assert any(line.startswith("parallel.ep=16 is more than the 8 devices") for line in found.warnings)
    assert found.model.parameters - found.model.active_parameters == 2 * 12 * 3 * 128 * 256
    text = "\n".join(plan_lines(found))
    assert f"{found.model.active_parameters:,} active" in text and "ep sends less" in text and "below 1,536" in text
    alone = plan(load(run_file, EXPERTS), H100, 1).experts
    assert alone is not None and alone.break_even is None and alone.uneven_bytes is None


def test_rows_go_evenly_on_fake_tensors() -> None:
    assert [_even(10, 4), _even(8, 4), _even(0, 2)] == [[3, 3, 2, 2], [2, 2, 2, 2], [0, 0]]


def test_ranks_that_need_the_same_are_one_row(run_file: Path) -> None:
    found = plan(load(run_file, PIPELINE), H100, 8)
    first, last = found.memory
    alike = replace(found, memory=[first, replace(first, pp_rank=1, activations=first.activations + 1), last])
    rows = [line.split()[0] for line in plan_lines(alike) if line.rstrip().endswith(first.when)]
    assert "0-1" in rows


@pytest.mark.slow
def test_suggestions_come_with_keys_to_set(run_file: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    values = ["train.batch_size=16", "launch.processes=2", "parallel.tp=2"]
    code, text, _ = call(run_file, *values, "--suggest", "--json")
    found = json.loads(text)
    assert code == 0 and found["suggestions"]
    best = found["suggestions"][0]
    assert best["peak_bytes"] <= found["memory_limit_bytes"] and best["hours"] <= found["hours"]
    code, text, _ = call(run_file, *values, "--suggest")
    assert code == 0 and "suggestions, fastest first (shares" in text
    # A layout of its own that is refused does not keep others from being found.
    code, text, _ = call(run_file, *values, "parallel.tp=3", "launch.processes=3", "--suggest")
    assert code == 2 and text.startswith("refused: ") and "suggestions, fastest first (shares" in text
    code, text, progress = call(run_file, *values, "parallel.tp=3", "launch.processes=3", "--suggest", "--json")
    found = json.loads(text)
    assert code == 2 and found.keys() == {"refused", "device", "suggestions"} and found["suggestions"]
    assert progress.startswith("looking for layouts: ")


def test_nothing_to_suggest(run_file: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    """The plan is told all the same, in both forms."""
    values = ["model={layers: 48, dim: 16384, heads: 128}", "train.batch_size=1", "launch.processes=1", "--suggest"]
    code, text, _ = call(run_file, *values)
    assert code == 2 and "\ndoes not fit" in text and "no suggestions: no layout over 1 device (h100)" in text
    code, text, _ = call(run_file, *values, "--json")
    found = json.loads(text)
    assert code == 2 and not found["fits"] and found["suggestions"] == [] and "no layout" in found["nothing_fits"]


def test_a_run_on_a_cluster_says_how_many_jobs_it_takes(
    run_file: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    code, text, _ = call(
        run_file, "slurm={nodes: 1, train: {time: 1h}}", "train={duration: 1_000_000 steps, batch_size: 8}"
    )
    assert code == 0
    jobs = "with 55 min of steps each"  # 3 minutes for the start, 2 before the end
    assert jobs in text and "this is the default" not in text
    code, text, _ = call(run_file, "slurm={nodes: 1}", "train={duration: 1_000_000 steps, batch_size: 8}")
    assert code == 0 and "(this is the default; say how long" in text
