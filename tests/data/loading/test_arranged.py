"""Batches of objectives that arrange windows: the same for any layout, counted exactly, without what is skipped."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.objective import DenoiserConfig, ObjectiveConfig
from pipeline.data.loading.heldout import HeldOut
from pipeline.data.loading.loader import Loader
from pipeline.data.loading.objectives.causal import Causal
from pipeline.data.loading.objectives.fim import FillInTheMiddle
from pipeline.data.loading.objectives.masked import Masked
from pipeline.data.loading.objectives.prefix import Prefix
from pipeline.data.loading.objectives.spans import SpanCorruption, Tokens
from pipeline.data.loading.objectives.ul2 import MixtureOfDenoisers
from pipeline.data.loading.objectives.words import WordTable
from pipeline.data.order.packs import instances_of
from pipeline.data.order.phases import plan_journal
from tests.data.loading.test_loader import DATASETS, SKIPS, WEIGHTS, run_file
from tests.data.preprocess.memory import MemoryDataset

TOKENS = Tokens(np.arange(5000, 5100), 5200, 0)
WORDS = WordTable(np.arange(1000) % 3 > 0, np.ones(1000, np.bool_))
MIXTURE = ObjectiveConfig(
    type="ul2", denoisers=[DenoiserConfig(rate=0.2), DenoiserConfig(rate=0.3, mean_span=None, weight=2)]
)
OBJECTIVES = {
    "fim": FillInTheMiddle(0.5, 0.5, (5000, 5001, 5002), 0, mask_document_start=True),
    "masked": Masked(0.3, 5000, np.arange(4000, 4100)),
    "words": Masked(0.3, 5000, np.arange(4000, 4100), words=WORDS),
    "prefix": Prefix(),
    "spans": SpanCorruption(0.2, 2.0, TOKENS),
    "ul2": MixtureOfDenoisers(MIXTURE, TOKENS, [None, None]),
}
LENGTH = 20
PHASES = {"phases": [{"until": "7 steps"}, {"batch_size": 9, "slices": {"books": [0.5, 1]}}]}


def make_ranks(objective, ranks, micro=None, **keys):
    journal = plan_journal(run_file(WEIGHTS, sequence_length=LENGTH, **keys), DATASETS)
    return [
        Loader(
            journal,
            instances_of(journal, DATASETS),
            objective,
            dp_rank=rank,
            dp_size=ranks,
            micro_batch_size=[micro or segment.batch_size for segment in journal.segments],
        )
        for rank in range(ranks)
    ]


def rows(data):
    """Each sample with all that is by row, by its number; padding left out."""
    found = {}
    for batch in data.micro_batches:
        length = batch.tokens.shape[1]
        names = [f.name for f in fields(batch) if f.name not in ("starts", "samples", "extras", "bounds")]
        parts = {name: getattr(batch, name) for name in names}
        for row, sample in enumerate(batch.samples.tolist()):
            begins = [s - row * length for s in batch.starts.tolist() if row * length <= s < (row + 1) * length]
            assert begins[0] == 0 and batch.encoder in begins
            if sample < 0:
                assert not batch.weight[row].any() and begins == sorted({0, batch.encoder})
                continue
            own = {name: part[row].tolist() for name, part in parts.items() if isinstance(part, torch.Tensor)}
            found[sample] = (begins, batch.encoder, own)
    return found


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(deadline=None, max_examples=8)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 60), st.lists(st.sampled_from(SKIPS), unique_by=str))
def test_any_layout_and_any_step_alone(name, ranks, micro, step, skip):
    blend = {**PHASES, "skip": skip}
    (whole,) = make_ranks(OBJECTIVES[name], 1, blend=blend)
    expected = whole.batches(step)
    samples = rows(expected)
    parts = [loader.batches(step) for loader in make_ranks(OBJECTIVES[name], ranks, micro, blend=blend)]
    assert {sample: row for part in parts for sample, row in rows(part).items()} == samples
    assert {part.valid_targets for part in parts} == {expected.valid_targets}
    assert expected.valid_targets == sum(np.count_nonzero(row["weight"]) for _, _, row in samples.values())
    assert sum(part.data_hash for part in parts) % 2**64 == expected.data_hash
    # Order and tokens are those of any objective.
    plain = make_ranks(Causal(), 1, blend=blend)[0].batches(step)
    assert (plain.data_hash, plain.order_hash, plain.tokens_by_source) == (
        *(expected.data_hash, expected.order_hash),
        expected.tokens_by_source,
    )


@pytest.mark.parametrize("name", ["masked", "words", "prefix", "spans", "ul2"])
def test_what_is_skipped_is_never_a_target(name):
    skip = [{"source": "web", "documents": ["0-2", 5]}, {"source": "books"}, {"samples": "100-120"}]
    objective = OBJECTIVES[name]
    (loader,), (plain,) = (make_ranks(objective, 1, blend={"skip": each}) for each in (skip, []))
    lost = kept = 0
    for step in range(20, 33):
        skipped, everything = loader.batches(step), rows(plain.batches(step))
        described = {entry["sample"]: entry for entry in loader.describe(step)}
        for sample, (begins, encoder, row) in rows(skipped).items():
            before = everything[sample]
            assert (begins, encoder) == before[:2] and row["tokens"] == before[2]["tokens"]
            entry = described[sample]
            allowed = {}
            for span in entry["spans"]:
                document = span["document"]
                bad = (
                    entry["source"] == "books"
                    or 100 <= sample <= 120
                    or (entry["source"] == "web" and document in (0, 1, 2, 5))
                )
                first = DATASETS[entry["source"]].document_start(document) + span["start"]
                # A token of MemoryDataset is its place plus one, but for ends of documents.
                allowed |= dict.fromkeys(range(first + 1, first + 1 + span["length"]), not bad)
            for target, weight, old in zip(row["targets"], row["weight"], before[2]["weight"], strict=True):
                assert weight in (0, old)
                if 0 < target < 1000 and old:
                    assert bool(weight) == allowed[target]
                    lost, kept = lost + (not weight), kept + bool(weight)
            if all(not good for good in allowed.values()):
                assert not any(row["weight"])
    assert lost > 10 and kept > 10


def test_sources_may_have_their_own():
    journal = plan_journal(run_file(WEIGHTS, sequence_length=LENGTH), DATASETS)
    mixed = [{"books": Prefix(), "code": Causal(), "web": OBJECTIVES["fim"]}]
    loader = Loader(journal, instances_of(journal, DATASETS), mixed, micro_batch_size=[4])
    alone = {name: make_ranks(objective, 1)[0] for name, objective in mixed[0].items()}
    for step in range(12):
        data = loader.batches(step)
        (batch,) = data.micro_batches
        assert data.valid_targets == np.count_nonzero(batch.weight)
        for sample, (begins, _, row) in rows(data).items():
            name = loader.names[row["sources"]]
            _, _, other = rows(alone[name].batches(step))[sample]
            bounds = batch.bounds[batch.samples.tolist().index(sample)].tolist()
            assert row["weight"] == other["weight"] and row["tokens"] == other["tokens"]
            # Without prefixes those of other rows are empty.
            assert row.get("prefix", other.get("prefix", bounds)) == other.get("prefix", bounds), begins


@pytest.mark.parametrize("name", ["masked", "prefix", "spans", "ul2"])
def test_held_out_windows(name):
    """The same whatever is asked for with them; the last one is shorter, and what pads it has no weight."""
    objective = OBJECTIVES[name]
    dataset = MemoryDataset([30, 5, 12, 40, 3, 21])  # 111 tokens: five windows of 20, and 11 tokens
    split = HeldOut(dataset, LENGTH, objective=objective)
    assert len(split) == 6 and split.length_of([0, 5], 64) == objective.shape(LENGTH).length
    assert split.targets([5]).tolist() == [[100, 100, 111]]
    batch = split.batch(range(6))
    for window in range(6):
        alone, places = split.batch([window]), batch.starts.tolist()
        length = batch.tokens.shape[1]
        for part in ("tokens", "targets", "weight", "predicted", "prefix"):
            one, all_ = getattr(alone, part), getattr(batch, part)
            assert (one is None) == (all_ is None)
            assert one is None or torch.equal(one[0], all_[window])
        own = [place - window * length for place in places if window * length <= place < (window + 1) * length]
        assert alone.starts.tolist() == own
        real = alone.targets[0][alone.weight[0] > 0].tolist()
        text = dataset.read(window * LENGTH, min(LENGTH, 111 - window * LENGTH)).tolist()
        assert real and {token for token in real if token < 1000} <= {*text, 0}
    short = objective.shape(LENGTH)
    padded = batch.weight[5]
    begins = [place - 5 * short.length for place in batch.starts.tolist() if place >= 5 * short.length]
    if short.encoder:
        assert sum(begin < short.encoder for begin in begins) * 2 == len(begins)
    assert not padded[max(begins) :].any() and max(begins) < short.length
    if batch.predicted is not None:
        assert (torch.diff(batch.predicted) > 0).all()
        assert set(padded.nonzero().flatten().tolist()) <= set(batch.predicted[5].tolist())
    assert HeldOut(MemoryDataset([30, 12]), LENGTH, objective=OBJECTIVES["spans"]).batch([1]).weight.any()
    assert len(HeldOut(MemoryDataset([30, 12]), 40, objective=OBJECTIVES["spans"])) == 1  # two tokens are too few
