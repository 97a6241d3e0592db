"""Splits: who is in them, by content and by id, in shares and in numbers; and what adding data moves."""

import json
from collections import Counter

import orjson
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.config.data import DataConfig
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.verify import verify
from pipeline.data.preprocess.splits import make_splits
from pipeline.data.preprocess.stage import preprocess
from tests.data.runs import datasets, is_heldout, make_config, write_jsonl
from tests.data.tokenization.test_tokenizer import byte_vocabulary, write

SALT = xxhash.xxh3_64_intdigest(b'["heldout"]')


def point(value):
    """Where a text or id lies, in [0, 1)."""
    return xxhash.xxh3_64_intdigest(value.encode(), seed=SALT) / 2**64


@pytest.fixture
def tokenizer(tmp_path):
    return {"path": str(write(tmp_path / "t.json", byte_vocabulary(), special=["<|endoftext|>"]))}


def run(root, tokenizer, records, splits, name="a", **data):
    """Run the stage on records in two files; the config."""
    half = len(records) // 2
    for number, part in enumerate((records[:half], records[half:])):
        (root / f"{name}{number}.jsonl").write_bytes(b"".join(orjson.dumps(r) + b"\n" for r in part))
    source = {"name": "s", "type": "jsonl", "paths": [f"{root}/{name}*.jsonl"]}
    config = make_config(root, [source], dir=str(root / name), tokenizer=tokenizer, splits=splits, **data)
    preprocess(config)
    assert verify(config.data_dir).problems == []
    return config


def ids_of(config):
    """Documents of each split: hash of the id -> how many."""
    result = {}
    for split in ("train", *config.data.splits):
        dataset = Dataset.open(config.data_dir / "s" / split)
        result[split] = Counter(dataset.provenance(document)[3] for document in range(dataset.documents))
    return result


def hashed(ids):
    return Counter(xxhash.xxh3_64_intdigest(id.encode()) for id in ids)


def records(count, begin=0):
    return [{"id": f"r{n}", "text": f"the text number {n}"} for n in range(begin, begin + count)]


@pytest.mark.parametrize("by", ["content", "id"])
def test_shares_are_intervals_in_the_order_of_the_run_file(tmp_path, tokenizer, by):
    made = records(300)
    config = run(tmp_path, tokenizer, made, {"test": 0.1, "dev": 0.2, "none": 0}, split_by=by)
    expected = {"train": [], "test": [], "dev": [], "none": []}
    for record in made:
        x = point(record["text" if by == "content" else "id"])
        expected["test" if x < 0.1 else "dev" if x < 0.3 else "train"].append(record["id"])
    assert ids_of(config) == {name: hashed(ids) for name, ids in expected.items()}
    assert min(map(len, (expected["test"], expected["dev"]))) > 10


@pytest.mark.parametrize("by", ["content", "id"])
def test_numbers_are_the_smallest_hashes_and_come_before_shares(tmp_path, tokenizer, by):
    made = records(300)
    splits = {"dev": 0.1, "three": "3 documents", "seven": "7 documents"}
    config = run(tmp_path, tokenizer, made, splits, split_by=by)
    ordered = sorted(made, key=lambda record: point(record["text" if by == "content" else "id"]))
    ids = [record["id"] for record in ordered]
    end = point(ordered[9]["text" if by == "content" else "id"])
    held = [r["id"] for r in ordered[10:] if point(r["text" if by == "content" else "id"]) < end + 0.1]
    assert ids_of(config) == {
        "three": hashed(ids[:3]),
        "seven": hashed(ids[3:10]),
        "dev": hashed(held),
        "train": hashed(set(ids[10:]) - set(held)),
    }
    # Again, with what the plan says of the ends: nothing is counted anew.
    assert preprocess(config).units_done == 0


@pytest.mark.guard
def test_numbers_with_several_workers(tmp_path, tokenizer):
    made, splits = records(300), {"dev": "20 documents"}
    one = run(tmp_path, tokenizer, made, splits, "one")
    three = run(tmp_path, tokenizer, made, splits, "three", preprocess={"workers": 3})
    # The ids of the files' names are not in the datasets.
    assert ids_of(one) == ids_of(three)
    assert datasets(one).keys() == datasets(three).keys()


def test_bad_and_rejected_records_are_not_counted(tmp_path, tokenizer):
    made = records(50)
    smallest = sorted(made, key=lambda record: point(record["text"]))
    smallest[0]["text"] = ""
    long = smallest[1]
    long["text"] += " long" * 400
    settings = {"max_document_bytes": 1024, "on_long_document": "reject", "max_error_rate": 0.1}
    config = run(tmp_path, tokenizer, made, {"dev": "3 documents"}, preprocess=settings)
    good = sorted((r for r in made if 0 < len(r["text"]) < 1000), key=lambda record: point(record["text"]))
    assert ids_of(config)["dev"] == hashed(r["id"] for r in good[:3])


def test_equal_texts_stay_together(tmp_path, tokenizer):
    made = records(100)
    for record in made[::3]:
        record["text"] = f"one of {record['id'][-1]}"
    by_text = Counter(record["text"] for record in made)
    config = run(tmp_path, tokenizer, made, {"dev": 0.3, "three": "3 documents"})
    text = {xxhash.xxh3_64_intdigest(record["id"].encode()): record["text"] for record in made}
    split_of = {}
    for split, ids in ids_of(config).items():
        for id_hash in ids:
            assert split_of.setdefault(text[id_hash], split) == split
    assert len(split_of) == len(by_text)
    ordered = sorted(point(record["text"]) for record in made)
    three = [record["id"] for record in made if point(record["text"]) <= ordered[2]]
    assert ids_of(config)["three"] == hashed(three)  # some more than three if the last ones are equal


@pytest.mark.parametrize("by", ["content", "id"])
def test_more_documents_move_none_of_the_old(tmp_path, tokenizer, by):
    old = run(tmp_path, tokenizer, records(200), {"dev": 0.1, "test": 0.1}, "old", split_by=by)
    new = run(tmp_path, tokenizer, records(500), {"dev": 0.1, "test": 0.1, "more": 0.1}, "new", split_by=by)
    known = hashed(record["id"] for record in records(200))
    before, after = ids_of(old), ids_of(new)
    for split in ("dev", "test"):
        assert before[split] == Counter({id: 1 for id in after[split] if id in known})
        assert len(after[split]) > len(before[split])
    assert Counter({id: 1 for id in after["train"] + after["more"] if id in known}) == before["train"]


def test_no_documents_are_a_split_that_is_empty(tmp_path, tokenizer):
    config = run(tmp_path, tokenizer, records(20), {"none": "0 documents", "dev": 0.3})
    found = ids_of(config)
    assert not found["none"]
    assert found["dev"] == hashed(r["id"] for r in records(20) if point(r["text"]) < 0.3)


def test_too_few_documents(tmp_path, tokenizer):
    with pytest.raises(UserError) as error:
        run(tmp_path, tokenizer, [*records(4), {"text": ""}], {"dev": "3 documents", "test": "2 documents"})
    assert "source 's' has 4 documents, too few for data.splits (dev: 3 documents, test: 2 documents); lower" in str(
        error.value
    )


def test_too_few_documents_because_records_are_bad(tmp_path, tokenizer):
    bad = [{"body": "no text"}] * 1230
    with pytest.raises(UserError) as error:
        run(tmp_path, tokenizer, bad, {"dev": "3 documents"})
    assert "source 's': 1,230 of 1,230 records are bad: no key 'text'. The others are too few for" in str(error.value)
    with pytest.raises(
        UserError, match=r"5 of 8 records are bad: 4 no key 'text', 1 text is not a string\. The others"
    ):
        run(tmp_path, tokenizer, [*bad[:4], {"text": 7}, {"text": ""}, *records(2)], {"dev": "3 documents"})
    assert not list((tmp_path / "a" / "data").rglob("*.json"))  # nor a lease


@pytest.mark.parametrize("count", [12, 11])
def test_numbers_that_take_all_documents(tmp_path, tokenizer, count):
    if count == 11:
        assert sum(ids_of(run(tmp_path, tokenizer, records(12), {"dev": "11 documents"}))["train"].values()) == 1
        return
    with pytest.raises(UserError) as error:
        run(tmp_path, tokenizer, records(12), {"dev": "9 documents", "test": "3 documents"})
    assert str(error.value) == (
        "source 's': data.splits (dev: 9 documents, test: 3 documents) leave nothing to train on: they take all of its "
        "12 documents; lower the numbers"
    )
    assert not (tmp_path / "a" / "s" / "plan.json").exists()


def test_a_number_and_a_share_that_take_all_documents(tmp_path, tokenizer):
    made = records(12)
    end = sorted(point(record["text"]) for record in made)[8]
    assert end > 0.5
    with pytest.raises(UserError) as error:
        run(tmp_path, tokenizer, made, {"a": "9 documents", "b": 0.5})
    assert str(error.value) == (
        "source 's': data.splits (a: 9 documents, b: 0.5) leave nothing to train on: the documents that are counted "
        f"take {100 * end:.1f} % of its hashes, the shares 50.0 %; lower the numbers or the shares"
    )


def test_equal_texts_behind_a_number_are_no_reason_to_refuse(tmp_path, tokenizer):
    made = records(12)
    ordered = sorted(made, key=lambda record: point(record["text"]))
    ordered[3]["text"] = ordered[2]["text"]
    found = ids_of(run(tmp_path, tokenizer, made, {"dev": "3 documents"}))
    assert found["dev"] == hashed(record["id"] for record in ordered[:4])


def test_other_numbers_are_refused(tmp_path, tokenizer):
    config = run(tmp_path, tokenizer, records(30), {"dev": "3 documents"})
    with pytest.raises(UserError, match=r"data\.splits: \{'dev': '3 documents'\} then, \{'dev': '4 documents'\} now"):
        run(tmp_path, tokenizer, records(30), {"dev": "4 documents"})
    assert json.loads((config.data_dir / "s" / "plan.json").read_text())["splits"] == ["train", "dev"]


@pytest.mark.guard
def test_a_trained_tokenizer_sees_none_of_a_number(tmp_path):
    """The documents of a split are known before the tokenizer is trained."""
    write_jsonl(tmp_path / "a.jsonl", 60)
    texts = [orjson.loads(line)["text"] for line in (tmp_path / "a.jsonl").open("rb")]
    held = min(texts, key=point)
    data = (tmp_path / "a.jsonl").read_bytes()
    source = {"name": "s", "type": "jsonl", "paths": [f"{tmp_path}/a.jsonl"]}
    config = make_config(tmp_path, [source], splits={"dev": "1 documents"})
    preprocess(config)
    # The same tokenizer without that document in the file.
    lines = [line for line in data.splitlines(keepends=True) if orjson.loads(line)["text"] != held]
    (tmp_path / "b.jsonl").write_bytes(b"".join(lines))
    other = make_config(
        tmp_path, [source | {"paths": [f"{tmp_path}/b.jsonl"]}], splits={"dev": 0}, dir=str(tmp_path / "other")
    )
    preprocess(other)
    vocabularies = [(c.data_dir / "tokenizer" / "tokenizer.json").read_bytes() for c in (config, other)]
    assert vocabularies[0] == vocabularies[1]


def test_the_share_of_the_held_out_split():
    texts = [f"document {i}".encode() for i in range(20_000)]
    for share in (0.01, 0.2):
        held = {text for text in texts if is_heldout(text, share)}
        assert abs(len(held) - share * len(texts)) < 5 * (share * len(texts)) ** 0.5
    assert {t for t in texts if is_heldout(t, 0.01)} < held
    # Pinned: datasets of different runs agree on the side of a text.
    assert [i for i in range(24) if is_heldout(f"document {i}".encode(), 0.2)] == [3, 5, 23]


@given(
    st.lists(st.integers(0, 2**64 - 2), min_size=12, max_size=40), st.lists(st.integers(0, 4), min_size=1, max_size=3)
)
def test_ends_of_numbers(hashes, counts):
    """Each number gets at least as many as it asks for, in order, and only more where hashes are equal."""
    smallest = sorted(hashes)
    splits = {f"n{i}": {"documents": count} for i, count in enumerate(counts)}
    config = DataConfig.model_validate({"sources": [{"name": "s", "paths": ["x"]}], "splits": splits})
    made = make_splits(config, smallest[: sum(counts)])
    wanted = begin = 0
    for end, count in zip(made.ends, counts, strict=True):
        wanted += count
        assert end >= begin
        inside = sum(h < end for h in hashes)
        assert inside >= wanted
        assert inside == wanted or (wanted and inside == sum(h <= smallest[wanted - 1] for h in hashes))
        begin = end
