"""Runs of whole epochs: each document once and whole in each, however the last step is cut."""

import json
from collections import Counter

import numpy as np
import pytest

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.data.loading.loader import Loader
from pipeline.data.loading.objectives.causal import Causal
from pipeline.data.order.consumption import accounts
from pipeline.data.order.journal import Journal
from pipeline.data.order.packs import instances_of
from pipeline.data.order.phases import plan_journal
from pipeline.data.order.run_length import run_length
from pipeline.data.order.sampler import Sampler
from pipeline.train.optim.lr_schedule import Schedule
from tests.data.preprocess.memory import EOD, MemoryDataset

L = 16


def run_file(epochs, batch_size, phases=(), names=("a",), **data):
    return Config.model_validate(
        {
            "run": {"dir": "runs/none", "seed": 3},
            "data": {
                "sources": [{"name": name, "paths": ["none"]} for name in names],
                "loader": {"packing": "best_fit"},
                **data,
            },
            "blend": {"phases": list(phases)},
            "tokenizer": {"path": "none"},
            "model": {"layers": 1, "dim": 8, "heads": 1},
            "train": {"duration": f"{epochs} epochs", "batch_size": batch_size, "sequence_length": L},
        }
    )


def conversations(seed, count=40):
    """Lengths of documents of which none is cut."""
    return MemoryDataset(np.random.default_rng(seed).integers(2, L + 1, count).tolist())


def loaders(journal, dataset, ranks, micro, balanced=True):
    instances = instances_of(journal, {"a": dataset})
    sizes = [micro] * len(journal.segments)
    more = {"end_of_document": EOD, "balanced": balanced}
    return [
        Loader(journal, instances, Causal(), dp_rank=rank, dp_size=ranks, micro_batch_size=sizes, **more)
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    "seed, epochs, size, ranks, micro", [(0, 3, 8, 2, 3), (1, 2, 5, 3, 1), (2, 1, 64, 2, 4), (3, 4, 7, 1, 7)]
)
def test_each_document_once_and_whole_in_each_epoch(seed, epochs, size, ranks, micro):
    dataset, config = conversations(seed), run_file(epochs, size)
    journal = plan_journal(config, {"a": dataset})
    assert Journal.from_json(json.loads(json.dumps(journal.to_json()))) == journal
    packs = journal.segments[0].sources["a"].packs
    steps = run_length(config, Sampler(journal)).steps
    assert steps == -(-epochs * packs // size) and journal.end_sample == epochs * packs
    several = loaders(journal, dataset, ranks, micro, balanced=seed != 1)
    whole = Counter(tuple(dataset.read(dataset.document_start(d), n).tolist()) for d, n in enumerate(dataset.lengths))
    found, hashes = Counter(), []
    for step in range(steps):
        parts = [loader.batches(step) for loader in several]
        assert len({(each.order_hash, each.valid_targets, len(each.micro_batches)) for each in parts}) == 1
        assert len(parts[0].micro_batches) == -(-size // (ranks * micro))  # in the last step as in each other
        samples = []
        for batch in (batch for part in parts for batch in part.micro_batches):
            assert batch.tokens.shape == (micro, L) and not batch.weight[batch.real :].any()
            samples += batch.samples[: batch.real].tolist()
            flat, weight = batch.targets.flatten().tolist(), batch.weight.flatten()
            ends = [*batch.starts.tolist()[1:], len(flat)]
            for first, end in zip(batch.starts.tolist(), ends, strict=True):
                if weight[first]:
                    found[tuple(flat[first:end])] += 1
        assert sorted(samples) == list(journal.samples(step))
        hashes.append(parts[0].order_hash)
        last = [step + 1] if step + 1 == steps else []
        for epoch in {*(n for n in range(1, epochs) if n * packs == (step + 1) * size), *([epochs] if last else [])}:
            assert found == Counter({text: count * epoch for text, count in whole.items()})
    loader = several[0]
    assert loader.epochs_by_source(steps) == {"a": float(epochs)}
    assert (
        accounts(Sampler(journal), steps)["a"].drawn == loader.tokens_by_source(steps)["a"] == epochs * dataset.tokens
    )
    assert journal.tokens(steps) == epochs * packs * L
    assert Sampler(journal).order_hashes(0, steps) == hashes
    sampler = Sampler(journal)
    where = sampler.find("a", 0, epochs - 1, np.arange(packs))
    assert sorted(where.tolist()) == list(range((epochs - 1) * packs, epochs * packs))
    assert (sampler.find("a", 0, epochs, np.arange(packs)) == -1).all()


def test_the_schedule_ends_with_the_last_epoch():
    config = run_file(3, 8)
    journal = plan_journal(config, {"a": conversations(0)})
    steps = run_length(config, Sampler(journal)).steps
    schedule = Schedule(config.train.schedule, config.train.duration, steps, journal.tokens)
    assert schedule.factor(journal.tokens(steps)) == config.train.schedule.min_ratio
    assert schedule.factor(journal.tokens(steps - 1)) > config.train.schedule.min_ratio


def test_more_epochs_until_the_last_step():
    data = {"a": conversations(0)}
    saved = plan_journal(run_file(2, 7), data)
    steps = saved.end_step
    assert saved.is_padded(steps)
    longer = plan_journal(run_file(3, 7), data, saved)
    assert longer.going_on(saved, steps - 1).end_step == longer.end_step > steps
    with pytest.raises(UserError, match="filled up with padding.*fork from a checkpoint before"):
        longer.going_on(saved, steps)
    with pytest.raises(UserError, match="fork from an earlier checkpoint"):
        plan_journal(run_file(3, 7), data, saved.forked(steps))
    fork = saved.forked(steps - 1)
    assert plan_journal(run_file(3, 7), data, fork).going_on(fork, steps - 1).end_step == longer.end_step


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"names": ("a", "b")}, "several sources"),
        ({"loader": {"packing": "windows"}}, "reads windows"),
        ({"phases": [{"until": "2 steps"}, {"sequence_length": 24}]}, "sequence lengths"),
    ],
)
def test_other_runs_than_of_one_source_of_packs_are_refused(changes, says):
    with pytest.raises(UserError, match=says):
        plan_journal(run_file(2, 4, **changes), {"a": conversations(0), "b": conversations(1)})


def test_no_epoch_is_no_run():
    with pytest.raises(UserError, match="0 epochs trains nothing"):
        plan_journal(run_file(0, 4), {"a": conversations(0)})


@pytest.mark.parametrize("key", ["schedule.warmup", "schedule.decay", "phases"])
def test_only_the_duration_has_epochs(key):
    with pytest.raises(ValueError, match="only train.duration has epochs"):
        if key == "phases":
            run_file(2, 4, phases=[{"until": "1 epoch"}, {}])
        else:
            values = run_file(2, 4).model_dump(mode="json")
            values["train"]["schedule"] |= {"type": "wsd", "decay": "2 steps", key.split(".")[1]: "1 epochs"}
            Config.model_validate(values)
