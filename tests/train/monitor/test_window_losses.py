"""The losses of samples: against the model itself, exactly once over resumes and rewinds, on other layouts."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F

from pipeline.common.errors import EXIT_SUPERSEDED
from pipeline.config.load import load
from pipeline.data.order.windows import Windows
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.loss_file import LossFile, encode, losses, recorded
from pipeline.data.provenance.loss_stream import LossView, TargetCounts
from pipeline.data.provenance.losses import LossQuestion, answer_losses
from pipeline.data.provenance.run import open_view
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.loop import trainer
from pipeline.train.model.context import Context
from pipeline.train.run.folder import read_metrics
from pipeline.train.start.fork import fork
from pipeline.train.start.setup import load_for_inference
from tests import tiers, tiny
from tests.train.distributed import ranks
from tests.train.distributed.faulty import KILLED, Fault, Instant, Start
from tests.train.poison import INF, poison
from tests.train.runs import exact, start, train, weights_hash

ON = "train.metrics.windows=true"
HALF = 2.0**-11
"""Largest error of a rounded loss, over the loss."""
Array = npt.NDArray[np.float32]


def kept(run: Path, step: int | None = None) -> Array:
    """What is recorded of a run, up to a step: NaN where nothing is, and -1 where no target counted."""
    with LossFile(run / "losses.bin") as file:
        end = file.end if step is None else open_view(run).journal.samples(step).start
        codes = file.read(0, end)
    values = losses(codes)
    return np.where(recorded(codes), np.where(np.isnan(values), -1, values), np.nan)


def test_codes_of_losses() -> None:
    nats = np.array([0.0, 1e-9, 3.0, 1e7, np.inf, np.nan, 0.0, 5.0])
    targets = np.array([4.0, 4.0, 2.0, 2.0, 2.0, 2.0, 0.0, 0.0])
    codes = encode(nats, targets)
    assert recorded(codes).all() and codes.dtype == np.uint16
    assert losses(codes)[:6].tolist() == [0, 0, 1.5, 65504, INF, INF] and np.isnan(losses(codes)[6:]).all()
    assert not recorded(np.zeros(1, np.uint16)).any()
    some = np.random.default_rng(0).uniform(0.1, 40, 10_000)
    np.testing.assert_allclose(losses(encode(some, np.ones(10_000))), some, rtol=HALF)


@pytest.mark.guard
def test_each_loss_is_that_of_the_model_of_its_step(root: Path) -> None:
    keys = ("train.duration=5 steps", "train.checkpoint.every_steps=1", "train.checkpoint.keep=9")
    keys = (*keys, "train.validation.samples=0", "train.precision.compute=fp32")
    run, without = train(root, "recorded", *keys, ON), train(root, "without", *keys)
    assert exact(run) == exact(without) and weights_hash(run) == weights_hash(without)
    assert not (without / "losses.bin").exists()
    view, found = open_view(run), kept(run)
    assert len(found) == 20
    for step in range(1, 5):
        model = load_for_inference(load(root / "run.yaml", [f"run.dir={run}", *keys]), step).model.whole
        for sample in view.journal.samples(step):
            source, epoch, position = (int(x[sample % 4]) for x in view.sampler.step(step))
            windows = view.instances[0][view.journal.names[source]]
            assert isinstance(windows, Windows)
            ids, _ = windows.read(epoch, position)
            with torch.no_grad():
                logits = model(torch.from_numpy(ids)[None, :-1], Context())
            loss = F.cross_entropy(logits[0], torch.from_numpy(ids)[1:])
            assert found[sample] == pytest.approx(loss.item(), rel=2 * HALF)


def means(run: Path) -> list[float]:
    """Mean loss of each step by what is recorded; NaN of one of which nothing is trained on."""
    view, result = open_view(run), []
    with LossFile(run / "losses.bin") as file:
        counts = TargetCounts(view)
        for step in range(view.steps):
            (block,) = LossView(view, file, (step, step + 1)).blocks()
            assert block.recorded.all()
            tokens = counts.of(block)
            mean = np.sum(np.where(block.known, block.loss, 0) * tokens) / tokens.sum() if tokens.any() else np.nan
            result.append(float(mean))
    return result


SPECIAL = ["[MASK]", *(f"<extra_id_{number}>" for number in range(8))]
OTHERS: dict[str, dict[str, Any]] = {
    "ramp, phases, skips": {
        "train.batch_ramp": {"start": 2, "increment": 2, "tokens": 128},
        "train.loss": {"mask_document_start": True, "chunk_tokens": 8},
        "blend": {
            "phases": [{"until": "5 steps"}, {"sequence_length": 16, "micro_batch_size": 3}],
            "skip": [
                {"steps": "4"},
                {"samples": "3-5"},
                {"source": "land"},
                {"source": "sea", "documents": ["0-20"], "from_step": 6},
            ],
        },
    },
    "masked": {"model.direction": "both", "train.objective": {"type": "masked", "rate": 0.3}},
    "spans": {"model.encoder": {"layers": 1}, "train.objective": {"type": "spans", "rate": 0.3}},
    "ul2": {
        "model.encoder": {"layers": 1},
        "train.objective": {"type": "ul2", "denoisers": [{"rate": 0.2}, {"rate": 0.3, "mean_span": None}]},
    },
    "fp16": {"train.precision": {"compute": "fp16"}, "model.mtp": {"depth": 1}},
}


@pytest.mark.parametrize(
    "name", ["ramp, phases, skips", *(pytest.param(name, marks=pytest.mark.guard) for name in list(OTHERS)[1:])]
)
def test_samples_weighted_by_their_targets_are_the_step(tmp_path: Path, name: str) -> None:
    keys = {"tokenizer.special_tokens": SPECIAL, "train.metrics.windows": True, "train.validation.samples": 0}
    file = tiny.write_run(tmp_path, {**keys, **OTHERS[name]})
    preprocess(load(file))
    run = train(tmp_path, "run")
    rows = read_metrics(run)
    expected = [row.get("loss", np.nan) for row in rows]
    np.testing.assert_allclose(means(run), expected, rtol=HALF)
    if "skips" in name:
        assert np.isnan(expected[3])
        view, found = open_view(run), kept(run)
        assert (found[list(view.journal.samples(3))] == -1).all() and (
            found[[2, 3, 4, 5]] == [1, -1, -1, -1]
        ).sum() >= 3
        of_land = [np.array(view.sampler.step(step).source) == 0 for step in range(8)]
        assert (found[np.concatenate(of_land)] == -1).all() and np.isfinite(found).all()


@pytest.mark.slow
def test_a_resume_from_an_earlier_checkpoint_forgets_what_followed(root: Path) -> None:
    keys = ("train.checkpoint.keep=9", "train.checkpoint.every_steps=3", "train.validation.samples=0")
    keys = (*keys, "train.schedule.type=constant")
    whole, other = train(root, "whole", *keys, ON), train(root, "other", *keys, ON, "train.optimizer.lr=3e-3")
    run = train(root, "again", *keys, ON, "train.optimizer.lr=3e-3")
    # Off: what comes is not recorded, and what was trained before is no part of the run any more.
    train(root, "again", *keys, "train.duration=6 steps", "resume.from=3")
    assert np.array_equal(kept(run), kept(other, 3)) and len(kept(run)) == 12
    train(root, "again", *keys, ON)
    assert np.array_equal(kept(run)[:12], kept(other)[:12]) and np.isnan(kept(run)[12:24]).all()
    assert np.isfinite(kept(run)[24:]).all() and len(kept(run)) == 32
    # From the start, with what the other one has trained by: all of it is that.
    restarted = train(root, "restarted", *keys, "train.duration=6 steps")
    train(root, "restarted", *keys, ON)
    with LossFile(restarted / "losses.bin") as file:
        assert (file.head.first_step, file.head.first_sample, file.head.attempt) == (6, 24, 2)
    assert np.isnan(kept(restarted)[:24]).all() and np.array_equal(kept(restarted)[24:], kept(whole)[24:])
    train(root, "restarted", *keys, ON, "resume.from=3")
    assert np.array_equal(kept(restarted)[12:], kept(whole)[12:])


@pytest.mark.guard
def test_a_fork_begins_at_its_step(root: Path) -> None:
    keys = ("train.checkpoint.keep=9", "train.validation.samples=0", ON)
    parent, child = train(root, "parent", *keys), root / "child"
    fork(parent, 6, load(root / "run.yaml", [f"run.dir={child}", *keys]), trainer.Console(quiet=True))
    code, out = start(root, "child", *keys)
    assert code == 0 and "losses of 8 samples will be recorded: 48 B" in out
    notes = answer_losses(open_view(child), LossQuestion(), say=str).notes
    assert notes == [f"steps 1 to 6 are those of {parent}, of which this run is a fork"]
    assert np.array_equal(kept(child)[24:], kept(parent)[24:]) and np.isnan(kept(child)[:24]).all()
    assert (child / "losses.bin").stat().st_size == 32 + 2 * 8


@pytest.mark.guard
def test_a_rewind_records_what_is_trained_after_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("train.checkpoint.every_steps=2", "train.checkpoint.keep=9", "train.faults.on_nonfinite=rewind", ON)
    skips = ("train.validation.samples=0", "train.faults.rewind_steps=1")
    expected = train(root, "passed-over", *keys, *skips, "blend.skip=[{steps: 5-6}]")
    poison(monkeypatch, {6: INF})
    original = trainer.Trainer.run

    def run_ahead(self: trainer.Trainer) -> None:
        self._runs_ahead = True
        original(self)

    monkeypatch.setattr(trainer.Trainer, "run", run_ahead)
    code, out = start(root, "rewound", *keys, *skips)
    assert code == 0 and "rewound to step 4" in out
    assert np.array_equal(kept(root / "rewound"), kept(expected))
    assert (kept(expected)[16:24] == -1).all() and (kept(expected)[24:] > 0).all()


@pytest.mark.guard
def test_a_full_disk_delays_a_record_and_a_later_attempt_ends_this_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = os.pwrite, 0

    def pwrite(descriptor: int, data: bytes, place: int) -> int:
        nonlocal calls
        calls += 1
        if calls in (3, 4):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(descriptor, data, place)

    keys = ("train.validation.samples=0", ON)
    expected = kept(train(root, "room", *keys))
    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr("pipeline.train.monitor.loggers.retrying._PAUSE", 0.0)
    monkeypatch.setattr("pipeline.train.monitor.loggers.retrying._LONGEST_PAUSE", 0.0)
    run = train(root, "full", *keys)
    assert calls > 4 and np.array_equal(kept(run), expected)

    def taken_over(descriptor: int, data: bytes, place: int) -> int:
        original(descriptor, (9).to_bytes(8, "little"), 24)
        return original(descriptor, data, place)

    monkeypatch.setattr(os, "pwrite", taken_over)
    code, out = start(root, "taken", *keys)
    assert code == EXIT_SUPERSEDED and "attempt 9, which has taken over the run" in out


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("on-ranks")
    keys: dict[str, Any] = {
        "train.metrics.windows": True,
        "train.precision": {"compute": "fp32"},
        "train.validation.samples": 0,
        "train.checkpoint": {"every_steps": 2, "keep": 9},
        "train.batch_size": 5,
        "train.micro_batch_size": 1,
        "model.layers": 4,
        "blend.skip": [{"samples": "3-4"}],
    }
    preprocess(load(tiny.write_run(folder, keys)))
    train(folder, "one")
    return folder


def _train(file: Path, run: str, *values: str) -> None:
    trainer.train(load(file, [f"run.dir={file.parent / run}", *values]))


@pytest.mark.parallel
@pytest.mark.guard
@pytest.mark.parametrize("layout", tiers.first(1, ["pp=2 dp_shard=2", "tp=2 cp=2"], rest="slow"))
def test_other_layouts_record_what_one_process_does(on_ranks: Path, layout: str) -> None:
    values = [f"parallel.{degree}" for degree in layout.split()]
    ranks.run(4, _train, on_ranks / "run.yaml", layout, *values, connect=False)
    one, found = kept(on_ranks / "one"), kept(on_ranks / layout)
    assert len(one) == 40 and (one[3:5] == -1).all()
    np.testing.assert_allclose(found, one, rtol=2 * HALF)


@pytest.mark.parallel
@pytest.mark.guard
@pytest.mark.parametrize(
    "instant",
    [
        Instant(function="pipeline.train.loop.quantities.windows:LossWriter.write", number=6),
        Instant("os.rename", r"/latest$", number=3),
    ],
    ids=["before a record", "in a save"],
)
def test_after_a_kill_what_was_saved_is_right_and_the_rest_comes_again(on_ranks: Path, instant: Instant) -> None:
    run, values = on_ranks / f"killed-{instant.number}", ["parallel.dp_shard=2"]
    straight = on_ranks / "straight"
    if not straight.exists():
        with Start(on_ranks / "run.yaml", straight, 2, values) as alive:
            assert alive.wait() == [0, 0], alive.said()
    with Start(on_ranks / "run.yaml", run, 2, values, {0: Fault(instant)}) as killed:
        assert killed.wait()[0] == KILLED
    saved = max(checkpoint.step for checkpoint in Checkpoints.of_run(run).all())
    assert saved in (4, 6) and np.array_equal(kept(run, saved), kept(straight, saved), equal_nan=True)
    with Start(on_ranks / "run.yaml", run, 2, values) as again:
        assert again.wait() == [0, 0], again.said()
    assert np.array_equal(kept(run), kept(straight), equal_nan=True)
