import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data import loader as module
from pipeline.data.instances import Windows
from pipeline.data.journal import Journal
from pipeline.data.loader import PREFETCH, Loader
from pipeline.data.objectives import Causal
from pipeline.errors import UserError
from tests.data.memory import EOD, FlatDataset, MemoryDataset
from tests.data.test_journal import run_file

relaxed = settings(deadline=None, max_examples=30)

DATASETS = {
    "books": MemoryDataset([40, 3, 1, 25, 60, 2, 9]),
    "code": MemoryDataset([5] * 30, np.uint16),
    "web": MemoryDataset([1, 2, 3, 30, 4, 100], np.int32),
}
WEIGHTS = {"books": 2, "code": 1, "web": 4}


def make(datasets=DATASETS, weights=WEIGHTS, *, mask=False, micro=None, dp_rank=0, dp_size=1, **keys):
    config = run_file(weights, **keys)
    journal = Journal.plan(config, datasets)
    length = config.train.sequence_length
    return Loader(
        journal,
        {name: Windows(dataset, length, config.run.seed, name) for name, dataset in datasets.items()},
        Causal(mask_document_start=mask),
        dp_rank=dp_rank,
        dp_size=dp_size,
        micro_batch_size=micro or config.train.batch_size,
    )


def rows(steps):
    """The samples of one rank's micro-batches, one tuple of lists each."""
    return [
        (
            int(batch.sources[b]),
            batch.tokens[b].tolist(),
            batch.targets[b].tolist(),
            batch.weight[b].tolist(),
            batch.bounds[b].tolist(),
        )
        for batch in steps.micro_batches
        for b in range(len(batch.sources))
    ]


def test_a_batch_holds_what_the_instances_say():
    loader = make(batch_size=7, sequence_length=11)
    data = loader.batches(5)
    (batch,) = data.micro_batches
    assert data.step == 5
    assert {name: getattr(batch, name).dtype for name in ("tokens", "targets", "weight", "bounds", "sources")} == {
        "tokens": torch.int64,
        "targets": torch.int64,
        "weight": torch.float32,
        "bounds": torch.int64,
        "sources": torch.int64,
    }
    assert batch.tokens.shape == batch.targets.shape == batch.weight.shape == batch.bounds.shape == (7, 11)
    described = loader.describe(5)
    assert [entry["sample"] for entry in described] == list(range(35, 42))
    for b, entry in enumerate(described):
        dataset = DATASETS[entry["source"]]
        assert loader.names[batch.sources[b]] == entry["source"]
        tokens = []
        for span in entry["spans"]:
            first = dataset.document_start(span["document"]) + span["start"]
            tokens += dataset.read(first, span["length"]).tolist()
        assert batch.tokens[b].tolist() == tokens[:-1]
        assert batch.targets[b].tolist() == tokens[1:]
        begin = 0
        for q in range(11):
            begin = q if q and tokens[q - 1] == EOD else begin
            assert batch.bounds[b, q] == begin
            assert batch.positions[b, q] == q - begin
    assert sum(data.tokens_by_source.values()) == 7 * 11
    moved = batch.to(torch.device("meta"))
    assert moved.tokens.is_meta and moved.sources.is_meta and moved.extras == {}


@settings(deadline=None, max_examples=60)
@given(
    batch_size=st.integers(1, 13),
    splits=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=3),
    step=st.integers(0, 200),
    mask=st.booleans(),
)
def test_any_split_over_ranks_and_micro_batches_is_the_same_step(batch_size, splits, step, mask):
    whole = make(batch_size=batch_size, mask=mask).batches(step)
    expected = rows(whole)
    assert len(expected) == batch_size
    for dp_size, micro in splits:
        parts = [
            make(batch_size=batch_size, mask=mask, dp_rank=rank, dp_size=dp_size, micro=micro).batches(step)
            for rank in range(dp_size)
        ]
        assert len({len(part.micro_batches) for part in parts}) == 1
        # Micro-batch by micro-batch, rank after rank, the padded step in its order.
        joined = [
            row
            for group in zip(*(part.micro_batches for part in parts), strict=True)
            for batch in group
            for row in rows(type(whole)(step, [batch], 0, {}, 0, 0))
        ]
        assert joined[:batch_size] == expected
        padding = joined[batch_size:]
        assert len(padding) < dp_size * micro
        for source, tokens, targets, weight, bounds in padding:
            assert source == -1
            assert not any(tokens) and not any(targets) and not any(weight) and not any(bounds)
        for part in parts:
            assert part.order_hash == whole.order_hash
            assert part.valid_targets == whole.valid_targets
            assert part.tokens_by_source == whole.tokens_by_source
        assert sum(part.data_hash for part in parts) % 2**64 == whole.data_hash


@relaxed
@given(step=st.integers(0, 300), batch_size=st.integers(1, 9))
def test_hashes_are_those_of_the_definition(step, batch_size):
    loader = make(batch_size=batch_size)
    data = loader.batches(step)
    records, total = b"", 0
    for row, entry in zip(rows(data), loader.describe(step), strict=True):
        name = xxhash.xxh3_64_intdigest(entry["source"].encode())
        for number in (entry["sample"], name, entry["lap"], entry["position"]):
            records += number.to_bytes(8, "little")
        ids = [*row[1], row[2][-1]]
        total += xxhash.xxh3_64_intdigest(b"".join(n.to_bytes(8, "little") for n in [entry["sample"], *ids]))
    assert data.order_hash == xxhash.xxh3_64_intdigest(records)
    assert data.data_hash == total % 2**64


def test_hashes_tell_steps_and_data_apart():
    loader = make()
    steps = [loader.batches(step) for step in range(50)]
    assert len({data.order_hash for data in steps}) == len({data.data_hash for data in steps}) == 50
    # The same ids in another dtype, and the same sources in another order: the same data.
    wide = {name: MemoryDataset(DATASETS[name].lengths, np.int64) for name in reversed(DATASETS)}
    weights = {name: WEIGHTS[name] for name in reversed(WEIGHTS)}
    assert make(wide, weights).batches(3).data_hash == steps[3].data_hash
    assert make(wide, weights).batches(3).order_hash == steps[3].order_hash
    assert rows(make(wide, weights).batches(3)) == rows(steps[3])
    # One token changed: other data, same order.
    drawn = loader.describe(3)[0]
    changed = {name: MemoryDataset(dataset.lengths) for name, dataset in DATASETS.items()}
    span = drawn["spans"][0]
    changed[drawn["source"]].ids[DATASETS[drawn["source"]].document_start(span["document"]) + span["start"]] += 1
    assert make(changed).batches(3).order_hash == steps[3].order_hash
    assert make(changed).batches(3).data_hash != steps[3].data_hash


@relaxed
@given(step=st.integers(0, 100), batch_size=st.integers(1, 9), length=st.integers(1, 40))
def test_document_starts_are_masked_and_valid_targets_counted(step, batch_size, length):
    masked = make(mask=True, batch_size=batch_size, sequence_length=length, dp_size=1)
    plain = make(batch_size=batch_size, sequence_length=length)
    data, everything = masked.batches(step), plain.batches(step)
    assert everything.valid_targets == batch_size * length
    (batch,) = data.micro_batches
    assert data.valid_targets == int(batch.weight.sum())
    # A target is the first token of a document exactly if the input before it ends one.
    assert torch.equal(batch.weight == 0, batch.tokens == EOD)
    assert torch.equal(batch.tokens, everything.micro_batches[0].tokens)


def test_a_lap_of_each_source_has_every_target_once_over_ranks():
    """Tokens are their own offsets here, so the targets of a lap can be counted."""
    datasets = {"a": FlatDataset(640), "b": FlatDataset(320)}
    loaders = [
        make(datasets, {"a": 2, "b": 1}, batch_size=6, sequence_length=16, micro=2, dp_rank=rank, dp_size=2)
        for rank in range(2)
    ]
    seen = {0: np.zeros(641, int), 1: np.zeros(641, int)}
    for step in range(10):  # 60 samples: 40 windows of a, 20 of b
        for data in (loader.batches(step) for loader in loaders):
            for batch in data.micro_batches:
                for source, targets in zip(batch.sources.tolist(), batch.targets, strict=True):
                    if source >= 0:
                        np.add.at(seen[source], targets.numpy(), 1)
    assert loaders[0].epochs_by_source(10) == {"a": 1.0, "b": 1.0}
    assert (seen[0][1:641] == 1).all() and (seen[1][1:321] == 1).all()


def test_laps_go_on_without_a_seam():
    """A step that ends one lap and begins the next one."""
    loader = make({"a": FlatDataset(100)}, {"a": 1}, batch_size=4, sequence_length=10)
    laps = [(entry["lap"], entry["position"]) for entry in loader.describe(2)]
    assert laps == [(0, 8), (0, 9), (1, 0), (1, 1)]
    assert loader.epochs_by_source(5) == {"a": 2.0}


def test_accounting_equals_the_sum_of_the_steps():
    loader = make(batch_size=5)
    total = dict.fromkeys(loader.names, 0)
    for step in range(60):
        assert loader.tokens_by_source(step) == total
        assert loader.tokens(step) == sum(total.values())
        assert loader.epochs_by_source(step) == {name: total[name] / DATASETS[name].tokens for name in total}
        for name, tokens in loader.batches(step).tokens_by_source.items():
            total[name] += tokens


# Reading ahead


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name == "loader"]


def test_iteration_equals_random_access():
    loader = make()
    steps = list(loader.iterate(3, 9))
    assert [data.step for data in steps] == list(range(3, 9))
    for data in steps:
        assert rows(data) == rows(make().batches(data.step))
        assert data.data_hash == make().batches(data.step).data_hash
    assert list(loader.iterate(4, 4)) == []
    assert not loader_threads()


def test_the_thread_reads_ahead_only_so_far(monkeypatch):
    loader, read = make(), []
    original = loader.batches
    enough = threading.Event()

    def batches(step):
        read.append(step)
        if step == PREFETCH:
            enough.set()
        return original(step)

    monkeypatch.setattr(loader, "batches", batches)
    steps = loader.iterate(0, 100)
    assert next(steps).step == 0
    assert enough.wait(30)
    assert max(read) <= PREFETCH
    steps.close()
    assert max(read) <= PREFETCH
    assert not loader_threads()


def test_an_error_in_the_thread_is_raised_where_the_step_is_taken(monkeypatch):
    loader = make()
    original = loader.batches

    def batches(step):
        if step == 2:
            raise OSError("disk gone")
        return original(step)

    monkeypatch.setattr(loader, "batches", batches)
    steps = loader.iterate(0, 10)
    assert [next(steps).step, next(steps).step] == [0, 1]
    with pytest.raises(OSError, match="disk gone"):
        next(steps)
    assert not loader_threads()


def test_an_error_in_the_consumer_ends_the_thread():
    def consume():
        for _ in make().iterate(0, 1000):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert not [thread for thread in loader_threads() if thread.is_alive()]


# An objective of one's own


class Noisy(Causal):
    """Adds an array of its own that depends on the key alone."""

    def arrays(self, ids, bounds, key):
        return {**super().arrays(ids, bounds, key), "noise": np.array([key % 1000, key // 1000 % 1000])}


def test_extras_depend_on_the_sample_alone(monkeypatch):
    monkeypatch.setattr("tests.data.test_loader.Causal", Noisy)
    whole = make(batch_size=6).batches(4).micro_batches[0].extras["noise"]
    assert whole.shape == (6, 2)
    assert len({tuple(row.tolist()) for row in whole}) == 6
    again = make(batch_size=3, micro=2).batches(9).micro_batches  # samples 27, 28, 29 of the same run
    assert torch.equal(torch.cat([batch.extras["noise"] for batch in again])[:3], whole[3:])


# With datasets on disk


def test_sources_with_different_tokenizers_are_refused():
    def dataset(fingerprint):
        return SimpleNamespace(
            tokens=1000, manifest=SimpleNamespace(tokenizer=SimpleNamespace(fingerprint=fingerprint))
        )

    found = {"web": dataset("aaaa"), "books": dataset("aaaa"), "code": dataset("bbbb")}
    with pytest.raises(UserError, match=r"'web' and 'code'.*aaaa and bbbb"):
        module.open_loader(run_file(dict.fromkeys(found, 1)), found)


@pytest.mark.parametrize(("batch_size", "dp_size", "expected"), [(10, 1, 10), (10, 4, 3), (2, 4, 1)])
def test_without_a_micro_batch_size_a_rank_takes_its_share_at_once(batch_size, dp_size, expected):
    config = run_file({"web": 1}, batch_size=batch_size)
    (batch,) = module.open_loader(config, {"web": DATASETS["web"]}, dp_size=dp_size).batches(0).micro_batches
    assert len(batch.sources) == expected


def test_open_loader_reads_what_was_preprocessed(tmp_path):
    """Text files, JSONL and a tokenizer of bytes, through the whole stage."""
    from pipeline.config import Config
    from pipeline.data.preprocess import open_datasets, preprocess

    (tmp_path / "notes").mkdir()
    for number in range(12):
        (tmp_path / "notes" / f"{number}.txt").write_text(f"note {number}: " + "all work and no play. " * number)
    records = [{"id": str(n), "text": f"line {n} of the log, with words"} for n in range(200)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = Config.model_validate(
        {
            "run": {"dir": tmp_path / "run", "seed": 4},
            "data": {
                "sources": [
                    {"name": "notes", "paths": [str(tmp_path / "notes" / "*.txt")]},
                    {"name": "log", "type": "jsonl", "paths": [str(tmp_path / "log.jsonl")]},
                ],
                "splits": {"heldout": 0.1},
                "preprocess": {"workers": 1},
            },
            "tokenizer": {"train": {"vocab_size": 300}},
            "model": {"layers": 1, "dim": 8, "heads": 1},
            "train": {
                "duration": "10 steps",
                "batch_size": 5,
                "sequence_length": 32,
                "loss": {"mask_document_start": True},
            },
        }
    )
    preprocess(config)
    datasets = open_datasets(config, "train")
    loader = module.open_loader(config, datasets)
    ranks = [module.open_loader(config, datasets, dp_rank=rank, dp_size=2) for rank in range(2)]
    assert loader.names == ["log", "notes"]
    share = datasets["log"].tokens / sum(dataset.tokens for dataset in datasets.values())
    assert loader.journal.segments[0].sources["log"].weight == pytest.approx(share * 2**32, abs=1)
    end = datasets["log"].manifest.tokenizer.end_of_document
    steps = 3 * sum(dataset.tokens for dataset in datasets.values()) // (5 * 32)  # three laps
    for data in loader.iterate(0, steps):
        (batch,) = data.micro_batches
        for b, entry in enumerate(loader.describe(data.step)):
            ids = [*batch.tokens[b].tolist(), int(batch.targets[b, -1])]
            expected = []
            for span in entry["spans"]:
                begin = datasets[entry["source"]].document_start(span["document"]) + span["start"]
                expected += datasets[entry["source"]].read(begin, span["length"]).tolist()
            assert ids == expected
            begins = [0] + [q for q in range(1, 32) if ids[q - 1] == end]
            assert sorted(set(batch.bounds[b].tolist())) == begins
        assert torch.equal(batch.weight == 0, batch.tokens == end)
        assert data.valid_targets == int(batch.weight.sum())
        parts = [rank.batches(data.step) for rank in ranks]
        assert sum(part.data_hash for part in parts) % 2**64 == data.data_hash
        assert {part.order_hash for part in parts} == {data.order_hash}
    assert min(loader.epochs_by_source(steps).values()) > 2
