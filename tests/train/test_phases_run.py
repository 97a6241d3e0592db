"""Whole runs with phases, ramps, limits and skip lists: what they log, where they end, what may change on resume."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.config.load import load
from pipeline.data.order.journal import Journal
from pipeline.data.preprocess.run_tokenizer import run_tokenizer
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.flops import flops_per_token
from pipeline.train.run.folder import read_metrics
from tests import tiers, tiny
from tests.train.runs import column, exact, start, train, weights_hash

CONSTANT = "train.schedule={type: constant, warmup: 2 steps}"
"""A learning rate that does not depend on how long the run is."""
RESUMED = (CONSTANT, "train.validation.samples=0")
"""And no validation at the end of what is then gone on with."""
LAST = {"weights": {"sea": 1, "land": 1}, "sequence_length": 64, "batch_size": 2}


def phases(*rows: dict[str, Any]) -> str:
    return f"blend.phases={json.dumps(rows)}"


def skips(*rows: dict[str, Any]) -> str:
    return f"blend.skip={json.dumps(rows)}"


@pytest.fixture(scope="module")
def straight(root: Path) -> Path:
    """A run of 8 steps without any of it."""
    return train(root, "straight", CONSTANT)


def test_what_a_run_with_phases_and_a_ramp_logs(root: Path) -> None:
    settings = [
        "train.duration=1500 tokens",
        "train.batch_ramp={start: 2, increment: 1, tokens: 256}",
        phases({"until": "5 steps"}, {"name": "long", **LAST}),
    ]
    code, out = start(root, "phases", *settings)
    assert code == 0, out
    run = root / "phases"
    # Batches of 2 until 128 tokens, of 3 until 256 at least, of 4 up to step 5; then 2 windows of 64.
    sizes = [2 * 32, 2 * 32, 3 * 32, 3 * 32, 4 * 32] + [2 * 64] * 9
    assert column(run, "tokens") == [sum(sizes[: n + 1]) for n in range(len(sizes))]
    assert sum(sizes[:-1]) < 1500 <= sum(sizes)
    config = load(root / "run.yaml", settings)
    spec = decoder_spec(config.model, run_tokenizer(config).vocab_size, config.max_positions)
    for row in read_metrics(run):
        flops = flops_per_token(spec, 32 if row["step"] <= 5 else 64, causal=False)
        assert row["model_flops_per_second"] / row["tokens_per_second"] == pytest.approx(flops)
        # The warm-up of two steps is over after the tokens of two steps, and the run after 1,500.
        if row["step"] <= 2:
            assert row["lr"] == pytest.approx(1e-2 * row["tokens"] / (2 * 64))
    assert column(run, "lr")[-1] == pytest.approx(1e-3)
    journal = orjson.loads((run / "journal.json").read_bytes())
    assert journal == orjson.loads((run / "checkpoints" / "step-00000014" / "state.json").read_bytes())["journal"]
    assert Journal.from_json(journal).tokens(14) == sum(sizes)
    assert "steps 1 to 14 in 2 phases, 2 -> 3 -> 4 -> 2 windows of 32 -> 64 tokens (train.duration: 1,500 " in out
    assert "step 3: batch size 2 -> 3\n" in out
    assert "step 6: phase 2 long begins: batch size 4 -> 2, sequence length 32 -> 64, share of land 0.25 -> 0.5" in out


def test_steps_that_are_passed_over(root: Path, straight: Path) -> None:
    """They change nothing but the step: not the weights, not the order; validation and checkpoints go on."""
    settings = (CONSTANT, "train.checkpoint={every_steps: 1, keep: 9}")
    code, out = start(root, "skipped", *settings, skips({"steps": "3-4"}, {"steps": 8}))
    assert code == 0, out
    run = root / "skipped"
    assert column(run, "passed_over") == [None, None, True, True, None, None, None, True]
    assert weights_hash(run, 2) == weights_hash(run, 4) != weights_hash(run, 5)
    assert weights_hash(run, 7) == weights_hash(run, 8)
    assert column(run, "order_hash") == column(straight, "order_hash")
    assert column(run, "tokens") == column(straight, "tokens")
    rows = read_metrics(run)
    for row, other in zip(rows, read_metrics(straight), strict=True):
        if "passed_over" in row:
            assert not row.keys() & {"loss", "lr", "skipped", "grad_norm"}
        else:
            assert row["data_hash"] == other["data_hash"] and row["lr"] == other["lr"]
    assert "validation_loss" in rows[3] and "validation_loss" in rows[7]
    assert [row["loss"] for row in rows[:2]] == column(straight, "loss")[:2]
    assert "steps 3 to 4 are skipped (blend.skip)\n" in out and "step 8 is skipped (blend.skip)\n" in out


@pytest.mark.slow
def test_a_checkpoint_before_the_first_trained_step_changes_nothing(root: Path) -> None:
    """The optimizer has no states then, and what is saved must not count as a step of it."""
    first = skips({"steps": "1-2"})
    late = train(root, "saved-late", CONSTANT, first, "train.checkpoint={every_steps: 8}")
    early = train(root, "saved-early", CONSTANT, first, "train.checkpoint={every_steps: 1}")
    assert exact(early) == exact(late)
    assert weights_hash(early) == weights_hash(late)
    resumed = train(root, "saved-and-resumed", CONSTANT, first, "train.duration=2 steps")
    train(root, resumed.name, CONSTANT, first)
    assert weights_hash(resumed) == weights_hash(late)


@pytest.mark.slow
def test_samples_and_sources_that_are_masked(root: Path, straight: Path) -> None:
    masked = train(root, "masked", CONSTANT, skips({"source": "land", "from_step": 3}, {"samples": "0-3"}))
    assert column(masked, "order_hash") == column(straight, "order_hash")
    # Of the first step all four samples are masked: it is passed over, and no decay moves the weights either.
    assert column(masked, "passed_over") == [True, *[None] * 7]
    assert column(masked, "data_hash")[1:] == column(straight, "data_hash")[1:]
    assert [set(row) for row in column(masked, "loss_by_source")[1:]] == [
        set(column(straight, "loss_by_source")[1]), *[{"sea"}] * 6
    ]  # fmt: skip
    assert column(masked, "tokens_by_source") == column(straight, "tokens_by_source")


@pytest.mark.guard
def test_a_source_that_ends_the_run(root: Path) -> None:
    """And goes on when it may be read more often."""
    settings = (*RESUMED, "train.duration=40 steps", "data.sources.0.on_exhausted=stop")
    # sea has 10,964 tokens: 17 windows of 32. It gives three quarters of each step of 4.
    code, out = start(root, "ended", *settings, "data.sources.0.max_epochs=0.05")
    assert code == 0, out
    run = root / "ended"
    steps = read_metrics(run)[-1]["step"]
    reason = "source 'sea' has reached its max_epochs (on_exhausted: stop)"
    assert steps in (5, 6)
    assert read_metrics(run)[-1]["tokens_by_source"]["sea"] <= 17 * 32
    assert f"steps 1 to {steps}, 4 windows of 32 tokens ({reason})" in out
    assert f"done, {steps} steps ({reason})" in out
    code, out = start(root, "ended", *settings, "data.sources.0.max_epochs=0.05")
    assert code == 0 and f"nothing to do, already at step {steps} ({reason})" in out
    train(root, "ended", *settings, "data.sources.0.max_epochs=0.1")
    more = column(run, "step")[-1]
    assert more in (11, 12)
    whole = train(root, "ended-whole", *settings, "data.sources.0.max_epochs=0.1")
    assert exact(run) == exact(whole)
    assert weights_hash(run) == weights_hash(whole)
    # Less than it has given already, also where what lies behind that end is another phase.
    for phase in ((), (phases({"until": f"{more - 2} steps"}, {}),)):
        code, out = start(root, "ended", *settings, *phase, "data.sources.0.max_epochs=0.05")
        assert code == 2 and f"{more} steps are done, but the run file now ends the run after {steps}: " in out, out
        assert reason in out


@pytest.mark.slow
def test_max_epochs_of_a_run_that_renormalizes_may_be_raised_until_it_is_reached(root: Path) -> None:
    run = train(root, "raised", *RESUMED, "train.duration=3 steps", "data.sources.0.max_epochs=0.04")
    train(root, "raised", *RESUMED, "train.duration=8 steps", "data.sources.0.max_epochs=0.05")
    whole = train(root, "raised-whole", *RESUMED, "train.duration=8 steps", "data.sources.0.max_epochs=0.05")
    assert exact(run) == exact(whole)
    code, out = start(root, "raised", *RESUMED, "train.duration=9 steps", "data.sources.0.max_epochs=0.06")
    assert code == 2 and "max_epochs" in out


def test_a_run_whose_sources_are_all_exhausted_does_not_start(root: Path) -> None:
    limits = ("data.sources.0.max_epochs=0.1", "data.sources.1.max_epochs=0.1")
    code, out = start(root, "exhausted", "train.duration=100 steps", *limits)
    assert code == 2 and "at step " in out and "max_epochs" in out
    assert not (root / "exhausted" / "config.yaml").exists() and not (root / "exhausted" / "journal.json").exists()


@pytest.mark.guard
def test_a_phase_is_appended(root: Path) -> None:
    """The run equals one that was planned so from the start."""
    settings = (*RESUMED, "train.duration=10 steps", phases({"until": "6 steps"}, LAST))
    whole = train(root, "planned", *settings)
    run = train(root, "appended", *RESUMED, "train.duration=6 steps")
    train(root, "appended", *settings)
    assert exact(run) == exact(whole)
    assert weights_hash(run) == weights_hash(whole)
    # Step 5 is done; nothing can begin there.
    begun = ("train.duration=12 steps", phases({"until": "4 steps"}, LAST))
    code, out = start(root, "appended", *RESUMED, *begun)
    assert code == 2 and "step 5" in out, out
    assert column(run, "step")[-1] == 10
    # What was refused is not written down as the run's.
    assert load(run / "config.yaml").blend == load(root / "run.yaml", list(settings)).blend


@pytest.mark.guard
def test_a_phase_that_is_not_trained_on_yet_may_change_with_its_sources(root: Path, tmp_path: Path) -> None:
    """A new source is preprocessed for it, and read."""
    only_sea = [f"data.sources={json.dumps(tiny.values(root)['data']['sources'][:1])}"]
    run = train(root, "one-source", *RESUMED, "train.duration=4 steps", *only_sea)
    settings = (*RESUMED, "train.duration=8 steps", phases({"until": "4 steps", "sources": ["sea"]}, {}))
    train(root, "one-source", *settings)
    assert set(column(run, "loss_by_source")[3]) == {"sea"}
    assert set(column(run, "loss_by_source")[7]) == {"sea", "land"}
    whole = train(root, "one-source-whole", *settings)
    assert exact(run) == exact(whole)


@pytest.mark.slow
def test_a_skip_list_may_change_on_resume(root: Path, straight: Path) -> None:
    run = train(root, "skips", CONSTANT, "train.duration=3 steps", skips({"source": "land"}))
    assert [set(row) for row in column(run, "loss_by_source")] == [{"sea"}] * 3
    # Removed: it does not hold from now on. New: it holds from now on, though it speaks of steps that are done.
    train(root, "skips", CONSTANT, "train.duration=5 steps", skips({"steps": "2-4"}))
    assert column(run, "passed_over") == [None, None, None, True, None]
    assert "land" in column(run, "loss_by_source")[4]
    journal = orjson.loads((run / "journal.json").read_bytes())
    held = {(bool(skip["steps"]), skip["first_step"], skip["end_step"]) for skip in journal["skips"]}
    assert held == {(False, 0, 3), (True, 3, None)}
    assert column(run, "order_hash") == column(straight, "order_hash")[:5]
    code, out = start(root, "skips", CONSTANT, "train.duration=8 steps", skips({"steps": "2-4", "from_step": 2}))
    assert code == 2 and "step 2" in out, out


@pytest.mark.slow
def test_longer_windows_need_rows_of_a_learned_position_embedding(root: Path) -> None:
    """The model has as many as the longest windows, so they must be known when the run begins."""
    settings = (*RESUMED, "model.positions=learned")
    longer = ("train.duration=6 steps", phases({"until": "4 steps"}, {"sequence_length": 64}))
    train(root, "learned", *settings, "train.duration=4 steps")
    code, out = start(root, "learned", *settings, *longer)
    assert code == 2 and "model.max_positions: 32 -> 64" in out
    run = train(root, "learned-more", *settings, "train.duration=4 steps", "model.max_positions=64")
    train(root, "learned-more", *settings, *longer, "model.max_positions=64")
    assert column(run, "step")[-1] == 6


@pytest.mark.parametrize("read", tiers.first(1, ["mmap", "pread"], rest="guard"))
@pytest.mark.parametrize("data", tiers.first(1, ["shared", "local"], rest="guard"))
def test_copies_on_the_node_and_other_ways_to_read_give_the_same_run(
    root: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str, data: str
) -> None:
    calls = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: calls.append(arguments) or preadv(*arguments))
    settings = (f"stage={{data: {data}, dir: {tmp_path}}}", f"data.loader={{read: {read}, prefetch: 5}}")
    assert exact(train(root, f"{data}-{read}", CONSTANT, *settings)) == exact(straight)
    assert bool(calls) == (read == "pread")
    assert any(tmp_path.rglob("*.bin")) == (data == "local")


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_part_that_is_not_as_it_was_written_is_found_before_the_first_step(
    root: Path, tmp_path: Path, split: str
) -> None:
    shutil.copytree(root / "data", tmp_path / "data")
    part = next((tmp_path / "data" / "land" / split / "parts").rglob("*.bin"))
    with part.open("r+b") as file:
        file.truncate(100)
    run = f"truncated-{split}"
    code, out = start(root, run, f"data.dir={tmp_path / 'data'}")
    assert code == 2 and str(part) in out
    assert not (root / run / "config.yaml").exists()


def test_a_held_out_split_of_another_tokenizer_is_refused_before_the_first_step(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "data", tmp_path / "data")
    for source in ("sea", "land"):
        manifest = tmp_path / "data" / source / "heldout" / "manifest.json"
        value = orjson.loads(manifest.read_bytes())
        value["tokenizer"]["fingerprint"] = "another"
        manifest.write_bytes(orjson.dumps(value))
    code, out = start(root, "other-heldout", f"data.dir={tmp_path / 'data'}")
    assert code == 2 and f"({tmp_path / 'data' / 'sea' / 'heldout'}) was tokenized with another tokenizer" in out, out
    assert not (root / "other-heldout" / "config.yaml").exists()


def test_the_objective_is_compared(root: Path, straight: Path) -> None:
    code, out = start(root, "straight", "train.duration=9 steps", "train.objective.type=fim")
    assert code == 2 and "train.objective.type: causal -> fim" in out and "resume.allow=[objective]" in out


@pytest.mark.slow
def test_fill_in_the_middle_resumes_exactly(tmp_path: Path) -> None:
    sentinels = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    changes = {"tokenizer.special_tokens": sentinels, "train.objective": {"type": "fim", "rate": 0.9}}
    preprocess(load(tiny.write_run(tmp_path, changes)))
    whole = train(tmp_path, "whole", *RESUMED)
    causal = train(tmp_path, "causal", *RESUMED, "train.objective.type=causal")
    run = train(tmp_path, "split", *RESUMED, "train.duration=3 steps")
    train(tmp_path, "split", *RESUMED)
    assert exact(run) == exact(whole)
    assert weights_hash(run) == weights_hash(whole)
    assert column(whole, "data_hash") == column(causal, "data_hash")
    assert column(whole, "loss") != column(causal, "loss")
    code, out = start(tmp_path, "split", *RESUMED, "train.duration=9 steps", "train.objective.rate=0.5")
    assert code == 2 and "objective.rate: 0.9 -> 0.5" in out
