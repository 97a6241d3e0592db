"""Whole runs on packs: kills, resumes on other ranks, forks, rewinds, and questions about their data."""

from __future__ import annotations

import io
import signal
import struct
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
import torch.nn.functional as F
import xxhash
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.packing.packs import Packs
from pipeline.data.loading.loader import Loader
from pipeline.data.loading.objectives.causal import Causal
from pipeline.data.order.blend import UNIT
from pipeline.data.order.journal import Journal
from pipeline.data.order.packs import instances_of
from pipeline.data.order.segments import Segment, SourceState
from pipeline.data.plan.build import make_data_plan
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.document_to_steps import when
from pipeline.data.provenance.run import open_view
from pipeline.data.provenance.step_to_documents import where
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.run.folder import read_metrics
from pipeline.train.start.fork import fork
from tests import tiny
from tests.data.preprocess.memory import EOD, MemoryDataset
from tests.train.huggingface.hf_mapping import randomize
from tests.train.models import FAMILIES, VOCAB
from tests.train.poison import poison
from tests.train.runs import column, exact, start, train, weights_hash

KEYS = {
    "data.loader.packing": "best_fit",
    "model.document_attention": True,
    "train.validation.samples": 0,
    "train.schedule": {"type": "constant", "warmup": "2 steps"},
    "train.precision": {"compute": "fp32"},
    "train.checkpoint.every_steps": 4,
    "train.checkpoint.keep": 9,
    "train.duration": "12 steps",
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    preprocess(load(tiny.write_run(folder, KEYS)))
    return folder


@pytest.fixture(scope="module")
def straight(packed: Path) -> Path:
    return train(packed, "straight")


def test_losses_are_those_of_documents_alone() -> None:
    """A model that attends within documents gives each document of a pack the loss of a pass of its own."""
    length = 12
    dataset = MemoryDataset([5, 12, 3, 4, 9, 1, 11, 6, 2, 30, 7, 27])
    dataset.ids = np.where(dataset.ids == EOD, EOD, 1 + dataset.ids % (VOCAB - 1))
    packs = Packs.made(dataset, length).count
    state = SourceState(tokens=dataset.tokens, packs=packs, weight=UNIT, offset=0, lap=0, cursor=0)
    segment = Segment(first_step=0, first_sample=0, batch_size=packs, sequence_length=length, sources={"s": state})
    journal = Journal(order_version=2, seed=1, segments=[segment])
    instances = instances_of(journal, {"s": dataset})
    (batch,) = Loader(journal, instances, Causal(), micro_batch_size=[packs]).batches(0).micro_batches
    model = Decoder(decoder_spec(FAMILIES["llama"].config, VOCAB, 64))
    randomize(model, seed=3)

    def losses(tokens: torch.Tensor, targets: torch.Tensor, context: Context) -> torch.Tensor:
        return F.cross_entropy(model(tokens, context).flatten(0, 1), targets.flatten(), reduction="none")

    with torch.no_grad():
        context = Context(bounds_BS=batch.bounds, starts=batch.starts)
        packed = losses(batch.tokens, batch.targets, context)[batch.weight.flatten() > 0]
        alone = []
        for document, size in enumerate(dataset.lengths):
            start = dataset.document_start(document)
            text = torch.tensor([EOD, *dataset.ids[start : start + size].tolist()])
            for first in range(0, size, length):
                piece = text[first : first + length + 1][None]
                alone.append(losses(piece[:, :-1], piece[:, 1:], Context()))
    torch.testing.assert_close(packed.sort().values, torch.cat(alone).sort().values)


@pytest.mark.guard
def test_where_and_when_are_inverse(packed: Path, straight: Path) -> None:
    """Every target of every step is found again from its document, and targets are counted exactly."""
    run = open_view(straight)
    rows = read_metrics(straight)
    found: dict[tuple[str, int], Counter[tuple[int, int, tuple[int, int]]]] = {}
    drawn: Counter[str] = Counter()
    for step in range(1, 13):
        shown = where(run, step, say=print)
        for sample in shown.shown:
            for piece in sample.pieces:
                assert piece.targets == piece.tokens
                drawn[sample.source] += piece.targets[1] - piece.targets[0]
                key = sample.source, piece.about.document
                found.setdefault(key, Counter())[step, sample.sample, piece.targets] += 1
        assert rows[step - 1]["tokens_by_source"] == dict(drawn)
        assert rows[step - 1]["tokens"] == shown.tokens[1] >= sum(drawn.values())
        by_rank = [where(run, step, rank=rank, ranks=3, say=print).shown for rank in range(3)]
        assert sorted(s.sample for part in by_rank for s in part) == [s.sample for s in shown.shown]
    for (source, document), expected in found.items():
        (times,) = when(run, source, document=document, say=print).documents
        assert Counter((one.step, one.sample, one.tokens) for one in times.seen) == expected
    (times,) = when(run, *next(iter(found))[:1], document=next(iter(found))[1], say=print).documents
    assert not times.masked


@pytest.mark.guard
def test_what_is_read_of_the_run(packed: Path, straight: Path) -> None:
    state = orjson.loads((straight / "checkpoints/step-00000008/state.json").read_bytes())
    assert state["journal"]["order_version"] == 2 and state["targets"]["step"] == 8
    assert state["targets"]["by_source"] == read_metrics(straight)[7]["tokens_by_source"]
    assert all(source["packs"] > 0 for source in state["journal"]["segments"][0]["sources"].values())
    plan = make_data_plan(load(packed / "run.yaml", [f"run.dir={straight}"]))
    digest = xxhash.xxh3_64()
    for row in read_metrics(straight):
        digest.update(struct.pack("<Q", int(row["order_hash"], 16)))
    assert plan.order_hash == f"{digest.intdigest():016x}" and plan.tokens == read_metrics(straight)[-1]["tokens"]
    assert {row.packing for row in plan.segments} == {"best_fit"}
    for source in plan.sources:
        drawn = read_metrics(straight)[-1]["tokens_by_source"][source.source]
        assert abs(source.end.drawn - drawn) < 0.05 * drawn and source.end.slots >= drawn
    for epochs, row in zip(column(straight, "epochs_by_source"), read_metrics(straight), strict=True):
        for name, tokens in row["tokens_by_source"].items():
            assert epochs[name] == tokens / Dataset.open(packed / "data" / name / "train").tokens


@pytest.mark.slow
def test_a_run_that_is_killed_equals_a_straight_one(packed: Path, straight: Path) -> None:
    command = tiny.command("train", packed / "run.yaml", f"run.dir={packed / 'killed'}")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 100
    latest = packed / "killed" / "checkpoints" / "latest"
    while not latest.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert latest.exists()
    train(packed, "killed")
    assert exact(packed / "killed") == exact(straight)
    assert column(packed / "killed", "tokens_by_source") == column(straight, "tokens_by_source")
    assert weights_hash(packed / "killed") == weights_hash(straight)


@pytest.mark.slow
@pytest.mark.parallel
def test_other_ranks_and_micro_batches_train_on_the_same(packed: Path, straight: Path) -> None:
    """Two processes share each step by the work of its documents, resume on one, and one goes on on two."""
    for steps, *values in (
        (4, "launch.processes=2", "parallel.dp_shard=2", "train.micro_batch_size=1"),
        (8, "train.micro_batch_size=2"),
        (12, "launch.processes=2", "parallel.dp_shard=2"),
    ):
        command = ("train", packed / "run.yaml", f"run.dir={packed / 'ranks'}", f"train.duration={steps} steps")
        done = tiny.pipeline(*command, *values)
        assert done.returncode == 0, done.stderr
    for key in ("order_hash", "data_hash", "tokens", "tokens_by_source"):
        assert column(packed / "ranks", key) == column(straight, key)
    assert column(packed / "ranks", "loss") == pytest.approx(column(straight, "loss"), rel=1e-4)


@pytest.mark.guard
def test_forks_and_phases_may_change_the_packing(packed: Path, straight: Path) -> None:
    """The past may not: the message names the phases to write."""
    code, out = start(packed, "straight", "data.loader.packing=windows", "train.duration=14 steps")
    assert code and "data.loader.packing best_fit -> windows" in out
    assert "data.loader.packing=best_fit" in out and "{until: 12 steps}, {packing: windows}" in out
    phases = "blend.phases=[{until: 8 steps}, {packing: windows}]"
    whole = train(packed, "phases", phases)
    config = load(packed / "run.yaml", [f"run.dir={packed / 'child'}", "data.loader.packing=windows"])
    fork(straight, 8, config, Console(file=io.StringIO()))
    folders = [packed / "data" / name / "train" for name in ("sea", "land")]
    for folder in folders:
        (folder / "packs").rename(folder / "gone")  # no step to come reads them
    try:
        child = train(packed, "child", "data.loader.packing=windows")
    finally:
        for folder in folders:
            (folder / "gone").rename(folder / "packs")
    assert exact(child) == exact(whole)[8:]
    assert exact(whole)[:8] == exact(straight)[:8]
    for key in ("tokens_by_source", "epochs_by_source"):
        assert column(child, key) == column(whole, key)[8:]
    assert weights_hash(child) == weights_hash(whole)


@pytest.mark.guard
def test_targets_are_exact_after_a_rewind(packed: Path, straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of steps that are passed over."""
    poison(monkeypatch, {7: torch.inf})
    run = train(packed, "rewound", "train.faults={on_nonfinite: rewind, rewind_steps: 1}")
    assert len({row["attempt"] for row in read_metrics(run)}) == 2
    for key in ("order_hash", "tokens", "tokens_by_source", "epochs_by_source"):
        assert column(run, key) == column(straight, key)
    assert column(run, "passed_over")[4:8] == [None, True, True, None]


def test_objectives_without_packs_are_refused_before_any_work(tmp_path: Path) -> None:
    file = tiny.write_run(tmp_path, KEYS)
    encoder = ["model.encoder.layers=1", "model.document_attention=false"]
    for overrides, message in (
        (["train.objective.type=spans", *encoder], "data.loader.packing: best_fit does not go with train.objective"),
        (
            ["train.objective.type=masked", "model.direction=both", "model.document_attention=false"],
            "needs model.document_attention: true",
        ),
    ):
        with pytest.raises(UserError, match=message):
            load(file, overrides)
