"""The stage on small corpora: its datasets against a plain tokenization, and what it says to bad input."""

import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import orjson
import pytest
import xxhash

from pipeline.data.dataset import Dataset
from pipeline.data.manifest import verify
from pipeline.data.plan import find_source_files, make_plan
from pipeline.data.preprocess import _missing, dataset_folder, preprocess, run_tokenizer
from pipeline.data.tokenizer import Tokenizer
from pipeline.data.unit import is_heldout, tokenize_unit
from pipeline.errors import UserError
from tests.data.runs import datasets, make_config, tree, write_jsonl, write_text


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpus")
    write_text(root / "text", 90)
    write_jsonl(root / "lines.jsonl", 150, seed=1)
    return root


SOURCES = [
    {"name": "t", "paths": ["text/**/*.txt"]},
    {"name": "j", "type": "jsonl", "paths": ["lines.jsonl"]},
]


@pytest.fixture
def sources(corpus):
    return [source | {"paths": [str(corpus / source["paths"][0])]} for source in SOURCES]


@pytest.fixture(scope="module")
def done(corpus, tmp_path_factory):
    """(config, report) of a finished run."""
    sources = [source | {"paths": [str(corpus / source["paths"][0])]} for source in SOURCES]
    config = make_config(tmp_path_factory.mktemp("done"), sources)
    return config, preprocess(config)


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
        config, _ = done
        tokenizer = run_tokenizer(config)
        expected = {
            "t": {str(p.relative_to(corpus / "text")): p.read_text() for p in (corpus / "text").rglob("*.txt")},
            "j": {r["id"]: r["text"] for r in map(orjson.loads, (corpus / "lines.jsonl").read_bytes().splitlines())},
        }
        for source in config.data.sources:
            by_hash = {xxhash.xxh3_64_intdigest(i.encode()): text for i, text in expected[source.name].items()}
            seen = {}
            for split in ("train", "heldout"):
                dataset = Dataset.open(dataset_folder(config, source, split))
                for document, text in texts_of(dataset, tokenizer).items():
                    id_hash = dataset.provenance(document)[3]
                    assert id_hash not in seen
                    seen[id_hash] = text
                    assert is_heldout(text.encode(), 0.2) == (split == "heldout")
            assert seen == by_hash

    def test_totals(self, done, corpus):
        config, report = done
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
        config, _ = done
        dataset = Dataset.open(dataset_folder(config, config.data.sources[1], "train"))
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
        config, _ = done
        plan = json.loads((config.data_dir / "j" / "plan.json").read_text())
        starts = [unit[0][1] for unit in plan["units"]]
        assert sorted(starts) == [i * 4000 for i in range(len(starts))]
        assert starts != sorted(starts)

    def test_row_and_unit_lead_back_to_the_line(self, done, corpus):
        config, _ = done
        plan = json.loads((config.data_dir / "j" / "plan.json").read_text())
        dataset = Dataset.open(dataset_folder(config, config.data.sources[1], "train"))
        raw = (corpus / "lines.jsonl").read_bytes()
        texts = texts_of(dataset, run_tokenizer(config))
        for document in range(0, dataset.documents, 7):
            unit, row, _, _ = dataset.provenance(document)
            ((_, start, _),) = plan["units"][unit]
            skip = raw.index(b"\n", start - 1) + 1 if start else 0
            assert orjson.loads(raw[skip:].splitlines()[row])["text"] == texts[document]

    def test_verified_and_open_by_several_names(self, done):
        config, _ = done
        for folder in (config.data_dir, config.data_dir / "t", config.data_dir / "t" / "train"):
            assert verify(folder).problems == []

    def test_dataset_reads_across_parts(self, done):
        config, _ = done
        dataset = Dataset.open(dataset_folder(config, config.data.sources[1], "train"))
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
        assert datasets(config) == datasets(done[0])

    def test_wherever_the_corpus_lies(self, done, corpus, tmp_path):
        (tmp_path / "elsewhere").symlink_to(corpus)
        there = [s | {"paths": [str(tmp_path / "elsewhere" / s["paths"][0])]} for s in SOURCES]
        config = make_config(tmp_path, there)
        preprocess(config)
        assert datasets(config) == datasets(done[0])

    def test_another_seed_is_another_order_of_the_same_documents(self, done, sources, tmp_path):
        kept = {"path": str(done[0].data_dir / "tokenizer")}
        other = make_config(tmp_path, sources, tokenizer=kept, preprocess={"seed": 8})
        preprocess(other)
        for source in other.data.sources:
            for split in ("train", "heldout"):
                a, b = (Dataset.open(dataset_folder(config, source, split)) for config in (done[0], other))
                assert a.fingerprint != b.fingerprint
                ids = [sorted(d.provenance(i)[3] for i in range(d.documents)) for d in (a, b)]
                assert ids[0] == ids[1]

    def test_the_split_is_stable_when_data_is_added(self, done, sources, corpus, tmp_path):
        """The documents that were held out are still, and no others of the old ones."""
        more = tmp_path / "more.jsonl"
        more.write_bytes((corpus / "lines.jsonl").read_bytes() + b'{"text": "new"}\n' * 3)
        config = make_config(
            tmp_path, [sources[1] | {"paths": [str(more)]}], tokenizer={"path": str(done[0].data_dir / "tokenizer")}
        )
        preprocess(config)
        old, new = (Dataset.open(dataset_folder(c, done[0].data.sources[1], "heldout")) for c in (done[0], config))
        hashes = [{d.provenance(i)[3] for i in range(d.documents)} for d in (old, new)]
        new_ids = {
            xxhash.xxh3_64_intdigest(f"more.jsonl@{(corpus / 'lines.jsonl').stat().st_size + 16 * i}".encode())
            for i in range(3)
        }
        assert hashes[1] - new_ids == hashes[0]


class TestAgain:
    """A second run does what is missing and nothing else."""

    @pytest.fixture
    def config(self, done, sources, tmp_path):
        config = make_config(tmp_path, sources)
        shutil.copytree(done[0].data_dir, config.data_dir)
        return config

    def test_nothing_is_written(self, config):
        def times():
            return {str(p): p.stat().st_mtime_ns for p in config.data_dir.rglob("*")}

        before = times()
        report = preprocess(config)
        assert (report.units_done, report.documents) == (0, 240)
        assert times() == before

    @pytest.mark.parametrize("what", ["receipt", "part", "cut part", "garbled receipt", "other receipt"])
    def test_only_the_missing_unit_is_done(self, config, what):
        before = tree(config.data_dir)
        receipt = config.data_dir / "t" / "receipts" / "00000" / "00000001.json"
        part = config.data_dir / "t" / "train" / "parts" / "00000" / "00000001.bin"
        if what == "receipt":
            receipt.unlink()
        elif what == "garbled receipt":
            receipt.write_bytes(b'{"unit": 1')
        elif what == "other receipt":
            receipt.write_bytes(b'{"config_hash": ""}')
        elif what == "part":
            part.unlink()
        else:
            os.truncate(part, part.stat().st_size - 2)
        assert preprocess(config).units_done == 1
        assert tree(config.data_dir) == before

    @pytest.mark.parametrize("name", ["t/plan.json", "tokenizer/origin.json", "tokenizer/special_tokens.json"])
    @pytest.mark.parametrize("content", ["", "{}", "[]"])
    def test_damaged_files_are_named(self, config, name, content):
        (config.data_dir / name).write_text(content)
        with pytest.raises(UserError, match=name):
            preprocess(config)

    def test_what_a_killed_process_left_goes_also_when_nothing_is_missing(self, config):
        names = [str(config.data_dir / name) for name in ("tokenizer/origin.json", "t/plan.json", "t/train/parts.bin")]
        script = "import sys; from pathlib import Path; from pipeline.data import store\n"
        script += "for name in sys.argv[1:]: store.temporary(Path(name)).touch()"
        subprocess.run([sys.executable, "-c", script, *names], check=True)
        assert len(list(config.data_dir.rglob("*.tmp"))) == 3
        preprocess(config)
        assert list(config.data_dir.rglob("*.tmp")) == []

    def test_another_result_for_a_unit_leaves_the_part_that_is_there(self, config, monkeypatch):
        """Another version of the library, say: its tokens must not take the place of those that have a receipt."""
        lost = config.data_dir / "t" / "heldout" / "parts" / "00000" / "00000001.prov"
        data = lost.read_bytes()
        lost.unlink()
        before = tree(config.data_dir)
        encode = Tokenizer.encode_batch
        monkeypatch.setattr(Tokenizer, "encode_batch", lambda self, texts: [ids[::-1] for ids in encode(self, texts)])
        plan = make_plan(find_source_files(config)[0], run_tokenizer(config), config)
        (job,) = list(_missing(plan, config))
        with pytest.raises(UserError, match=r"unit 1 of t .* gave other tokens than when .*00000001\.json was written"):
            tokenize_unit(job, run_tokenizer(config), lambda _: None)
        assert tree(config.data_dir) == before
        monkeypatch.undo()
        preprocess(config)
        assert lost.read_bytes() == data

    def test_touched_files_are_compared_by_content(self, config, corpus, tmp_path, sources):
        copy = tmp_path / "copy.jsonl"
        copy.write_bytes((corpus / "lines.jsonl").read_bytes())
        other = make_config(tmp_path, [sources[1] | {"paths": [str(copy)]}], dir=str(tmp_path / "other"))
        preprocess(other)
        later = time.time_ns() + 10**9
        os.utime(copy, ns=(later, later))
        before = tree(other.data_dir)
        assert preprocess(other).units_done == 0
        after = tree(other.data_dir)
        assert {name for name in before if before[name] != after[name]} == {n for n in before if "/receipts/" in n}
        preprocess(other)
        assert tree(other.data_dir) == after  # the input was not read again
        copy.write_bytes(copy.read_bytes().replace(b"flow", b"wolf", 1))
        with pytest.raises(UserError, match=r"copy\.jsonl.*changed since it was tokenized"):
            preprocess(other)

    def test_a_dataset_that_changed_is_found(self, config):
        part = config.data_dir / "j" / "train" / "parts" / "00000" / "00000000.bin"
        data = bytearray(part.read_bytes())
        data[0] ^= 1
        part.write_bytes(data)
        (problem, *_) = verify(config.data_dir).problems
        assert str(part) in problem

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"preprocess": {"seed": 8}, "tokenizer": "same"}, "data.preprocess.seed: 7 then, 8 now"),
            ({"heldout": 0.3, "tokenizer": "same"}, "data.heldout: 0.2 then, 0.3 now"),
            ({"preprocess": {"unit_bytes": 5000}}, "unit_bytes: 4000 then, 5000 now"),
            ({"preprocess": {"seed": 8}}, "data.preprocess.seed changed since it was trained"),
            ({"tokenizer": {"train": {"vocab_size": 300}}}, "tokenizer.train changed since it was trained"),
        ],
    )
    def test_another_config_is_explained_and_refused(self, config, sources, tmp_path, change, said):
        if change.get("tokenizer") == "same":
            change = change | {"tokenizer": {"path": str(config.data_dir / "tokenizer" / "tokenizer.json")}}
        before = tree(config.data_dir)
        with pytest.raises(UserError) as error:
            preprocess(make_config(tmp_path, sources, **change))
        assert said in str(error.value)
        assert "remove" in str(error.value)
        assert tree(config.data_dir) == before

    def test_other_files_are_explained_and_refused(self, config, corpus, sources, tmp_path):
        kept = {"path": str(config.data_dir / "tokenizer" / "tokenizer.json")}
        with pytest.raises(UserError, match=r"files gone: \d+, the first is 0/00000\.txt"):
            preprocess(make_config(tmp_path, [sources[0] | {"exclude": ["0/*"]}], tokenizer=kept))
        with pytest.raises(UserError, match="text_key: 'text' then, 'body' now"):
            preprocess(make_config(tmp_path, [sources[1] | {"text_key": "body"}], tokenizer=kept))

    def test_settings_that_do_not_decide_the_bytes_may_change(self, config, sources, tmp_path):
        other = make_config(
            tmp_path, sources, seed=8, preprocess={"workers": 2, "on_error": "fail", "max_error_rate": 0.5}
        )
        assert preprocess(other).units_done == 0


class TestTokenizerOfTheRun:
    def test_a_loaded_one_is_kept(self, done, sources, tmp_path):
        kept = done[0].data_dir / "tokenizer"
        config = make_config(tmp_path, sources, tokenizer={"path": str(kept)})
        preprocess(config)
        assert run_tokenizer(config).fingerprint == run_tokenizer(done[0]).fingerprint
        assert datasets(config) == datasets(done[0])

    def test_not_there_yet(self, sources, tmp_path):
        with pytest.raises(UserError, match="run `pipeline preprocess` first"):
            run_tokenizer(make_config(tmp_path, sources))

    def test_trained_on_a_sample(self, sources, tmp_path):
        """Of the training split only, of about the size asked for, and another for another seed."""
        from pipeline.data.plan import find_source_files
        from pipeline.data.tokenizer_stage import sample_texts

        samples = []
        for seed in (7, 8):
            config = make_config(tmp_path, sources, tokenizer={"train": {"max_bytes": 5000}}, preprocess={"seed": seed})
            texts = list(sample_texts(config, find_source_files(config)))
            assert not any(is_heldout(text.encode(), 0.2) for text in texts)
            samples.append(texts)
        config = make_config(tmp_path, sources)
        whole = list(sample_texts(config, find_source_files(config)))
        assert sorted(whole) == sorted(set(whole))
        assert all(set(sample) < set(whole) for sample in samples)
        assert samples[0] != samples[1]

    def test_vocabulary_of_65536(self, tmp_path):
        from tests.data.test_tokenizer import byte_vocabulary, write

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


GOOD = [b'{"text": "some words number %d"}\n' % i for i in range(200)]


class TestBadInput:
    def jsonl(self, tmp_path, *lines, **options):
        path = tmp_path / "a.jsonl"
        path.write_bytes(b"".join(lines))
        return make_config(tmp_path, [{"name": "s", "type": "jsonl", "paths": [str(path)]}], **options)

    def test_rejected_records_are_kept_with_file_and_line(self, tmp_path):
        lines = list(GOOD)
        bad = {3: b'{"text": "cut\n', 77: b'{"no": 1}\n', 150: b'{"text": ""}\n', 199: b'{"text": "end of f'}
        for number, line in bad.items():
            lines[number] = line
        config = self.jsonl(tmp_path, *lines, preprocess={"max_error_rate": 0.1, "unit_bytes": 500})
        report = preprocess(config)
        expected = {"cut line": 2, "no key 'text'": 1, "empty document": 1}
        assert report.rejected == {"s": expected}
        assert report.documents == 196
        kept = [orjson.loads(line) for line in (config.data_dir / "s" / "rejected.jsonl").open()]
        assert [k["where"] for k in kept] == [f"{tmp_path}/a.jsonl:{number + 1}" for number in bad]
        assert [k["reason"] for k in kept] == ["cut line", "no key 'text'", "empty document", "cut line"]
        whole = (tmp_path / "a.jsonl").read_bytes()
        assert all(whole[k["byte"] :].startswith(line) for k, line in zip(kept, bad.values(), strict=True))
        assert orjson.loads((config.data_dir / "s" / "report.json").read_bytes())["rejected"] == expected

    def test_too_many(self, tmp_path):
        config = self.jsonl(tmp_path, *GOOD, b"bad\n" * 3, preprocess={"max_error_rate": 0.01})
        with pytest.raises(UserError) as error:
            preprocess(config)
        for word in (
            "3 of 203",
            "data.preprocess.max_error_rate 0.01",
            "3 invalid JSON",
            "a.jsonl:201",
            "rejected.jsonl",
        ):
            assert word in str(error.value)
        assert not (config.data_dir / "s" / "train" / "manifest.json").exists()
        # What was tokenized is kept: only the limit stands between it and its manifest.
        assert preprocess(self.jsonl(tmp_path, *GOOD, b"bad\n" * 3, preprocess={"max_error_rate": 0.5})).units_done == 0

    def test_empty_documents_are_no_errors(self, tmp_path):
        config = self.jsonl(tmp_path, *GOOD, b'{"text": ""}\n' * 50, preprocess={"on_error": "fail"})
        assert preprocess(config).rejected == {"s": {"empty document": 50}}

    def test_fail_names_the_line(self, tmp_path):
        lines = [*GOOD[:120], b'{"body": "x"}\n', *GOOD[120:]]
        config = self.jsonl(tmp_path, *lines, preprocess={"on_error": "fail", "unit_bytes": 700})
        with pytest.raises(UserError, match=r"a\.jsonl:121: no key 'text'.*keys: 'body'"):
            preprocess(config)

    def test_a_file_that_is_not_utf8(self, tmp_path):
        write_text(tmp_path / "t", 20)
        (tmp_path / "t" / "0" / "bad.txt").write_bytes(b"fine until \xe9 here")
        config = make_config(
            tmp_path, [{"name": "s", "paths": [f"{tmp_path}/t/**/*.txt"]}], preprocess={"on_error": "fail"}
        )
        with pytest.raises(UserError, match=r"bad\.txt: byte 11: not UTF-8 \(byte 0xe9 at 11"):
            preprocess(config)

    def test_an_empty_folder(self, tmp_path):
        (tmp_path / "t").mkdir()
        config = make_config(tmp_path, [{"name": "s", "paths": [f"{tmp_path}/t/**/*.txt"]}])
        with pytest.raises(UserError, match=r"data\.sources\.0\.paths: .*t/\*\*/\*\.txt.*is empty"):
            preprocess(config)
        assert not config.data_dir.exists()

    @pytest.mark.parametrize("lines", [[b'{"text": ""}\n'] * 3, [b"\n"], [b""]])
    def test_nothing_to_train_a_tokenizer_on(self, tmp_path, lines):
        with pytest.raises(UserError, match=r"tokenizer\.train: none of the 1 files"):
            preprocess(self.jsonl(tmp_path, *lines))

    @pytest.mark.parametrize("lines", [[b'{"text": ""}\n'] * 3, [b"\n"], [b""]])
    def test_nothing_to_train_on(self, tmp_path, done, lines):
        config = self.jsonl(tmp_path, *lines, tokenizer={"path": str(done[0].data_dir / "tokenizer")})
        with pytest.raises(UserError, match=r"source 's' has no document to train on"):
            preprocess(config)

    def test_a_text_key_that_no_record_has(self, tmp_path, done):
        path = tmp_path / "a.jsonl"
        path.write_bytes(b"".join(GOOD))
        source = {"name": "s", "type": "jsonl", "paths": [str(path)], "text_key": "txt"}
        config = make_config(tmp_path, [source], tokenizer={"path": str(done[0].data_dir / "tokenizer")})
        with pytest.raises(UserError, match=r"200 of 200 records are bad.*no key 'txt'.*a\.jsonl:1 "):
            preprocess(config)


class TestDatasetSources:
    def test_another_runs_dataset(self, done, tmp_path):
        made = done[0].data_dir
        config = make_config(
            tmp_path,
            [{"name": "again", "dataset": str(made / "t")}],
            tokenizer={"path": str(made / "t" / "train" / "tokenizer.json")},
        )
        report = preprocess(config)
        assert report.sources == []
        assert dataset_folder(config, config.data.sources[0], "heldout") == made / "t" / "heldout"
        assert run_tokenizer(config).fingerprint == run_tokenizer(done[0]).fingerprint

    def test_another_tokenizer_is_refused(self, done, corpus, sources, tmp_path):
        config = make_config(
            tmp_path, [sources[1], {"name": "again", "dataset": str(done[0].data_dir / "t")}], heldout=0.5
        )
        with pytest.raises(UserError, match=r"data\.sources\.1\.dataset: .* another tokenizer"):
            preprocess(config)

    def test_nothing_to_train_a_tokenizer_on(self, done, tmp_path):
        config = make_config(tmp_path, [{"name": "again", "dataset": str(done[0].data_dir / "t")}])
        with pytest.raises(UserError, match=r"tokenizer\.train: no source has paths"):
            preprocess(config)

    def test_not_a_source_folder(self, done, tmp_path):
        kept = {"path": str(done[0].data_dir / "tokenizer")}
        for folder in (done[0].data_dir / "t" / "train", tmp_path / "none"):
            config = make_config(tmp_path, [{"name": "again", "dataset": str(folder)}], tokenizer=kept)
            with pytest.raises(UserError, match=r"data\.sources\.0\.dataset: .* no folder train/"):
                preprocess(config)


def test_dry_run_writes_nothing(sources, tmp_path, capsys):
    config = make_config(tmp_path, sources)
    preprocess(config, dry_run=True)
    assert not config.data_dir.exists()
    shown = capsys.readouterr().out
    assert "units" in shown
    assert "150" not in shown.split("jsonl")[0]


def test_empty_splits_are_legal(sources, tmp_path):
    config = make_config(tmp_path, sources, heldout=0)
    preprocess(config)
    dataset = Dataset.open(dataset_folder(config, config.data.sources[0], "heldout"))
    assert (dataset.documents, dataset.tokens, dataset.document_start(0)) == (0, 0, 0)
    assert verify(config.data_dir).problems == []


def test_the_share_of_the_held_out_split():
    texts = [f"document {i}".encode() for i in range(20_000)]
    for share in (0.01, 0.2):
        held = {text for text in texts if is_heldout(text, share)}
        assert abs(len(held) - share * len(texts)) < 5 * (share * len(texts)) ** 0.5
    assert {t for t in texts if is_heldout(t, 0.01)} < held
    # Pinned: datasets of different runs agree on the side of a text.
    assert [i for i in range(24) if is_heldout(f"document {i}".encode(), 0.2)] == [3, 5, 23]
