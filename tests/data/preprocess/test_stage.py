"""The stage on small corpora: its datasets against a plain tokenization."""

import json

import numpy as np
import orjson
import pytest
import xxhash
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.open import dataset_folder
from pipeline.data.datasets.verify import verify
from pipeline.data.preprocess.make_tokenizer import sample_texts
from pipeline.data.preprocess.run_tokenizer import run_tokenizer
from pipeline.data.preprocess.split_counts import find_splits
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.work.units import find_source_files
from tests.data.runs import both, datasets, is_heldout, make_config


def texts_of(dataset, tokenizer):
    """Documents decoded one by one, by provenance."""
    result = {}
    for document in range(dataset.documents):
        start, end = dataset.document_start(document), dataset.document_start(document + 1)
        ids = dataset.read(start, end - start)
        assert ids[-1] == tokenizer.end_of_document
        result[document] = tokenizer.decode(ids[:-1])
    return result


class TestContent:
    def test_every_document_once_in_its_split(self, done, corpus):
        tokenizer = run_tokenizer(done)
        expected = {
            "t": {str(p.relative_to(corpus / "text")): p.read_text() for p in (corpus / "text").rglob("*.txt")},
            "j": {r["id"]: r["text"] for r in map(orjson.loads, (corpus / "lines.jsonl").read_bytes().splitlines())},
        }
        for source in done.data.sources:
            by_hash = {xxhash.xxh3_64_intdigest(i.encode()): text for i, text in expected[source.name].items()}
            seen = {}
            for split in ("train", "heldout"):
                dataset = Dataset.open(dataset_folder(done, source, split))
                for document, text in texts_of(dataset, tokenizer).items():
                    id_hash = dataset.provenance(document)[3]
                    assert id_hash not in seen
                    seen[id_hash] = text
                    assert is_heldout(text.encode(), 0.2) == (split == "heldout")
            assert seen == by_hash

    def test_totals(self, sources, corpus, tmp_path):
        config = make_config(tmp_path, sources)
        report = preprocess(config)
        raw = sum(path.stat().st_size for path in (corpus / "text").rglob("*.txt"))
        raw += sum(len(orjson.loads(x)["text"].encode()) for x in (corpus / "lines.jsonl").open())
        assert report.text_bytes == raw
        assert report.documents == 240
        assert report.tokens == sum(
            Dataset.open(dataset_folder(config, source, split)).tokens
            for source in config.data.sources
            for split in ("train", "heldout")
        )
        assert report.rejected == {"t": {}, "j": {}}

    def test_documents_of_a_unit_are_shuffled(self, done):
        dataset = Dataset.open(dataset_folder(done, done.data.sources[1], "train"))
        rows = {}
        for document in range(dataset.documents):
            unit, row, flags, _ = dataset.provenance(document)
            assert flags == 0
            rows.setdefault(unit, []).append(row)
        assert len(rows) > 3
        assert list(rows) == sorted(rows)  # the parts are in the order of the units
        assert sum(r == sorted(r) for r in rows.values()) < len(rows) / 2

    def test_units_are_in_keyed_order(self, done):
        """Not the order of the file, but another for each seed."""
        plan = json.loads((done.data_dir / "j" / "plan.json").read_text())
        starts = [unit[0][1] for unit in plan["units"]]
        size = sorted(starts)[1]
        assert sorted(starts) == [i * size for i in range(len(starts))]
        assert 3000 < size <= 4000
        assert starts != sorted(starts)

    def test_row_and_unit_lead_back_to_the_line(self, done, corpus):
        plan = json.loads((done.data_dir / "j" / "plan.json").read_text())
        dataset = Dataset.open(dataset_folder(done, done.data.sources[1], "train"))
        raw = (corpus / "lines.jsonl").read_bytes()
        texts = texts_of(dataset, run_tokenizer(done))
        for document in range(0, dataset.documents, 7):
            unit, row, _, _ = dataset.provenance(document)
            ((_, start, _),) = plan["units"][unit]
            skip = raw.index(b"\n", start - 1) + 1 if start else 0
            assert orjson.loads(raw[skip:].splitlines()[row])["text"] == texts[document]

    def test_verified_and_open_by_several_names(self, done):
        for folder in (done.data_dir, done.data_dir / "t", done.data_dir / "t" / "train"):
            assert verify(folder).problems == []

    def test_dataset_reads_across_parts(self, done):
        dataset = Dataset.open(dataset_folder(done, done.data.sources[1], "train"))
        whole = np.concatenate(
            [np.fromfile(p, dataset.dtype) for p in sorted(dataset.folder.rglob("*.bin")) if "parts/" in str(p)]
        )
        end = dataset.manifest.tokenizer.end_of_document
        assert np.array_equal(dataset.read(0, dataset.tokens), whole)
        starts = [0, *(np.flatnonzero(whole == end) + 1).tolist()]
        assert [dataset.document_start(d) for d in range(dataset.documents + 1)] == starts
        owner = np.repeat(np.arange(dataset.documents), np.diff(starts))
        chance = np.random.default_rng(0)
        for _ in range(200):
            a, b = sorted(chance.integers(0, dataset.tokens + 1, 2).tolist())
            assert np.array_equal(dataset.read(a, b - a), whole[a:b])
            assert dataset.document_starts(a, b - a).tolist() == [s for s in starts[:-1] if a <= s < b]
            if a < dataset.tokens:
                assert dataset.document_at(a) == owner[a]
        for start, count in ((-1, 2), (dataset.tokens, 1), (0, dataset.tokens + 1)):
            with pytest.raises(IndexError):
                dataset.read(start, count)

    def test_special_token_text_forges_nothing(self, tmp_path):
        path = tmp_path / "a.jsonl"
        texts = ["<|endoftext|>", "a<|endoftext|>b" * 5, "plain"] * 10
        path.write_bytes(b"".join(orjson.dumps({"text": f"{t}{i}"}) + b"\n" for i, t in enumerate(texts)))
        config = make_config(tmp_path, [{"name": "s", "type": "jsonl", "paths": [str(path)]}], heldout=0)
        assert preprocess(config).documents == 30
        dataset = Dataset.open(dataset_folder(config, config.data.sources[0], "train"))
        assert int((dataset.read(0, dataset.tokens) == run_tokenizer(config).end_of_document).sum()) == 30
        assert verify(dataset.folder).problems == []


class TestSame:
    """The datasets are a function of the input and the config."""

    def test_for_any_number_of_workers(self, done, sources, tmp_path):
        config = make_config(tmp_path, sources, preprocess={"workers": 3})
        preprocess(config)
        assert datasets(config) == datasets(done)

    def test_wherever_the_corpus_lies(self, done, corpus, tmp_path):
        (tmp_path / "elsewhere").symlink_to(corpus)
        config = make_config(tmp_path, both(tmp_path / "elsewhere"))
        preprocess(config)
        assert datasets(config) == datasets(done)

    def test_another_seed_is_another_order_of_the_same_documents(self, done, sources, tmp_path):
        kept = {"path": str(done.data_dir / "tokenizer")}
        other = make_config(tmp_path, sources, tokenizer=kept, preprocess={"seed": 8})
        preprocess(other)
        for source in other.data.sources:
            for split in ("train", "heldout"):
                a, b = (Dataset.open(dataset_folder(config, source, split)) for config in (done, other))
                assert a.fingerprint != b.fingerprint
                ids = [sorted(d.provenance(i)[3] for i in range(d.documents)) for d in (a, b)]
                assert ids[0] == ids[1]

    def test_the_split_is_stable_when_data_is_added(self, done, sources, corpus, tmp_path):
        """The documents that were held out are still, and no others of the old ones."""
        more = tmp_path / "more.jsonl"
        more.write_bytes((corpus / "lines.jsonl").read_bytes() + b'{"text": "new"}\n' * 3)
        config = make_config(
            tmp_path, [sources[1] | {"paths": [str(more)]}], tokenizer={"path": str(done.data_dir / "tokenizer")}
        )
        preprocess(config)
        old, new = (Dataset.open(dataset_folder(c, done.data.sources[1], "heldout")) for c in (done, config))
        hashes = [{d.provenance(i)[3] for i in range(d.documents)} for d in (old, new)]
        new_ids = {
            xxhash.xxh3_64_intdigest(f"more.jsonl@{(corpus / 'lines.jsonl').stat().st_size + 16 * i}".encode())
            for i in range(3)
        }
        assert hashes[1] - new_ids == hashes[0]


class TestTokenizerOfTheRun:
    def test_a_loaded_one_is_kept(self, done, sources, tmp_path):
        kept = done.data_dir / "tokenizer"
        config = make_config(tmp_path, sources, tokenizer={"path": str(kept)})
        preprocess(config)
        assert run_tokenizer(config).fingerprint == run_tokenizer(done).fingerprint
        assert datasets(config) == datasets(done)

    def test_not_there_yet(self, sources, tmp_path):
        with pytest.raises(UserError, match="run `pipeline preprocess` first"):
            run_tokenizer(make_config(tmp_path, sources))

    def test_trained_on_a_sample(self, sources, tmp_path):
        """Of the training split only, of about the size asked for, and another for another seed."""

        def sample(config):
            files = find_source_files(config)
            return sample_texts(config, files, find_splits(config, Console(quiet=True), files))

        samples = []
        for seed in (7, 8):
            config = make_config(tmp_path, sources, tokenizer={"train": {"max_bytes": 5000}}, preprocess={"seed": seed})
            texts = list(sample(config))
            assert not any(is_heldout(text.encode(), 0.2) for text in texts)
            samples.append(texts)
        config = make_config(tmp_path, sources)
        whole = list(sample(config))
        assert sorted(whole) == sorted(set(whole))
        assert all(set(sample) < set(whole) for sample in samples)
        assert samples[0] != samples[1]

    def test_vocabulary_of_65536(self, tmp_path):
        from tests.data.tokenization.test_tokenizer import byte_vocabulary, write

        vocab = byte_vocabulary() | {f"Ġ#{i}": i for i in range(256, 65_534)} | {"zebra": 65_534}
        tokenizer = write(tmp_path / "t.json", vocab, ignore_merges=True)
        (tmp_path / "a.txt").write_text("zebra")
        config = make_config(
            tmp_path, [{"name": "s", "paths": [str(tmp_path / "a.txt")]}], tokenizer={"path": str(tokenizer)}, heldout=0
        )
        preprocess(config)
        dataset = Dataset.open(dataset_folder(config, config.data.sources[0], "train"))
        assert dataset.dtype == np.dtype("<i4")
        assert dataset.read(0, 2).tolist() == [65_534, 65_535]
        assert verify(config.data_dir).problems == []


class TestDatasetSources:
    def test_another_runs_dataset(self, done, tmp_path):
        made = done.data_dir
        config = make_config(
            tmp_path,
            [{"name": "again", "dataset": str(made / "t")}],
            tokenizer={"path": str(made / "t" / "train" / "tokenizer.json")},
        )
        report = preprocess(config)
        assert report.sources == []
        assert dataset_folder(config, config.data.sources[0], "heldout") == made / "t" / "heldout"
        assert run_tokenizer(config).fingerprint == run_tokenizer(done).fingerprint

    def test_another_tokenizer_is_refused(self, done, corpus, sources, tmp_path):
        config = make_config(
            tmp_path, [sources[1], {"name": "again", "dataset": str(done.data_dir / "t")}], heldout=0.5
        )
        with pytest.raises(UserError, match=r"data\.sources\.1\.dataset: .* another tokenizer"):
            preprocess(config)

    def test_nothing_to_train_a_tokenizer_on(self, done, tmp_path):
        config = make_config(tmp_path, [{"name": "again", "dataset": str(done.data_dir / "t")}])
        with pytest.raises(UserError, match=r"tokenizer\.train: no source has paths"):
            preprocess(config)

    def test_not_a_source_folder(self, done, tmp_path):
        kept = {"path": str(done.data_dir / "tokenizer")}
        for folder in (done.data_dir / "t" / "train", tmp_path / "none"):
            config = make_config(tmp_path, [{"name": "again", "dataset": str(folder)}], tokenizer=kept)
            with pytest.raises(UserError, match=r"data\.sources\.0\.dataset: .* no folder train/"):
                preprocess(config)


def test_empty_splits_are_legal(sources, tmp_path):
    config = make_config(tmp_path, sources, heldout=0)
    preprocess(config)
    dataset = Dataset.open(dataset_folder(config, config.data.sources[0], "heldout"))
    assert (dataset.documents, dataset.tokens, dataset.document_start(0)) == (0, 0, 0)
    assert verify(config.data_dir).problems == []
