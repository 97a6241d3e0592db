"""A second run of the stage on one data folder: it does what is missing, and refuses to mix."""

import gzip
import os
import shutil
import subprocess
import sys
import time
from collections import Counter

import pytest
from rich.console import Console

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.data.datasets.verify import verify
from pipeline.data.preprocess import source_plan
from pipeline.data.preprocess.run_tokenizer import run_tokenizer, tokenizer_folder
from pipeline.data.preprocess.source_plan import make_plan, source_job
from pipeline.data.preprocess.split_counts import find_splits
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.preprocess.tokenize_unit import UnitJob, WorkerContext
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.data.work.units import find_source_files
from tests.data import mixed
from tests.data.runs import both, make_config, tree, write_jsonl


class TestWhatIsMissing:
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
        script = "import sys; from pathlib import Path; from pipeline.common import storage\n"
        script += "for name in sys.argv[1:]: storage.temporary(Path(name)).touch()"
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
        encode = Tokenizer.encode_flat

        def reversed_ids(self, texts):
            ids, lengths = encode(self, texts)
            return ids[::-1].copy(), lengths[::-1].copy()

        monkeypatch.setattr(Tokenizer, "encode_flat", reversed_ids)
        files = find_source_files(config)
        splits = find_splits(config, Console(quiet=True), files)
        made = make_plan(files[0], run_tokenizer(config), config, splits["t"])
        job = UnitJob(source_job(made, config, "start over"), made.units[1])
        bench = WorkerContext(tokenizer_folder(config), 0.0)
        with pytest.raises(UserError, match=r"unit 1 of t .* gave other tokens than when .*00000001\.json was written"):
            job.run(bench, lambda _: None)
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

    @pytest.mark.guard
    def test_touched_files_of_all_kinds(self, tmp_path):
        """Links of compressed files and tables are read again one by one."""
        corpus = mixed.write(tmp_path / "corpus")
        settings = {"unit_bytes": 4000, "max_error_rate": 0.1}
        config = make_config(tmp_path, mixed.sources(corpus), preprocess=settings)
        preprocess(config)
        before = tree(config.data_dir)
        for path in corpus.rglob("*.*"):
            os.utime(path, ns=(time.time_ns() + 10**9,) * 2)
        assert preprocess(config).units_done == 0
        after = tree(config.data_dir)
        changed = {name for name in before if before[name] != after[name]}
        assert changed == {
            name for name in before if "/receipts/" in name and name.endswith("json") and "rej" not in name
        }

    @pytest.mark.first(1)
    @pytest.mark.parametrize("where", [0, -1])
    def test_a_change_in_any_link_is_found(self, tmp_path, corpus, where):
        """Stored without compression, so that the file stays as long as it was."""
        lines = (corpus / "lines.jsonl").read_bytes().splitlines(keepends=True)
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(gzip.compress(b"".join(lines), 0))
        config = make_config(tmp_path, [{"name": "s", "type": "jsonl", "paths": [str(path)]}])
        preprocess(config)
        assert len(list((config.data_dir / "s").glob("receipts/*/*.json"))) > 5
        before = tree(config.data_dir)
        lines[where] = lines[where].replace(b'"r', b'"q', 1)
        path.write_bytes(gzip.compress(b"".join(lines), 0))
        with pytest.raises(
            UserError, match=r"a\.jsonl\.gz.* changed since it was tokenized; restore the files, or remove"
        ):
            preprocess(config)
        after = tree(config.data_dir)
        assert {name for name in before if before[name] != after[name]} <= {n for n in before if "/receipts/" in n}

    @pytest.mark.first(1)
    @pytest.mark.parametrize("shuffle", ["unit", "global"])
    def test_a_round_reads_each_receipt_once(self, tmp_path, monkeypatch, shuffle):
        """Receipts with rejected records among them, which are collected from the receipts as well."""
        path = write_jsonl(tmp_path / "a.jsonl", 60)
        path.write_bytes(path.read_bytes() + b"nonsense")
        settings = {"max_error_rate": 0.1, "shuffle": shuffle}
        config = make_config(tmp_path, [{"name": "s", "type": "jsonl", "paths": [str(path)]}], preprocess=settings)
        found = Counter()
        get_json = storage.get_json

        def getting(path, *keys):
            value = get_json(path, *keys)
            if path.parent.parent == config.data_dir / "s" / "receipts":
                found[path.name] += 1
            return value

        monkeypatch.setattr(storage, "get_json", getting)
        report = preprocess(config)
        assert report.rejected == {"s": {"invalid JSON": 1}}
        assert len(found) == len(list(config.data_dir.glob("s/receipts/00000/*.json"))) > 2
        # Before a global shuffle they are read once more, when no other command can change them.
        assert set(found.values()) == {1 if shuffle == "unit" else 2}
        found.clear()
        assert preprocess(config).units_done == 0
        assert set(found.values()) == {1}

    def test_a_dataset_that_changed_is_found(self, config):
        part = config.data_dir / "j" / "train" / "parts" / "00000" / "00000000.bin"
        data = bytearray(part.read_bytes())
        data[0] ^= 1
        part.write_bytes(data)
        (problem, *_) = verify(config.data_dir).problems
        assert str(part) in problem


class TestOtherPlan:
    """Whatever decides the tokens is compared with the plan, and named."""

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"preprocess": {"seed": 8}, "tokenizer": "same"}, "data.preprocess.seed: 7 then, 8 now"),
            ({"heldout": 0.3, "tokenizer": "same"}, "data.splits: {'heldout': '0.2'} then, {'heldout': '0.3'} now"),
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

    def test_every_setting_that_decides_is_named(self, config, sources, tmp_path):
        kept = {"path": str(config.data_dir / "tokenizer" / "tokenizer.json")}
        changes = {
            "data.preprocess.max_document_bytes": {"preprocess": {"max_document_bytes": 2000}},
            "data.preprocess.on_long_document": {"preprocess": {"on_long_document": "reject"}},
            "data.preprocess.shuffle": {"preprocess": {"shuffle": "global"}},
            "data.split_by": {"split_by": "id"},
        }
        before = tree(config.data_dir)
        for name, change in changes.items():
            with pytest.raises(UserError, match=rf"made from other input or settings.*\n +{name}: .* then, .* now\n"):
                preprocess(make_config(tmp_path, sources, tokenizer=kept, **change))
        for name, change in {"metadata": {"metadata": ["url"]}, "id_key": {"id_key": "key"}}.items():
            with pytest.raises(UserError, match=rf"\n +{name}: .* then, .* now\n"):
                preprocess(make_config(tmp_path, [sources[1] | change], tokenizer=kept))
        assert tree(config.data_dir) == before

    def test_another_tokenizer_of_the_same_size_is_named(self, config, sources, tmp_path):
        other = make_config(tmp_path, sources, tokenizer={"train": {"vocab_size": 300}}, dir=str(tmp_path / "o"))
        preprocess(other)
        before = tree(config.data_dir)
        path = str(other.data_dir / "tokenizer" / "tokenizer.json")
        with pytest.raises(UserError, match=rf"{path} has other ids than the tokenizer kept there"):
            preprocess(make_config(tmp_path, sources, tokenizer={"path": path}))
        shutil.rmtree(config.data_dir / "tokenizer")
        with pytest.raises(UserError, match=r"tokenizer \(fingerprint\): '\w+' then, '\w+' now"):
            preprocess(make_config(tmp_path, sources, tokenizer={"path": path}))
        assert tree(config.data_dir) == {name: data for name, data in before.items() if "tokenizer/" not in name[:10]}

    def test_another_version_of_the_stage_is_named(self, config, monkeypatch):
        """The code of a later version that writes other bytes."""
        monkeypatch.setattr(source_plan, "CODE_VERSION", "next")
        before = tree(config.data_dir)
        with pytest.raises(UserError, match="version of the stage: '.*' then, 'next' now"):
            preprocess(config)
        assert tree(config.data_dir) == before

    def test_a_changed_file_is_named_with_its_sizes(self, corpus, config, tmp_path):
        copy = shutil.copytree(corpus, tmp_path / "copy")
        kept = {"path": str(config.data_dir / "tokenizer" / "tokenizer.json")}
        (copy / "text" / "0" / "00000.txt").write_text("shorter")
        (copy / "text" / "0" / "99999.txt").write_text("new")
        with pytest.raises(UserError) as error:
            preprocess(make_config(tmp_path, both(copy)[:1], tokenizer=kept))
        assert "files added: 1, the first is 0/99999.txt" in str(error.value)
        assert "files changed: 1, the first is 0/00000.txt (" in str(error.value)
        assert " bytes then, 7 now)" in str(error.value)

    def test_settings_that_do_not_decide_the_bytes_may_change(self, config, sources, tmp_path):
        other = make_config(
            tmp_path, sources, seed=8, preprocess={"workers": 2, "on_error": "fail", "max_error_rate": 0.5}
        )
        assert preprocess(other).units_done == 0
