"""Steps of packs of which some targets are trained on alone, compared with a plain loop over their documents."""

import numpy as np
import pytest
import torch

from pipeline.common.errors import UserError
from pipeline.data.loading.heldout import HeldOut
from pipeline.data.loading.loader import Loader
from pipeline.data.loading.objectives.causal import Causal
from pipeline.data.loading.objectives.fim import FillInTheMiddle
from pipeline.data.order.packs import instances_of
from pipeline.data.order.phases import plan_journal
from tests.data.loading.test_packs import run_file
from tests.data.preprocess.memory import EOD, MemoryDataset

L = 16


def dataset(seed, masked=True):
    chance = np.random.default_rng(seed)
    made = MemoryDataset(chance.integers(1, L + 1, 60).tolist())
    made.manifest.has_mask = False
    if not masked:
        return made
    mask = (chance.random(made.tokens) < 0.4).astype(np.uint8)
    mask[made._starts[:-1]] = 0
    return made.with_mask(mask)


DATA = {"a": dataset(1), "b": dataset(2, masked=False)}
WEIGHTS = {name: np.random.default_rng(5).choice([0.5, 2.0], 60) for name in DATA}


def weighted(source):
    """The dataset of a source, with loss weights of its documents."""
    made, of = DATA[source], WEIGHTS[source]

    def fill(part, start, out):
        out[:] = of[np.array(made.owner)[start : start + len(out)]]

    made.fill_weights = fill
    return made


def loaders(config, ranks=1, micro=8, objectives=None, ahead=0):
    datasets = {name: weighted(name) for name in (source.name for source in config.data.sources)}
    journal = plan_journal(config, datasets)
    objectives = [objectives or {name: Causal() for name in datasets} for _ in journal.segments]
    instances = instances_of(journal, datasets)
    return [
        Loader(
            journal,
            instances,
            objectives,
            dp_rank=rank,
            dp_size=ranks,
            micro_batch_size=[micro] * len(journal.segments),
            end_of_document=EOD,
            balanced=True,
            ahead=ahead,
        )
        for rank in range(ranks)
    ]


def expected(sample, skipped, depth=0):
    """Weights of the targets of a pack, `depth` places further in the same document: masks, and with factors."""
    name, counts, weights = sample["source"], [], []
    for span in sample["spans"]:
        document, length = span["document"], span["length"]
        assert span["start"] == 0 and length == DATA[name].lengths[document]
        first = DATA[name].document_start(document)
        mask = DATA[name].mask[first : first + length] if DATA[name].manifest.has_mask else [1] * length
        if depth and DATA[name].manifest.has_mask:
            mask = [*mask[:depth], 0, *mask[depth + 1 :]]  # from what is before the document
        trained = [
            0.0 if (name, document) in skipped else float(each) for each in [*mask[depth:], *[0] * depth][:length]
        ]
        counts += trained
        weights += [FACTORS[name] * WEIGHTS[name][document] * each for each in trained]
    rest = [0.0] * (L - len(counts))
    return counts + rest, weights + rest


def begins(sample):
    """Places at which documents begin, or padding: what precedes a masked document is one of its own."""
    found, place = set(), 0
    for span in sample["spans"]:
        if span["length"]:
            found |= {place, place + 1} if DATA[sample["source"]].manifest.has_mask else {place}
        place += span["length"]
        found.add(place)
    return sorted(each for each in found if each < L)


FACTORS = {"a": 0.25, "b": 3.0}
SKIP = [{"source": "a", "documents": ["3-7"]}, {"source": "b", "documents": ["0-4"]}]
SKIPPED = {("a", d) for d in range(3, 8)} | {("b", d) for d in range(5)}


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("skip, ranks, micro", [((), 1, 6), (SKIP, 2, 2)])
def test_weights_and_counts(ahead, weighs, skip, ranks, micro):
    config = run_file(skip=skip)
    for source in config.data.sources if weighs else ():
        object.__setattr__(source, "loss_weight", FACTORS[source.name])
        object.__setattr__(source, "weight_key", "quality")
    several = loaders(config, ranks, micro, ahead=ahead)
    assert several[0].journal.segments[0].sources["a"].target_mask
    skipped = SKIPPED if skip else set()
    for step in range(6):
        parts = [loader.batches(step) for loader in several]
        samples = {each["sample"]: each for each in several[0].describe(step)}
        totals = np.zeros((1 + ahead, 2))
        for batch in (batch for part in parts for batch in part.micro_batches):
            for row in range(batch.real):
                sample = samples.pop(int(batch.samples[row]))
                assert [s % L for s in batch.starts.tolist() if s // L == row] == begins(sample)
                for depth in range(1 + ahead):
                    counts, weights = expected(sample, skipped, depth)
                    of_counts = batch.weight[row] if depth == 0 else batch.ahead_weight[row, depth - 1]
                    assert of_counts.tolist() == counts
                    if weighs:
                        of_loss = batch.loss_weight if depth == 0 else batch.ahead_loss_weight[:, depth - 1]
                        assert of_loss[row].tolist() == weights
                    totals[depth] += sum(counts), sum(weights)
        assert not samples
        for data in parts:
            assert (data.valid_targets, data.valid_ahead) == (totals[0, 0], tuple(totals[1:, 0]))
            if weighs:
                assert data.total_weight == pytest.approx(totals[0, 1])
                assert data.total_ahead == pytest.approx(totals[1:, 1])


def test_only_masks_of_own_packs_are_read():
    """The sums of the global batch follow from the counts of documents."""
    config = run_file(sources={"a": {}})
    (whole,) = loaders(config)
    wanted = [whole.batches(step).valid_targets for step in range(4)]
    _, second = loaders(config, ranks=2, micro=3)
    read = []
    made = second._packs._masks._instances[0]["a"]._dataset
    fill = made.fill_mask
    made.fill_mask = lambda part, start, out: (read.append(len(out)), fill(part, start, out))
    try:
        data = [second.batches(step) for step in range(4)]
    finally:
        del made.fill_mask
    assert [each.valid_targets for each in data] == wanted
    own = {int(sample) for each in data for batch in each.micro_batches for sample in batch.samples}
    samples = [sample for step in range(4) for sample in second.describe(step) if sample["sample"] in own]
    assert sum(read) == sum(span["length"] for sample in samples for span in sample["spans"])


def test_a_step_without_a_trained_target():
    nothing = MemoryDataset([8] * 24).with_mask(np.zeros(192))
    config = run_file(sources={"a": {}})
    journal = plan_journal(config, {"a": nothing})
    loader = Loader(journal, instances_of(journal, {"a": nothing}), Causal(), micro_batch_size=[6], end_of_document=EOD)
    data = loader.batches(0)
    assert data.valid_targets == 0 and not any(batch.weight.any() for batch in data.micro_batches)


def test_beside_a_source_of_another_objective():
    """Fill-in-the-middle arranges its packs; those of conversations are predicted as they are."""
    sentinels = (90_001, 90_002, 90_003)
    objectives = {"a": Causal(), "b": FillInTheMiddle(1.0, 0.5, sentinels, EOD)}
    (loader,) = loaders(run_file(), objectives=objectives)
    (plain,) = loaders(run_file())
    for step in range(3):
        ((one,), (two,)) = (each.batches(step).micro_batches for each in (loader, plain))
        mine = one.sources == 0
        assert torch.equal(one.weight[mine], two.weight[mine]) and torch.equal(one.targets[mine], two.targets[mine])
        assert loader.batches(step).valid_targets == int((one.weight > 0).sum())


def test_the_journal_knows_masks():
    config = run_file(sources={"a": {}})
    saved = plan_journal(config, {"a": DATA["a"]})
    assert saved.to_json()["segments"][0]["sources"]["a"]["target_mask"]
    plain = MemoryDataset(DATA["a"].lengths)
    now = plan_journal(config, {"a": plain})
    assert "target_mask" not in now.to_json()["segments"][0]["sources"]["a"]
    with pytest.raises(UserError, match="targets of 'a': trained parts alone -> all tokens"):
        now.going_on(saved, 2)


def test_held_out_conversations_are_read_one_by_one():
    """Each from its own beginning; what is longer than a window is scored in several."""
    lengths = [3, 0, 20, 1, 16]
    mask = (np.random.default_rng(4).random(sum(lengths)) < 0.5).astype(np.uint8)
    mask[[0, 3, 23, 24]] = 0
    split = HeldOut(MemoryDataset(lengths).with_mask(mask), L)
    assert len(split) == 5
    batch = split.batch(range(5))
    ids = split.dataset.ids.tolist()
    expected = [(0, 3), (3, 19), (19, 23), (23, 24), (24, 40)]
    for row, (first, end) in enumerate(expected):
        assert batch.targets[row, : end - first].tolist() == ids[first:end]
        assert batch.weight[row].tolist() == [*mask[first:end].tolist(), *[0.0] * (L - (end - first))]
    assert batch.tokens[:, 0].tolist() == [EOD, EOD, ids[18], EOD, EOD]
    bounds = batch.bounds.tolist()
    assert [row[1] for row in bounds] == [1, 1, 0, 1, 1] and [row[3] for row in bounds] == [1, 1, 0, 1, 1]
    assert batch.weight.sum() == split.dataset.trained_targets(np.arange(5)).sum()
