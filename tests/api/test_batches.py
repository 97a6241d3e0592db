"""The batches of a run are those that training read: by its hashes, by its own loader, and by the losses it logged."""

from __future__ import annotations

import struct
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import xxhash

from pipeline import api
from pipeline.data.datasets.open import open_datasets
from pipeline.data.loading.loader import open_loader
from pipeline.data.order.journal_file import read_journal
from tests.api.runs import KINDS, trained
from tests.tiers import first


def test_hashes_are_those_of_the_run_and_of_the_tensors(windows: Path) -> None:
    run = api.Run(windows)
    metrics = run.metrics()
    steps = []
    for batch in run.batches():
        steps.append(batch.step)
        row = metrics.rows[batch.step - 1]
        assert (batch.order_hash, batch.data_hash) == (row["order_hash"], row["data_hash"])
        total = 0
        for sample, ids, targets in zip(batch.samples, batch.ids, batch.targets, strict=True):
            window = [int(sample), *ids.tolist(), int(targets[-1])]
            total += xxhash.xxh3_64_intdigest(struct.pack(f"<{len(window)}q", *window))
        assert f"{total % 2**64:016x}" == row["data_hash"]
    assert steps == list(range(1, 9))


def test_documents_of_a_batch_are_its_tokens(windows: Path) -> None:
    run = api.Run(windows)
    for batch in run.batches(2, 5):
        for row, (source, spans) in enumerate(zip(batch.sources, batch.documents, strict=True)):
            dataset = run.dataset(source)
            pieces = [dataset[span.document][span.start : span.start + span.length].tolist() for span in spans]
            window = [*batch.ids[row].tolist(), int(batch.targets[row, -1])]
            assert [*chain(*pieces)] == window
            lengths = [len(piece) for piece in pieces]
            numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
            assert batch.segments[row].tolist() == numbers[:-1]
            begins = [sum(lengths[:number]) for number in numbers[:-1]]
            assert batch.bounds[row].tolist() == begins
        assert batch.positions[0].tolist() == list(range(32)), "without document_attention the model counts on"


def test_a_plan_has_the_batches_that_the_run_then_reads(windows: Path) -> None:
    run = api.Run(windows)
    plan = api.Run.plan(str(windows.parent / "run.yaml"), {"run.dir": windows.parent / "another"})
    assert (plan.done, plan.steps, len(plan.metrics())) == (0, 8, 0)
    one, other = plan.batch(7), run.batch(7)
    assert one.data_hash == other.data_hash and one.ids.equal(other.ids)
    larger = api.Run.plan(windows.parent / "run.yaml", {"run.dir": "elsewhere", "train.batch_size": 8})
    assert larger.batch(1).ids.equal(torch.cat([run.batch(1).ids, run.batch(2).ids])), "the order is one of samples"


def test_steps_that_there_are_not(windows: Path) -> None:
    run = api.Run(windows)
    for step in (0, -1, 9):
        with pytest.raises(api.UserError, match=f"step {step}: .* has steps 1 to 8 only"):
            run.batch(step)
    with pytest.raises(api.UserError, match="step 10"):
        run.batches(3, 11)
    assert list(run.batches(5, 5)) == []


@pytest.mark.parametrize("kind", first(0, KINDS, rest="guard"))
def test_batches_are_those_of_the_training(tmp_path: Path, kind: str) -> None:
    changes = {}
    if kind == "weights":
        corpus = tmp_path / "sea"
        sources = [
            {"name": "sea", "paths": [f"{corpus}/*.txt"], "weight": 3, "loss_weight": 0.5},
            {"name": "land", "paths": [f"{tmp_path}/land/*.txt"], "weight": 1},
        ]
        changes = {"data.sources": sources}
    folder = trained(tmp_path, kind, **changes)
    run = api.Run(folder)
    rows = {row["step"]: row for row in run.metrics().rows}
    config, journal = run.config, read_journal(folder)
    datasets = open_datasets(config, "train")
    loaders = [open_loader(config, datasets, journal=journal, dp_rank=rank, dp_size=2) for rank in (0, 1)]
    checked = set()
    for batch in run.batches():
        row = rows[batch.step]
        assert batch.order_hash == row["order_hash"]
        if batch.skipped:
            assert row["passed_over"] and "data_hash" not in row
            assert batch.ids.shape == (0, 32)
            continue
        assert batch.data_hash == row["data_hash"]
        again = run.batch(batch.step)
        assert again.ids.equal(batch.ids) and again.documents == batch.documents
        _is_what_ranks_read(batch, loaders)
        before = batch.step - 1
        if before in (each.step for each in run.checkpoints()):
            model = api.load_model(folder, before)
            assert _loss(model, batch, config.model.document_attention) == pytest.approx(row["loss"], rel=2e-5)
            checked.add(before)
    assert 4 in checked


def _is_what_ranks_read(batch: api.RunBatch, loaders: list) -> None:  # type: ignore[type-arg]
    """The rows of a batch are those that two ranks read in their micro-batches."""
    place = {sample: row for row, sample in enumerate(batch.samples.tolist())}
    seen = set()
    for loader in loaders:
        data = loader.batches(batch.step - 1)
        assert (data.valid_targets, data.order_hash) == (batch.valid_targets, int(batch.order_hash, 16))
        for micro in data.micro_batches:
            assert micro.encoder == batch.encoder
            for row, sample in enumerate(micro.samples.tolist()):
                if sample == -1:
                    continue
                mine = place[sample]
                seen.add(sample)
                assert micro.tokens[row].equal(batch.ids[mine])
                assert micro.targets[row].equal(batch.targets[mine])
                assert micro.weight[row].equal(batch.weight[mine])
                weight = micro.weight if micro.loss_weight is None else micro.loss_weight
                assert weight[row].equal(batch.loss_weight[mine])
                assert micro.bounds[row].equal(batch.bounds[mine])
                assert loader.names[micro.sources[row]] == batch.sources[mine]
                if micro.ahead_targets is not None and micro.ahead_weight is not None:
                    assert batch.ahead_targets is not None and batch.ahead_weight is not None
                    assert micro.ahead_targets[row].equal(batch.ahead_targets[mine])
                    assert micro.ahead_weight[row].equal(batch.ahead_weight[mine])
    assert seen == place.keys()


def _loss(model: api.Model, batch: api.RunBatch, documents: bool) -> float:
    """Mean cross entropy of the targets that count."""
    bounds = batch.bounds if documents else None
    ids, encoder = batch.ids, batch.encoder
    with torch.no_grad():
        logits = model(ids[:, :encoder], ids[:, encoder:], bounds=bounds) if encoder else model(ids, bounds=bounds)
    targets, weight = batch.targets[:, encoder:], batch.weight[:, encoder:]
    assert not batch.weight[:, :encoder].any()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    assert int(weight.count_nonzero()) == batch.valid_targets
    return float((losses * weight.flatten()).sum() / weight.sum())
