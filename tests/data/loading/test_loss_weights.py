"""Loss weights of batches against a plain loop over the documents of each window."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.loading.loader import Loader
from pipeline.data.loading.objectives.causal import Causal
from pipeline.data.loading.objectives.masked import Masked
from pipeline.data.loading.skip_masks import arranged_window
from pipeline.data.order.packs import instances_of
from pipeline.data.order.phases import plan_journal
from tests.data.loading.test_arranged import OBJECTIVES
from tests.data.loading.test_loader import SKIPS, WEIGHTS, run_file
from tests.data.preprocess.memory import MemoryDataset


class Weighted(MemoryDataset):
    """Documents of some lengths with a weight each."""

    def __init__(self, lengths, seed, dtype=np.int64):
        super().__init__(lengths, dtype)
        self.weights = np.random.default_rng(seed).choice([0.1, 0.5, 1.0, 3.0], len(lengths)).astype(np.float32)

    def fill_weights(self, part, start, out):
        assert part == 0
        out[:] = [self.weights[self.owner[token]] for token in range(start, start + len(out))]


DATASETS = {
    "books": Weighted([40, 3, 1, 25, 60, 2, 9], 1),
    "code": Weighted([5] * 30, 2, np.uint16),
    "web": Weighted([1, 2, 3, 30, 4, 100], 3, np.int32),
}
OF_SOURCES = {"books": 0.3, "code": 1.0, "web": 2.5}
PHASES = [{"until": "7 steps"}, {"batch_size": 9, "slices": {"books": [0.5, 1]}, "loss_weights": {"web": 0.7}}]


def make(objective, ranks=1, micro=None, ahead=0, documents=("books", "web"), blend=None, **keys):
    config = run_file(WEIGHTS, blend={"phases": PHASES, **(blend or {})}, **keys)
    for source in config.data.sources:
        object.__setattr__(source, "loss_weight", OF_SOURCES[source.name])
        object.__setattr__(source, "weight_key", "quality" if source.name in documents else None)
    journal = plan_journal(config, DATASETS)
    return [
        Loader(
            journal,
            instances_of(journal, DATASETS),
            objective,
            dp_rank=rank,
            dp_size=ranks,
            micro_batch_size=[micro or segment.batch_size for segment in journal.segments],
            ahead=ahead,
        )
        for rank in range(ranks)
    ]


def of_token(loader, sample, documents):
    """The weight of each token of a window, by its documents."""
    number = loader.journal.segment_number(loader.journal.step_of(sample["sample"]))
    factor = np.float32(loader.journal.segments[number].sources[sample["source"]].loss_weight)
    weights = DATASETS[sample["source"]].weights if sample["source"] in documents else None
    windows = loader._instances[number][sample["source"]]
    spans = windows.at(sample["lap"], sample["position"], loader._ahead)
    return [
        factor if weights is None else np.float32(factor * weights[span.document])
        for span in spans
        for _ in range(span.length)
    ]


def check_rows(loader, step, data, documents):
    """Compare the weights of all windows of a step of one rank; their sums."""
    total, ahead = [], [[] for _ in range(loader._ahead)]
    (batch,) = data.micro_batches
    number = loader.journal.segment_number(step)
    for row, sample in enumerate(loader.describe(step)):
        tokens = of_token(loader, sample, documents)
        objective = loader._objectives[number][sample["source"]]
        place = sample["lap"], sample["position"], loader.journal.seed, sample["sample"]
        raw = range(1, batch.weight.shape[1] + 1)
        if objective.arranges:
            raw = arranged_window(objective, loader._instances[number][sample["source"]], *place).raw
        counts = batch.weight[row].tolist()
        expected = [counts[at] * tokens[token] if counts[at] else 0.0 for at, token in enumerate(raw)]
        assert batch.loss_weight[row].tolist() == pytest.approx(expected, rel=1e-7)
        total += batch.loss_weight[row].tolist()
        for depth in range(loader._ahead):
            counts = batch.ahead_weight[row, depth].tolist()
            expected = [count * tokens[at + 2 + depth] for at, count in enumerate(counts)]
            assert batch.ahead_loss_weight[row, depth].tolist() == pytest.approx(expected, rel=1e-7)
            ahead[depth] += expected
    assert data.total_weight == pytest.approx(math.fsum(total), rel=1e-12)
    assert data.total_ahead == pytest.approx([math.fsum(each) for each in ahead], rel=1e-12)


NAMES = ("plain", "start", "ahead", "sources", *OBJECTIVES)
CHOSEN = {"plain": Causal(), "start": Causal(mask_document_start=True), "ahead": Causal(), "sources": Causal()}


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=5)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 30), st.lists(st.sampled_from(SKIPS), unique_by=str))
def test_weights_are_those_of_the_documents_in_any_layout(name, ranks, micro, step, skip):
    objective = {**CHOSEN, **OBJECTIVES}[name]
    documents = () if name == "sources" else ("books", "web")
    keys = {
        "blend": {"skip": skip},
        "sequence_length": 20,
        "ahead": 2 if name == "ahead" else 0,
        "documents": documents,
    }
    (whole,) = make(objective, **keys)
    data = whole.batches(step)
    check_rows(whole, step, data, documents)
    rows = {}
    for loader in make(objective, ranks, micro, **keys):
        part = loader.batches(step)
        assert (part.total_weight, part.total_ahead) == (data.total_weight, data.total_ahead)
        for batch in part.micro_batches:
            for row, sample in enumerate(batch.samples.tolist()):
                assert sample >= 0 or not batch.loss_weight[row].any()
                rows[sample] = batch.loss_weight[row]
    (batch,) = data.micro_batches
    for row, sample in enumerate(batch.samples.tolist()):
        assert torch.equal(rows[sample], batch.loss_weight[row])


def test_without_weights_a_batch_has_none():
    journal = plan_journal(run_file(WEIGHTS, sequence_length=20), DATASETS)
    loader = Loader(journal, instances_of(journal, DATASETS), Masked(0.3, 5000, np.arange(9)), micro_batch_size=[4])
    data = loader.batches(0)
    assert data.total_weight is None and data.micro_batches[0].loss_weight is None
