"""Steps of packs, compared with a plain loop over packs that are made by a reference."""

from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
import xxhash

from pipeline.config import Config
from pipeline.data.loading.loader import Loader
from pipeline.data.loading.objectives.causal import Causal
from pipeline.data.loading.objectives.fim import FillInTheMiddle
from pipeline.data.loading.objectives.masked import Masked
from pipeline.data.loading.objectives.prefix import Prefix
from pipeline.data.order.journal import Journal
from pipeline.data.order.packs import instances_of
from pipeline.data.order.phases import plan_journal
from pipeline.data.order.sampler import Sampler
from pipeline.data.order.windows import epoch_permutation
from tests.data.datasets.packing.made import reference, some_lengths
from tests.data.preprocess.memory import EOD, MemoryDataset

L = 16
DATASETS = {"a": MemoryDataset(some_lengths(L)), "b": MemoryDataset([5, 40, 1, 16, 17, 0, 33, 2] * 9)}
FIRST = EOD + 1
SENTINELS = (90_001, 90_002, 90_003)
OBJECTIVES = {
    "causal": Causal(),
    "start": Causal(mask_document_start=True),
    "fim": FillInTheMiddle(0.7, 0.5, SENTINELS, EOD, mask_document_start=True),
    "prefix": Prefix(),
    "prefix start": Prefix(mask_document_start=True),
    "masked": Masked(0.3, 90_004, np.arange(FIRST, 50)),
}


def run_file(phases=(), skip=(), sources=None, **train):
    sources = sources or {name: {"weight": weight} for name, weight in (("a", 2), ("b", 1))}
    return Config.model_validate(
        {
            "run": {"dir": "runs/none", "seed": 3},
            "data": {
                "sources": [{"name": name, "paths": ["none"], **keys} for name, keys in sources.items()],
                "loader": {"packing": "best_fit"},
            },
            "blend": {"phases": list(phases), "skip": list(skip)},
            "tokenizer": {"path": "none"},
            "model": {"layers": 1, "dim": 8, "heads": 1},
            "train": {"duration": "10 steps", "batch_size": 6, "sequence_length": L, **train},
        }
    )


def loaders(config, ranks=1, micro=None, objective=OBJECTIVES["causal"], balanced=True, journal=None, **keys):
    journal = journal or plan_journal(config, DATASETS)
    return [
        Loader(
            journal,
            instances_of(journal, DATASETS),
            objective,
            dp_rank=rank,
            dp_size=ranks,
            micro_batch_size=[micro or segment.batch_size for segment in journal.segments],
            end_of_document=EOD,
            balanced=balanced,
            **keys,
        )
        for rank in range(ranks)
    ]


@cache
def packs_of(name, length=L, documents=None):
    """Chunks of each pack: tokens, what precedes the first of them, and the document."""
    dataset = DATASETS[name]
    found = []
    for pack in reference(dataset.lengths, length, 10_000, *(documents or (0, None))):
        rows = []
        for document, first, count in pack:
            start = dataset.document_start(document) + first
            tokens = dataset.ids[start : start + count].tolist()
            rows.append((tokens, int(dataset.ids[start - 1]) if first else EOD, document, first))
        found.append(rows)
    return found


def expected_row(pack, length=L):
    """Inputs, targets, weights, starts, for causal prediction; one token after the other."""
    inputs, targets, starts = [], [], []
    for tokens, lead, _, _ in pack:
        starts.append(len(targets))
        inputs += [lead, *tokens[:-1]]
        targets += tokens
    weight = [1] * len(targets)
    if len(targets) < length:
        starts.append(len(targets))
    padding = [0] * (length - len(targets))
    return inputs + padding, targets + padding, weight + padding, starts


def samples_of(journal, step):
    draws = Sampler(journal).step(step)
    number = journal.segment_number(step)
    for source, epoch, position in zip(*(each.tolist() for each in draws), strict=True):
        name = journal.names[source]
        count = journal.segments[number].sources[name].packs
        permutation = epoch_permutation(journal.seed, name, epoch, count)
        yield name, int(permutation.forward(np.array([position]))[0])


def rows_of(batch):
    length = batch.tokens.shape[1]
    starts = [[] for _ in batch.tokens]
    for start in batch.starts.tolist():
        starts[start // length].append(start % length)
    return {
        sample: (batch.tokens[row].tolist(), batch.targets[row].tolist(), batch.weight[row].tolist(), starts[row])
        for row, sample in enumerate(batch.samples.tolist())
        if sample >= 0
    }


LATER = [{"until": "3 steps"}, {"sequence_length": 7, "slices": {"a": ["10 documents", "90 documents"]}}]


@pytest.mark.parametrize("phases", [(), LATER])
def test_rows_are_those_of_a_plain_loop(phases):
    (loader,) = loaders(run_file(phases))
    journal = loader.journal
    assert journal.order_version == 2
    total = Counter()
    for step in range(12):
        number = journal.segment_number(step)
        segment = journal.segments[number]
        length = segment.sequence_length
        data = loader.batches(step)
        (batch,) = data.micro_batches
        found, valid, drawn, data_hash = rows_of(batch), 0, Counter(), 0
        for index, (name, number) in zip(journal.samples(step), samples_of(journal, step), strict=True):
            row = expected_row(packs_of(name, length, segment.sources[name].documents)[number], length)
            assert found[index] == row
            drawn[name] += sum(row[2])
            valid += sum(row[2])
            data_hash += xxhash.xxh3_64_intdigest(np.array([index, *row[0], *row[1]], "<i8"))
        assert data.valid_targets == valid and data.tokens_by_source == dict(drawn)
        assert data.data_hash == data_hash % 2**64
        total.update(drawn)
        assert loader.tokens_by_source(step + 1) == dict(total)
        assert sum(total.values()) <= journal.tokens(step + 1)


def test_two_epochs_have_every_token_twice():
    """Each predicted from what precedes it in its document, also in slices; and the source ends there exactly."""
    config = run_file(sources={"a": {"max_epochs": 2, "slice": ["7 documents", "120 documents"]}}, batch_size=1)
    (loader,) = loaders(config)
    packs = len(packs_of("a", documents=(7, 120)))
    end = loader._sampler.end()
    assert (end.kind, end.step) == ("exhausted", 2 * packs)
    dataset = DATASETS["a"]
    seen, pairs = Counter(), Counter()
    for step in range(2 * packs):
        (batch,) = loader.batches(step).micro_batches
        for tokens, targets, weight, _ in rows_of(batch).values():
            for lead, token, counts in zip(tokens, targets, weight, strict=True):
                if counts:
                    seen[token] += 1
                    pairs[lead, token] += 1
    low, high = dataset.document_start(7), dataset.document_start(120)
    expected = Counter()
    for document in range(7, 120):
        text = dataset.ids[dataset.document_start(document) : dataset.document_start(document + 1)].tolist()
        expected.update(zip([EOD, *text], text, strict=False))
    assert pairs == Counter({pair: 2 * count for pair, count in expected.items()})
    assert seen == Counter({token: 2 * count for token, count in Counter(dataset.ids[low:high].tolist()).items()})
    assert loader.tokens_by_source(2 * packs) == {"a": 2 * (high - low)}
    assert loader.epochs_by_source(2 * packs) == {"a": 2.0}


@pytest.mark.parametrize("ranks, micro", [(2, 3), (3, 1), (4, 1), (5, 2)])
def test_any_layout_has_the_same_samples(ranks, micro):
    config = run_file(batch_size=14)
    (whole,) = loaders(config)
    for balanced in (True, False):
        several = loaders(config, ranks, micro, balanced=balanced)
        for step in range(6):
            one, parts = whole.batches(step), [loader.batches(step) for loader in several]
            expected, found = rows_of(one.micro_batches[0]), {}
            for part in parts:
                assert (part.order_hash, part.valid_targets, part.tokens_by_source) == (
                    one.order_hash,
                    one.valid_targets,
                    one.tokens_by_source,
                )
                assert len(part.micro_batches) == len(parts[0].micro_batches)
                for batch in part.micro_batches:
                    rows = rows_of(batch)
                    assert list(rows) == sorted(rows) and len(rows) == batch.real <= micro
                    assert not batch.weight[batch.real :].any() and (batch.sources[batch.real :] == -1).all()
                    assert not found.keys() & rows.keys()
                    found |= rows
            assert found == expected
            assert sum(part.data_hash for part in parts) % 2**64 == one.data_hash


def test_balanced_ranks_have_about_the_same_work():
    config = run_file(batch_size=32)

    def dearest(balanced):
        several = loaders(config, 4, 2, balanced=balanced)
        worst = []
        for step in range(10):
            costs = several[0]._packs._lookup.step(step).costs()
            by_rank = [sum(costs[rows].sum() for rows in loader._packs.rows(step)) for loader in several]
            worst.append(max(by_rank) / np.mean(by_rank))
        return np.mean(worst)

    assert dearest(True) < 1.03 < 1.1 < dearest(False)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives(objective):
    """Valid targets of a step are those that have weight on its ranks; each token has its own and no other task."""
    several = loaders(run_file(batch_size=10), 2, 2, objective=OBJECTIVES[objective])
    journal = several[0].journal
    for step in range(5):
        parts = [loader.batches(step) for loader in several]
        valid = sum(int(batch.weight.sum()) for part in parts for batch in part.micro_batches)
        assert {part.valid_targets for part in parts} == {valid}
        packs = dict(zip(journal.samples(step), samples_of(journal, step), strict=True))
        for part in parts:
            for batch in part.micro_batches:
                for row, sample in enumerate(batch.samples.tolist()):
                    if sample >= 0:
                        name, number = packs[sample]
                        _check(objective, batch, row, packs_of(name)[number])


def _check(objective, batch, row, pack):
    inputs, targets, weight, starts = expected_row(pack)
    got = [getattr(batch, name)[row].tolist() for name in ("tokens", "targets", "weight")]
    assert rows_of(batch)[int(batch.samples[row])][3] == starts
    firsts = [start for start, (_, _, _, first) in zip(starts, pack, strict=False) if not first]
    if objective in ("causal", "start"):
        for first in firsts if objective == "start" else ():
            weight[first] = 0
        assert got == [inputs, targets, weight]
    elif objective == "masked":
        (predicted,) = np.nonzero(got[2])
        maskable = [t for t in range(sum(weight)) if targets[t] != EOD]
        assert set(predicted) <= set(maskable) and got[1] == targets
        assert len(predicted) == round(0.3 * len(maskable))
        assert all(got[0][t] == targets[t] for t in range(L) if t not in predicted)
    elif objective.startswith("prefix"):
        assert got[:2] == [inputs, targets]
        behind = batch.prefix[row].tolist()
        for (tokens, _, _, first), start in zip(pack, starts, strict=False):
            end = start + len(tokens)
            (prefix,) = set(behind[start:end])
            assert start < prefix <= end
            counted = [0] * (prefix - 1 - start) + [1] * (end - prefix + 1)
            if objective == "prefix start" and not first:
                counted[0] = 0
            assert got[2][start:end] == counted
        assert got[2][sum(weight) :] == [0] * (L - sum(weight))
    else:
        for (tokens, lead, _, _), start in zip(pack, starts, strict=False):
            mine = got[1][start : start + len(tokens)]
            assert got[0][start : start + len(tokens)] == [lead, *mine[:-1]]
            if SENTINELS[0] in mine:
                kept = [token for token in mine if token not in SENTINELS]
                assert sorted(kept) == sorted(tokens[3:]) and mine[0] == SENTINELS[0]
                assert (mine[-1] == EOD) == (tokens[-1] == EOD)
            else:
                assert mine == tokens


def test_targets_ahead_stay_in_their_chunk():
    (loader,) = loaders(run_file(skip=[{"source": "b", "documents": ["3-9"]}]), ahead=2)
    for step in range(4):
        data = loader.batches(step)
        (batch,) = data.micro_batches
        for row, (name, number) in enumerate(samples_of(loader.journal, step)):
            place = 0
            for tokens, _, document, _ in packs_of(name)[number]:
                masked = name == "b" and 3 <= document <= 9
                for t in range(len(tokens)):
                    for depth in (1, 2):
                        counts = t + depth < len(tokens) and not masked
                        assert batch.ahead_weight[row, depth - 1, place + t] == counts
                        if counts:
                            assert batch.ahead_targets[row, depth - 1, place + t] == tokens[t + depth]
                place += len(tokens)
        assert data.valid_ahead == tuple(batch.ahead_weight.sum((0, 2)).to(torch.int64).tolist())


@pytest.mark.parametrize("objective", ["causal", "start", "prefix", "masked", "fim"])
def test_skips(objective):
    skip = [
        {"source": "b", "documents": ["3-9"]},
        {"source": "b", "documents": [5], "from_step": 2},
        {"samples": "8-10"},
        {"steps": "3"},
        {"source": "a", "from_step": 5},
    ]
    several = loaders(run_file(skip=skip, batch_size=10), 2, 2, objective=OBJECTIVES[objective])
    plain = loaders(run_file(batch_size=10), objective=OBJECTIVES[objective])[0]
    for step in range(6):
        parts, whole = [loader.batches(step) for loader in several], plain.batches(step)
        assert {part.order_hash for part in parts} == {whole.order_hash}
        assert {tuple(part.tokens_by_source.items()) for part in parts} == {tuple(whole.tokens_by_source.items())}
        if step == 2:
            assert all(part.skipped and not part.micro_batches for part in parts)
            continue
        weights, packs = rows_of(whole.micro_batches[0]), samples_of(plain.journal, step)
        found = {
            sample: row for part in parts for batch in part.micro_batches for sample, row in rows_of(batch).items()
        }
        for index, (name, number) in zip(plain.journal.samples(step), packs, strict=True):
            place, expected = 0, weights[index][2]
            for tokens, _, document, _ in packs_of(name)[number]:
                gone = 8 <= index <= 10 or (name == "b" and 3 <= document <= 9) or (name == "a" and step >= 4)
                if gone:
                    expected[place : place + len(tokens)] = [0] * len(tokens)
                place += len(tokens)
            assert found[index][2] == expected
        assert {part.valid_targets for part in parts} == {int(sum(sum(row[2]) for row in found.values()))}


def test_windows_and_packs_in_one_run():
    """Phases of both kinds: targets are counted exactly over them, and counting resumes from what was saved."""
    phases = [{"until": "2 steps", "packing": "windows"}, {"until": "5 steps"}, {"packing": "windows"}]
    (loader,) = loaders(run_file(phases))
    totals, total = {}, Counter()
    for step in range(9):
        data = loader.batches(step)
        assert sum(data.tokens_by_source.values()) == sum(int(batch.weight.sum()) for batch in data.micro_batches)
        total.update(data.tokens_by_source)
        totals[step + 1] = dict(total)
        assert loader.tokens_by_source(step + 1) == dict(total)
        if step == 3:
            saved = loader.drawn_targets.state()
    assert Journal.from_json(loader.journal.to_json()).fingerprint == loader.journal.fingerprint
    (again,) = loaders(run_file(phases))
    assert again.tokens_by_source(7) == totals[7] and again.tokens_by_source(2) == totals[2]
    again.drawn_targets.load(saved)
    assert again.tokens_by_source(9) == totals[9]


@pytest.mark.parametrize("objective", ["causal", "start", "masked"])
@pytest.mark.parametrize("documents", [(), ("a",)], ids=["sources", "documents"])
def test_loss_weights_are_those_of_documents(objective, documents, monkeypatch):
    weights = {name: np.random.default_rng(5).choice([0.5, 2.0], len(each.lengths)) for name, each in DATASETS.items()}
    for name, dataset in DATASETS.items():
        owner = np.repeat(np.arange(len(dataset.lengths)), dataset.lengths)

        def fill(part, start, out, of=weights[name], owner=owner):
            out[:] = of[owner[start : start + len(out)]]

        monkeypatch.setattr(dataset, "fill_weights", fill, raising=False)
    config = run_file(skip=[{"source": "b", "documents": ["1-9"]}])
    for source in config.data.sources:
        object.__setattr__(source, "loss_weight", {"a": 0.25, "b": 3.0}[source.name])
        object.__setattr__(source, "weight_key", "quality" if source.name in documents else None)
    plain = loaders(run_file(skip=[{"source": "b", "documents": ["1-9"]}]), objective=OBJECTIVES[objective])[0]
    ranks = loaders(config, 2, 2, OBJECTIVES[objective])
    for step in range(4):
        number, counted = ranks[0].journal.segment_number(step), 0.0
        by_sample = {}
        for rank in ranks:
            data = rank.batches(step)
            for batch in data.micro_batches:
                for row in range(batch.real):
                    by_sample[int(batch.samples[row])] = batch.loss_weight[row]
        whole = plain.batches(step).micro_batches[0]
        for row, (name, pack) in enumerate(samples_of(plain.journal, step)):
            factor = {"a": 0.25, "b": 3.0}[name]
            of_tokens = [
                factor * (weights[name][document] if name in documents else 1)
                for tokens, _, document, _ in packs_of(name)[pack]
                for _ in tokens
            ]
            expected = whole.weight[row] * torch.tensor(of_tokens + [1.0] * (L - len(of_tokens)), dtype=torch.float32)
            assert torch.equal(by_sample[int(whole.samples[row])], expected)
            counted += float(expected.sum())
        assert number == 0 and data.total_weight == pytest.approx(counted, rel=1e-6)
        assert data.valid_targets == plain.batches(step).valid_targets
