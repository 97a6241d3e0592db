"""Steps of a run, against plain lists: what is in a batch, how it is split, what counts, and reading ahead."""

import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.data.loading import loader as module
from pipeline.data.loading import prefetch
from pipeline.data.loading.batch import StepData
from pipeline.data.loading.loader import Loader
from pipeline.data.loading.objectives.causal import Causal
from pipeline.data.loading.prefetch import read_ahead
from pipeline.data.order import locate
from pipeline.data.order.packs import instances_of
from pipeline.data.order.phases import phase_at, plan_journal
from tests.data.preprocess.memory import EOD, FlatDataset, MemoryDataset

relaxed = settings(deadline=None, max_examples=20)

DATASETS = {
    "books": MemoryDataset([40, 3, 1, 25, 60, 2, 9]),
    "code": MemoryDataset([5] * 30, np.uint16),
    "web": MemoryDataset([1, 2, 3, 30, 4, 100], np.int32),
}
WEIGHTS = {"books": 2, "code": 1, "web": 4}


def run_file(weights, *, seed=1, batch_size=4, sequence_length=8, blend=None, data=None, **train):
    return Config.model_validate(
        {
            "run": {"dir": "runs/none", "seed": seed},
            "data": {
                "sources": [{"name": name, "paths": ["none"], "weight": weight} for name, weight in weights.items()],
                **(data or {}),
            },
            "blend": blend or {},
            "tokenizer": {"path": "none"},
            "model": {"layers": 1, "dim": 8, "heads": 1},
            "train": {"duration": "10 steps", "batch_size": batch_size, "sequence_length": sequence_length, **train},
        }
    )


def make(datasets=DATASETS, weights=WEIGHTS, *, objective=None, mask=False, micro=None, vocab=None, **keys):
    (loader,) = make_ranks(1, datasets, weights, objective=objective, mask=mask, micro=micro, vocab=vocab, **keys)
    return loader


def make_ranks(
    dp_size, datasets=DATASETS, weights=WEIGHTS, *, objective=None, mask=False, micro=None, vocab=None, **keys
):
    """The loaders of all ranks."""
    journal = plan_journal(run_file(weights, **keys), datasets)
    windows = instances_of(journal, datasets)
    return [
        Loader(
            journal,
            windows,
            objective or Causal(mask_document_start=mask),
            dp_rank=dp_rank,
            dp_size=dp_size,
            micro_batch_size=[micro or segment.batch_size for segment in journal.segments],
            vocab_size=vocab,
        )
        for dp_rank in range(dp_size)
    ]


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
    assert [entry["sample"] for entry in described] == batch.samples.tolist() == list(range(35, 42))
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


PHASES = {
    "phases": [
        {"until": "7 steps"},
        {"until": "900 tokens", "batch_size": 9, "slices": {"books": [0.5, 1], "web": ["1 documents", "5 documents"]}},
        {"until": "30 steps", "sequence_length": 21, "sources": ["web", "code"]},
        {"weights": {"books": 1, "web": 1}, "sequence_length": 21, "batch_size": 3},
    ]
}

SKIPS = [
    {"source": "web", "documents": ["0-2", 5]},
    {"source": "books", "from_step": 41},
    {"samples": "100-120"},
    {"source": "code", "documents": [7], "from_step": 3},
]


class Turned(Causal):
    """Turns the tokens of documents around whose piece in the window has an odd place, if the key says so."""

    arranges = True

    def arrange(self, ids, begins, key):
        ids, ends = ids.copy(), np.append(begins[1:], len(ids))
        for begin, end in list(zip(begins.tolist(), ends.tolist(), strict=True))[key % 2 :: 2]:
            ids[begin:end] = ids[begin:end][::-1]
        return super().arrange(ids, begins, key)


@settings(deadline=None, max_examples=30)
@given(
    batch_size=st.integers(1, 13),
    dp_size=st.integers(1, 4),
    micro=st.integers(1, 6),
    step=st.one_of(st.integers(0, 40), st.integers(0, 200)),
    mask=st.booleans(),
    turned=st.booleans(),
    skip=st.lists(st.sampled_from(SKIPS), unique_by=str, max_size=3),
    blend=st.sampled_from([{}, PHASES]),
)
def test_any_split_over_ranks_and_micro_batches_is_the_same_step(
    batch_size, dp_size, micro, step, mask, turned, skip, blend
):
    objective = (Turned if turned else Causal)(mask_document_start=mask)
    keys = {"batch_size": batch_size, "objective": objective, "blend": {**blend, "skip": skip}}
    whole_run = make(**keys)
    whole = whole_run.batches(step)
    batch_size = len(whole_run.journal.samples(step))
    expected = rows(whole)
    assert len(expected) == batch_size
    assert whole.valid_targets == sum(sum(weight) for _, _, _, weight, _ in expected)
    parts = [loader.batches(step) for loader in make_ranks(dp_size, micro=micro, **keys)]
    assert len({len(part.micro_batches) for part in parts}) == 1
    # Micro-batch by micro-batch, rank after rank, the padded step in its order.
    joined = [
        row
        for group in zip(*(part.micro_batches for part in parts), strict=True)
        for batch in group
        for row in rows(StepData(step, [batch], 0, {}, 0, 0))
    ]
    assert joined[:batch_size] == expected
    groups = zip(*(part.micro_batches for part in parts), strict=True)
    numbers = [number for group in groups for batch in group for number in batch.samples.tolist()]
    assert numbers == [*whole_run.journal.samples(step), *[-1] * (len(joined) - batch_size)]
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
    masked = make(mask=True, batch_size=batch_size, sequence_length=length)
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
    loaders = make_ranks(2, datasets, {"a": 2, "b": 1}, batch_size=6, sequence_length=16, micro=2)
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
        assert loader.journal.tokens(step) == sum(total.values())
        assert loader.epochs_by_source(step) == {name: total[name] / DATASETS[name].tokens for name in total}
        for name, tokens in loader.batches(step).tokens_by_source.items():
            total[name] += tokens


def test_values_that_must_never_change():
    """Computed by the first version of this code."""
    found = []
    for keys in ({"batch_size": 7, "sequence_length": 11}, {"batch_size": 5, "sequence_length": 32, "mask": True}):
        for step in (0, 123, 10**6):
            data = make(**keys).batches(step)
            (batch,) = data.micro_batches
            arrays = [tensor.contiguous().numpy().tobytes() for tensor in (batch.bounds, batch.targets, batch.weight)]
            found.append((data.order_hash, data.data_hash, xxhash.xxh3_64_intdigest(b"".join(arrays))))
    assert found == [
        (0x4519F03F85769F98, 0x127EFFA719249185, 0x0C57C5E2DFECA73B),
        (0x4AFB61C9A32A7CA9, 0xF4D3DDA0321DD968, 0xCB6DAA85F66CEC7D),
        (0x92493413EFA14DE4, 0x1C8C5AE3A4DEF9F5, 0xA7A57E3B8F7BE59B),
        (0xCBB24146700CBEED, 0x8549A498C525D762, 0x59921B29CDDCADFC),
        (0x1B618874ABEC2146, 0x547EB0BF6EDA4349, 0x3A4CA854D14CB0FA),
        (0xFAB50A588FC3C31A, 0xC309761F2E9745A7, 0x42DCBF3D6C30FBB0),
    ]


# Phases


def phased(**keys):
    return make(batch_size=5, blend=PHASES, **keys)


def ids_of(entry):
    """The tokens of a described sample, from its pieces of documents."""
    dataset, ids = DATASETS[entry["source"]], []
    for span in entry["spans"]:
        ids += dataset.read(dataset.document_start(span["document"]) + span["start"], span["length"]).tolist()
    return ids


def test_each_segment_has_its_own_windows():
    loader = phased()
    segments = loader.journal.segments
    assert len(segments) == 4
    inside = {"books": range(3, 7), "web": range(1, 5), "code": range(30)}
    total = dict.fromkeys(loader.names, 0)
    slices = {name: {} for name in loader.names}
    for step in range(60):
        assert loader.tokens_by_source(step) == total
        read = {name: sum(slices[name].values()) or 1 for name in total}
        assert loader.epochs_by_source(step) == pytest.approx({name: total[name] / read[name] for name in total})
        number = loader.journal.segment_number(step)
        length = segments[number].sequence_length
        data = loader.batches(step)
        (batch,) = data.micro_batches
        described = loader.describe(step)
        assert batch.tokens.shape == (segments[number].batch_size, length)
        for b, entry in enumerate(described):
            assert [*batch.tokens[b].tolist(), int(batch.targets[b, -1])] == ids_of(entry)
            if number == 1:
                assert {span["document"] for span in entry["spans"]} <= set(inside[entry["source"]])
            total[entry["source"]] += length
        # A source of a segment counts with its slice, whether it was its turn yet or not.
        for name, state in segments[number].sources.items():
            slices[name][state.documents] = state.tokens
        assert set(data.tokens_by_source) == set(loader.names)
    assert {name for name in loader.names if name not in segments[2].sources} == {"books"}


def test_groups_of_any_size_give_the_same_steps(monkeypatch):
    """Steps in order are looked up in ever larger groups; in any other order one by one."""
    skip = [{"steps": "12-14"}, {"samples": "190-191"}]
    keys = {"batch_size": 5, "blend": {**PHASES, "skip": skip}}
    expected = [make(**keys).batches(step) for step in range(0, 60, 3)]
    groups, original = [], locate.Lookup._look_up

    def look_up(self, first, last):
        group = original(self, first, last)
        groups.append((group.first, group.end))
        return group

    monkeypatch.setattr(locate, "_QUICK_S", 1000)
    monkeypatch.setattr(locate.Lookup, "_look_up", look_up)
    loader = make(**keys)
    steps = [loader.batches(step) for step in range(60)]
    # Segments end at steps 7, 16 and 30. Step 31 has masked samples, which all ranks need to know of.
    assert groups[:7] == [(0, 1), (1, 3), (3, 7), (7, 15), (15, 16), (16, 18), (18, 22)]
    assert {30, 31} <= {first for first, _ in groups} and groups[-1][1] >= 60
    for one, other in zip(expected, steps[::3], strict=True):
        assert (one.data_hash, one.order_hash, one.valid_targets) == (
            other.data_hash,
            other.order_hash,
            other.valid_targets,
        )
        assert rows(one) == rows(other)
    # Nothing is looked up that will not be read.
    groups.clear()
    assert len(list(make(**keys).iterate(40, 45))) == 5
    assert groups == [(40, 41), (41, 43), (43, 45)]
    # A file system that is slow is asked for one step at a time.
    monkeypatch.setattr(locate, "_QUICK_S", 0)
    groups.clear()
    list(make(**keys).iterate(0, 6))
    assert groups == [(step, step + 1) for step in range(6)]


# Skips


def test_skipped_steps_are_passed_over():
    plain, loader = make(), make(blend={"skip": [{"steps": "4-5"}, {"steps": 9, "from_step": 10}]})
    for step in range(12):
        data, other = loader.batches(step), plain.batches(step)
        assert data.skipped == (step in (3, 4))
        assert (data.order_hash, data.tokens_by_source) == (other.order_hash, other.tokens_by_source)
        if data.skipped:
            assert (data.micro_batches, data.valid_targets, data.data_hash) == ([], 0, 0)
        else:
            assert rows(data) == rows(other)
    assert loader.journal.tokens(12) == plain.journal.tokens(12)


@settings(deadline=None, max_examples=12)
@given(
    documents=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    from_step=st.integers(1, 20),
    length=st.integers(1, 50),
    mask=st.booleans(),
)
def test_targets_of_skipped_documents_do_not_count(documents, from_step, length, mask):
    skip = [{"source": "web", "documents": documents, "from_step": from_step}]
    plain = make(sequence_length=length, mask=mask)
    loader = make(sequence_length=length, mask=mask, blend={"skip": skip})
    for step in (from_step - 2, from_step - 1, 50):
        data, other = loader.batches(max(0, step)), plain.batches(max(0, step))
        assert data.data_hash == other.data_hash
        for entry, row, before in zip(loader.describe(max(0, step)), rows(data), rows(other), strict=True):
            assert (*row[:3], row[4]) == (*before[:3], before[4])
            owners = [span["document"] for span in entry["spans"] for _ in range(span["length"])]
            skipped = [
                entry["source"] == "web" and owner in documents and max(0, step) >= from_step - 1 for owner in owners
            ]
            assert row[3] == [0.0 if out else weight for out, weight in zip(skipped[1:], before[3], strict=True)]


def test_skipped_samples_and_sources_do_not_count():
    loader = make(blend={"skip": [{"samples": "10-13"}, {"source": "code", "from_step": 6}]}, data={})
    plain = make()
    for step in range(20):
        data = loader.batches(step)
        numbers = [number for batch in data.micro_batches for number in batch.samples.tolist() if number >= 0]
        assert numbers == list(loader.journal.samples(step))
        for index, row, before in zip(loader.journal.samples(step), rows(data), rows(plain.batches(step)), strict=True):
            out = 10 <= index <= 13 or (loader.names[row[0]] == "code" and step >= 5)
            assert row[:3] == before[:3]
            assert row[3] == ([0.0] * 8 if out else before[3])
        assert data.valid_targets == sum(sum(row[3]) for row in rows(data))


# Ids


@pytest.mark.parametrize(
    ("dtype", "other", "vocab", "bad"),
    [
        (np.uint16, np.uint16, 1000, [1000, 65535]),
        (np.int32, np.uint16, 1000, [1000, -1]),
        (np.int64, np.int64, 1000, [1000, -1, 2**62]),
        # What is negative here is below the size of the vocabulary when it is taken for an unsigned number.
        (np.int8, np.int8, 1000, [-1, -128]),
        (np.int16, np.uint8, 100_000, [-1]),
    ],
)
def test_an_id_that_the_model_does_not_know_is_named(dtype, other, vocab, bad):
    def broken(value):
        dataset = MemoryDataset([5] * 20, dtype)
        if value is not None:
            dataset.ids[77] = value
        return make({"a": dataset, "b": MemoryDataset([5] * 3, other)}, {"a": 4, "b": 0.001}, vocab=vocab, micro=3)

    loader = broken(None)
    for step in range(20):
        loader.batches(step)
    for value in bad:
        loader = broken(value)
        with pytest.raises(UserError) as error:
            for step in range(40):
                loader.batches(step)
        assert f"source 'a': document 15 of memory has token id {value}," in str(error.value)
        assert f"has only {vocab} ids:" in str(error.value)


# Reading ahead


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name == "loader"]


def test_iteration_equals_random_access():
    loader = phased()
    steps = list(loader.iterate(3, 50))
    assert [data.step for data in steps] == list(range(3, 50))
    for data in steps[::5]:
        other = phased().batches(data.step)
        assert rows(data) == rows(other)
        assert data.data_hash == other.data_hash
    assert list(loader.iterate(4, 4)) == []
    assert not loader_threads()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_thread_reads_ahead_only_so_far(monkeypatch, depth):
    monkeypatch.setattr(prefetch, "TOGETHER_S", 0)
    read, enough = [], threading.Event()

    def make_step(step):
        read.append(step)
        if step == depth:
            enough.set()
        return step

    steps = read_ahead(make_step, 0, 100, depth)
    assert next(steps) == 0  # and now, while it is trained on, the next ones are read
    assert enough.wait(30)
    time.sleep(0.05)
    assert max(read) == depth
    steps.close()
    assert not loader_threads()


def test_small_steps_are_handed_over_together(monkeypatch):
    monkeypatch.setattr(prefetch, "TOGETHER_S", 1000)
    read = []
    steps = read_ahead(lambda step: read.append(step) or step, 0, 50, 1)
    assert next(steps) == 0
    assert read == list(range(50))
    assert list(steps) == list(range(1, 50))


@pytest.mark.parametrize("together", [0, 1000])
def test_an_error_in_the_thread_is_raised_where_the_step_is_taken(monkeypatch, together):
    monkeypatch.setattr(prefetch, "TOGETHER_S", together)

    def make_step(step):
        if step == 2:
            raise OSError("disk gone")
        return step

    steps = read_ahead(make_step, 0, 10, 2)
    assert [next(steps), next(steps)] == [0, 1]
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


def test_rearranging_depends_on_the_sample_alone():
    plain, whole = make(batch_size=6).batches(4), make(batch_size=6, objective=Turned()).batches(4)
    assert whole.data_hash == plain.data_hash  # of the tokens as they were read
    assert rows(whole) != rows(plain)
    again = make(batch_size=3, micro=2, objective=Turned()).batches(9)  # samples 27, 28, 29 of the same run
    assert rows(again)[:3] == rows(whole)[3:]
    for row, before in zip(rows(whole), rows(plain), strict=True):
        ids, old = [[*one[1], one[2][-1]] for one in (row, before)]
        assert sorted(ids) == sorted(old) and row[3:] == before[3:]


# With datasets on disk


def test_sources_with_different_tokenizers_are_refused():
    def dataset(fingerprint):
        return SimpleNamespace(
            tokens=1000, manifest=SimpleNamespace(tokenizer=SimpleNamespace(fingerprint=fingerprint, vocab_size=9))
        )

    found = {"web": dataset("aaaa"), "books": dataset("aaaa"), "code": dataset("bbbb")}
    with pytest.raises(UserError, match=r"'web' and 'code'.*aaaa.*bbbb"):
        module.open_loader(run_file(dict.fromkeys(found, 1)), found)


@pytest.mark.parametrize(("batch_size", "dp_size", "expected"), [(10, 1, 10), (10, 4, 3), (2, 4, 1)])
def test_without_a_micro_batch_size_a_rank_takes_its_share_at_once(batch_size, dp_size, expected):
    config = run_file({"web": 1}, batch_size=batch_size)
    (batch,) = module.open_loader(config, {"web": DATASETS["web"]}, dp_size=dp_size).batches(0).micro_batches
    assert len(batch.sources) == expected


def test_a_micro_batch_with_more_positions_than_there_are_numbers_for_is_refused():
    config = run_file({"web": 1}, batch_size=2**16, sequence_length=2**15)
    datasets = {"web": MemoryDataset([2**15])}
    with pytest.raises(UserError, match=r"65,536 windows of 32,768 tokens .*lower train\.micro_batch_size"):
        module.open_loader(config, datasets)
    module.open_loader(config, datasets, dp_size=2)


def test_a_phase_has_its_micro_batch_size():
    phases = [
        {"until": "3 steps", "micro_batch_size": 2},
        {"until": "200 tokens", "batch_size": 6},
        {"micro_batch_size": 7},
    ]
    ramp = {"start": 2, "increment": 2, "tokens": 400}
    config = run_file({"web": 1}, batch_size=10, micro_batch_size=4, batch_ramp=ramp, blend={"phases": phases})
    loader = module.open_loader(config, {"web": DATASETS["web"]}, dp_size=2)
    for step in range(20):
        batch_size = len(loader.journal.samples(step))
        number = phase_at(config, loader.journal, step)
        # Never more than a rank's share of the step.
        assert loader.micro_batch_size(step) == min([2, 4, 7][number], batch_size // 2)
        assert {len(batch.sources) for batch in loader.batches(step).micro_batches} == {loader.micro_batch_size(step)}
    assert {len(loader.journal.samples(step)) for step in range(20)} == {2, 4, 6, 8, 10}


def test_open_loader_reads_what_was_preprocessed(tmp_path):
    """Text files, JSONL and a tokenizer of bytes, through the whole stage."""
    from pipeline.data.datasets.open import open_datasets
    from pipeline.data.preprocess.stage import preprocess

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
                "preprocess": {"workers": 1, "engine": "tokenizers"},
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
