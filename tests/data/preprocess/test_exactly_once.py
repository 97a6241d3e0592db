"""Every document once, as it is, in its split: against a plain reading of the same files, for any number of workers."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
import tokenizers
import xxhash

from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.document_records import read_metadata, read_provenance
from pipeline.data.datasets.indexed import IndexedPart, part_files
from pipeline.data.datasets.verify import verify
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.sources.reader import UnitReader
from pipeline.data.work.units import cut_units, find_source_files
from tests.data import mixed
from tests.data.runs import datasets, make_config

LIMIT = 3000
SHARE = 0.2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return mixed.write(tmp_path_factory.mktemp("corpus"))


def config_of(root, corpus, workers, **preprocess_settings):
    settings = {
        "workers": workers,
        "unit_bytes": 8000,
        "max_document_bytes": LIMIT,
        "max_error_rate": 0.1,
        **preprocess_settings,
    }
    return make_config(root, mixed.sources(corpus), heldout=SHARE, preprocess=settings)


@pytest.fixture(scope="module", params=["unit", "global"])
def done(request, corpus, tmp_path_factory):
    config = config_of(tmp_path_factory.mktemp("done"), corpus, 1, shuffle=request.param)
    return config, preprocess(config)


def parts_of(folder):
    return sorted(path.with_suffix("") for path in folder.glob("parts/*/*.bin"))


def documents_of(folder):
    """(hash of the id, ids of each sequence, metadata, flags) of all documents, part by part."""
    for prefix in parts_of(folder):
        part = IndexedPart(prefix)
        ids = np.fromfile(part_files(prefix)[0], part.dtype).tolist()
        ends = np.cumsum(part.lengths).tolist()
        for document in range(part.documents):
            first, last = int(part.bounds[document]), int(part.bounds[document + 1])
            sequences = [ids[end - int(part.lengths[s]) : end] for s, end in enumerate(ends)][first:last]
            kept = prefix.with_suffix(".meta").exists()
            metadata = read_metadata(prefix, document, part.documents) if kept else {}
            _, _, flags, id_hash = read_provenance(prefix, document)
            yield id_hash, sequences, metadata, flags


@pytest.mark.first(1)
def test_against_a_plain_reading(done, corpus):
    config, report = done
    tokenizer = tokenizers.Tokenizer.from_file(str(config.data_dir / "tokenizer" / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id("<|endoftext|>")
    salt = xxhash.xxh3_64_intdigest(b'["heldout"]')
    for name, expected in mixed.read(corpus).items():
        counts = Counter()
        left = Counter()
        by_id = {xxhash.xxh3_64_intdigest(document.id.encode()): document for document in expected}
        assert len(by_id) == len(expected)
        for split in ("train", "heldout"):
            for id_hash, sequences, metadata, flags in documents_of(config.data_dir / name / split):
                left[id_hash] += 1
                document = by_id[id_hash]
                raw = document.text.encode()
                point = xxhash.xxh3_64_intdigest(raw, seed=salt)
                assert (point < SHARE * 2**64) == (split == "heldout")
                assert metadata == document.metadata
                assert sequences[-1].pop() == end
                assert not any(end in sequence for sequence in sequences)
                if len(raw) <= LIMIT:
                    assert sequences == [tokenizer.encode(document.text, add_special_tokens=False).ids]
                    assert flags == 0
                else:
                    texts = [tokenizer.decode(sequence, skip_special_tokens=False) for sequence in sequences]
                    assert "".join(texts) == document.text
                    assert [tokenizer.encode(t, add_special_tokens=False).ids for t in texts] == sequences
                    assert all(len(t.encode()) <= LIMIT for t in texts)
                    assert (flags, len(texts) > 1) == (1, True)
                counts[split, "documents"] += 1
                counts[split, "tokens"] += sum(map(len, sequences)) + 1
                counts[split, "text_bytes"] += len(raw)
        assert left == Counter(list(by_id))  # each once
        made = json.loads((config.data_dir / name / "report.json").read_text())["splits"]
        assert {(s, k): v for s, values in made.items() for k, v in values.items()} == counts
        for split in ("train", "heldout"):
            dataset = Dataset.open(config.data_dir / name / split)
            assert (dataset.documents, dataset.tokens) == (counts[split, "documents"], counts[split, "tokens"])
    assert report.documents == sum(map(len, mixed.read(corpus).values()))
    assert report.rejected["plain"] == {"empty document": 4, "invalid JSON": 2, "text is not a string": 2}
    assert report.rejected["text"] == {"empty document": 1, "not UTF-8": 1}


def test_the_compressed_file_took_several_links(done):
    config, _ = done
    receipts = [
        json.loads(path.read_text()) for path in (config.data_dir / "zst" / "receipts" / "00000").glob("*.json")
    ]
    last = [receipt["last"] for receipt in sorted(receipts, key=lambda receipt: receipt["link"])]
    whole = sum(split["text_bytes"] for receipt in receipts for split in receipt["splits"].values())
    assert whole // 8000 <= len(last) <= 2 * whole // 8000
    assert last == [False] * (len(last) - 1) + [True]


@pytest.mark.parametrize(
    ("done", "workers"),
    [
        ("unit", 3),
        pytest.param("global", 3, marks=pytest.mark.guard),
        pytest.param("unit", 2, marks=pytest.mark.slow),
        pytest.param("unit", 8, marks=pytest.mark.slow),
    ],
    indirect=["done"],
)
def test_the_same_bytes_for_any_number_of_workers(done, corpus, tmp_path, workers):
    config = config_of(tmp_path, corpus, workers, shuffle=done[0].data.preprocess.shuffle)
    preprocess(config)
    assert datasets(config) == datasets(done[0])
    assert verify(config.data_dir).problems == []


def test_a_reader_that_counts_anew_counts_as_a_new_one(corpus, tmp_path):
    """Whether links are made one after the other or after a restart, they are cut at the same places."""
    config = config_of(tmp_path, corpus, 1)
    for found in find_source_files(config):
        for unit in cut_units(found, 0, 50_000):
            through = UnitReader(unit, found.reader)
            documents = iter(through)
            read = 0
            for each in itertools.cycle((1, 7, 20)):
                alone = UnitReader(unit, found.reader, through.position)
                first, second = (list(itertools.islice(it, each)) for it in (iter(alone), documents))
                assert first == second
                for name in ("input_hash", "input_bytes", "records", "position"):
                    assert getattr(alone, name) == getattr(through, name), (name, unit)
                counts = [{n: c for n, c in reader.pieces.items() if any(c)} for reader in (alone, through)]
                assert counts[0] == counts[1]
                assert through.bytes_read >= read
                read = through.bytes_read
                if not second:
                    break
                through.count_anew()
            assert read == unit.bytes or unit.source == "plain"  # there, lines run over the ends of units


def test_links_add_up_to_the_file(done):
    """Bytes on disk are only about right where a file is compressed, but they end at its size."""
    config, _ = done
    for name in ("gz", "zst", "pq", "text"):
        plan = json.loads((config.data_dir / name / "plan.json").read_text())
        receipts = [json.loads(path.read_text()) for path in (config.data_dir / name).glob("receipts/0*/*.json")]
        for number, pieces in enumerate(plan["units"]):
            read = sum(receipt["input"]["read"] for receipt in receipts if receipt["unit"] == number)
            assert read == sum(end - start for _, start, end in pieces)
