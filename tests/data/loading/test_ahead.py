"""Targets of multi-token prediction, against the raw text; all else in a batch is what it is without them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.data.loading.ahead import ahead_weight, valid_ahead
from pipeline.data.loading.loader import Loader
from pipeline.data.loading.objectives.causal import Causal
from pipeline.data.order.packs import instances_of
from pipeline.data.order.phases import plan_journal
from tests.data.loading.test_loader import DATASETS, PHASES, SKIPS, WEIGHTS, run_file
from tests.data.preprocess.memory import MemoryDataset

BASE = ("tokens", "targets", "weight", "starts", "sources", "samples")
SHORT = {"one": MemoryDataset([9]), "three": MemoryDataset([3, 4, 3])}


def make(ahead, datasets=DATASETS, weights=WEIGHTS, *, mask=False, micro=None, ranks=1, rank=0, vocab=None, **keys):
    journal = plan_journal(run_file(weights, **keys), datasets)
    return Loader(
        journal,
        instances_of(journal, datasets),
        Causal(mask_document_start=mask),
        dp_rank=rank,
        dp_size=ranks,
        micro_batch_size=[micro or segment.batch_size for segment in journal.segments],
        vocab_size=vocab,
        ahead=ahead,
    )


def expected(loader, step, depth):
    """Targets and weights [N, L] of each sample, token by token; which sees whether a text began again."""
    number = loader.journal.segment_number(step)
    length = loader.journal.segments[number].sequence_length
    plain = make_like(loader).batches(step).micro_batches[0].weight.tolist()
    found = []
    for entry, weight in zip(loader.describe(step), plain, strict=True):
        windows = loader._instances[number][entry["source"]]
        text = windows._dataset
        ids = np.empty(text.tokens, text.dtype)
        text.fill(0, ids)
        tokens, owners = ids.tolist(), [text.document_at(t) for t in range(text.tokens)]
        place = int(windows.places(np.array([entry["lap"]]), np.array([entry["position"]]))[0])

        def document(token, owners=owners):
            return token // len(owners), owners[token % len(owners)]

        targets = [[tokens[(place + t + d + 1) % len(tokens)] for t in range(length)] for d in range(1, depth + 1)]
        # The next token is in the same document wherever a later one is, so that skips hold for both.
        weights = [
            [weight[t] * (document(place + t) == document(place + t + d + 1)) for t in range(length)]
            for d in range(1, depth + 1)
        ]
        found.append((targets, weights, place + length + depth >= len(tokens)))
    return found


def make_like(loader):
    """The same order without masked document starts and targets ahead."""
    micro = [segment.batch_size for segment in loader.journal.segments]
    return Loader(loader.journal, loader._instances, Causal(), micro_batch_size=micro)


@settings(deadline=None, max_examples=30)
@given(
    depth=st.integers(1, 4),
    step=st.one_of(st.integers(0, 40), st.integers(0, 200)),
    batch_size=st.integers(1, 9),
    length=st.integers(1, 12),
    ranks=st.integers(1, 3),
    micro=st.integers(1, 4),
    mask=st.booleans(),
    skip=st.lists(st.sampled_from(SKIPS), unique_by=str, max_size=3),
    blend=st.sampled_from([{}, PHASES]),
)
def test_targets_are_those_of_the_text_and_all_else_stays(
    depth, step, batch_size, length, ranks, micro, mask, skip, blend
):
    length = 8 if blend else length  # of which the phases are
    keys = {"batch_size": batch_size, "sequence_length": length, "mask": mask, "blend": {**blend, "skip": skip}}
    whole_run = make(depth, **keys)
    plain, whole = make(0, **keys).batches(step), whole_run.batches(step)
    for name in ("order_hash", "data_hash", "valid_targets", "tokens_by_source"):
        assert getattr(plain, name) == getattr(whole, name)
    assert plain.valid_ahead == ()
    assert plain.micro_batches[0].ahead_targets is None
    for name in BASE:
        assert torch.equal(getattr(plain.micro_batches[0], name), getattr(whole.micro_batches[0], name))
    wanted = expected(whole_run, step, depth)
    (batch,) = whole.micro_batches
    assert batch.ahead_targets.tolist() == [targets for targets, _, _ in wanted]
    assert batch.ahead_weight.tolist() == [weights for _, weights, _ in wanted]
    assert whole.valid_ahead == tuple(batch.ahead_weight.sum(dim=(0, 2)).int().tolist())

    parts = [make(depth, ranks=ranks, rank=rank, micro=micro, **keys).batches(step) for rank in range(ranks)]
    joined = [
        (batch.ahead_targets[row].tolist(), batch.ahead_weight[row].tolist())
        for group in zip(*(part.micro_batches for part in parts), strict=True)
        for batch in group
        for row in range(micro)
    ]
    size = len(batch.sources)
    assert joined[:size] == [(targets, weights) for targets, weights, _ in wanted]
    assert not any(any(row) for _, weights in joined[size:] for row in weights), "padding"
    assert all(part.valid_ahead == whole.valid_ahead for part in parts)


@pytest.mark.parametrize("length", [1, 4, 7, 9])
def test_a_text_begins_again_behind_its_end(length):
    """Texts that are hardly longer than a window, or shorter than what is read of it."""
    keys = {"weights": {"one": 1, "three": 1}, "sequence_length": length}
    loader, around = make(4, SHORT, **keys), 0
    for step in range(12):
        (batch,), wanted = loader.batches(step).micro_batches, expected(loader, step, 4)
        assert batch.ahead_targets.tolist() == [targets for targets, _, _ in wanted]
        assert batch.ahead_weight.tolist() == [weights for _, weights, _ in wanted]
        around += sum(again for _, _, again in wanted)
    assert around > 0


def test_steps_are_the_same_in_any_order():
    keys = {"batch_size": 5, "blend": {**PHASES, "skip": [{"steps": "4-5"}, {"samples": "70-71"}]}}
    straight = list(make(2, **keys).iterate(0, 40))
    resumed = list(make(2, **keys).iterate(17, 40))
    for one, other in zip(straight[17:], resumed, strict=True):
        assert (one.step, one.valid_ahead, one.data_hash) == (other.step, other.valid_ahead, other.data_hash)
        for mine, theirs in zip(one.micro_batches, other.micro_batches, strict=True):
            for name in (*BASE, "ahead_targets", "ahead_weight"):
                assert torch.equal(getattr(mine, name), getattr(theirs, name))
    assert straight[3].skipped
    assert straight[3].valid_ahead == ()


@settings(deadline=None)
@given(
    begins=st.lists(st.sets(st.integers(1, 20)).map(lambda some: sorted({0, *some})), min_size=1, max_size=4),
    length=st.integers(1, 16),
    depth=st.integers(1, 4),
)
def test_targets_are_counted_without_making_weights(begins, length, depth):
    rows = [np.array([begin for begin in row if begin < length + 1 + depth]) for row in begins]
    splits = np.cumsum([3, *map(len, rows)])  # as of rows that are not the first
    counts = valid_ahead(np.concatenate([np.zeros(3, np.int64), *rows]), splits, length, depth)
    assert counts.tolist() == sum(ahead_weight(row, length, depth).sum(axis=1) for row in rows).tolist()


def test_a_token_ahead_that_the_model_does_not_know_is_told():
    datasets = {"one": MemoryDataset([30])}
    datasets["one"].ids[9] = 77
    keys = {"weights": {"one": 1}, "sequence_length": 8, "batch_size": 1, "vocab": 50}
    position = next(step for step in range(3) if make(0, datasets, **keys).describe(step)[0]["spans"][0]["start"] == 0)
    make(0, datasets, **keys).batches(position)
    with pytest.raises(UserError, match="document 0 of memory has token id 77"):
        make(2, datasets, **keys).batches(position)


def test_other_objectives_are_refused_by_name():
    values = run_file(WEIGHTS).model_dump(mode="json", exclude_unset=True)
    values["model"]["mtp"] = {"depth": 1}
    assert Config.model_validate(values).train.loss.mtp_weight == 0.3
    values["train"]["objective"] = {"type": "fim"}
    with pytest.raises(ValueError, match=r"model\.mtp does not go with train\.objective\.type: fim"):
        Config.model_validate(values)
    del values["model"]["mtp"], values["train"]["objective"]
    values["train"]["loss"] = {"mtp": 0.1}
    with pytest.raises(ValueError, match=r"train\.loss\.mtp .* set model\.mtp\.depth"):
        Config.model_validate(values)
