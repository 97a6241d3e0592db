"""What a message tells to do about damage is done, and helps; and a dataset of other settings is not trained on."""

import os
import re
import shutil

import pytest

from pipeline.common.errors import UserError
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.manifest import REPAIR, REPAIR_DAMAGED
from pipeline.data.datasets.open import open_datasets
from pipeline.data.datasets.verify import verify
from pipeline.data.loading import loader
from pipeline.data.preprocess.run_file_check import check_run_file
from pipeline.data.preprocess.run_tokenizer import run_tokenizer
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.inspect import inspect
from tests.data.runs import make_config, tree
from tests.tiny import pipeline


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def read_all(folder):
    dataset = Dataset.open(folder)
    dataset.read(0, dataset.tokens)
    for document in range(dataset.documents):
        dataset.provenance(document)


class TestDatasets:
    @pytest.mark.first(2)
    @pytest.mark.parametrize("name", ["parts/00000/00000001.bin", "parts/00000/00000001.idx", "manifest.json"])
    @pytest.mark.parametrize("how", ["cut", "missing"])
    def test_cut_or_missing(self, config, name, how):
        before = tree(config.data_dir)
        path = config.data_dir / "t" / "train" / name
        os.truncate(path, path.stat().st_size - 2) if how == "cut" else path.unlink()
        with pytest.raises(UserError, match=r"run `pipeline preprocess"):
            read_all(path.parents[2] if "parts" in name else path.parent)
        preprocess(config)
        assert tree(config.data_dir) == before

    @pytest.mark.parametrize("name", ["parts.bin", "parts/00000/00000001.prov"])
    def test_missing(self, config, name):
        before = tree(config.data_dir)
        folder = config.data_dir / "t" / "train"
        (folder / name).unlink()
        with pytest.raises(UserError, match=re.escape(f"{folder / name} is missing; ")):
            read_all(folder)
        preprocess(config)
        assert tree(config.data_dir) == before

    def test_parts_of_another_manifest(self, config):
        before = tree(config.data_dir)
        flip(config.data_dir / "t" / "train" / "parts.bin")
        with pytest.raises(UserError, match=re.escape(REPAIR)):
            read_all(config.data_dir / "t" / "train")
        preprocess(config)
        assert tree(config.data_dir) == before

    def test_tokenizer_of_a_dataset(self, config):
        before = tree(config.data_dir)
        path = config.data_dir / "t" / "train" / "tokenizer.json"
        path.write_text("{")
        with pytest.raises(UserError, match=re.escape(REPAIR)):
            inspect(path.parent)
        preprocess(config)
        assert tree(config.data_dir) == before

    @pytest.mark.first(3)
    @pytest.mark.parametrize(
        "name",
        [f"train/parts/00000/00000001.{suffix}" for suffix in ("bin", "idx", "prov")]
        + ["train/manifest.json", "heldout/parts.bin", "train/tokenizer.json", "plan.json"]
        + ["receipts/00000/00000001.json"],
    )
    def test_verify_says_it_once_and_it_helps(self, config, name):
        before = tree(config.data_dir)
        path = config.data_dir / "j" / name
        if path.suffix == ".json":
            path.write_text("{")
        else:
            flip(path)
        assert any(str(path) in problem for problem in verify(config.data_dir).problems)
        assert not any(REPAIR in problem for problem in verify(config.data_dir).problems)
        path.unlink()
        preprocess(config)
        assert tree(config.data_dir) == before
        assert verify(config.data_dir).problems == []

    @pytest.mark.guard
    def test_on_the_command_line(self, config):
        path = config.data_dir / "j" / "train" / "parts" / "00000" / "00000001.bin"
        flip(path)
        result = pipeline("data", "verify", config.data_dir)
        assert result.returncode == 1
        assert result.stderr.splitlines()[-1] == f"to repair: {REPAIR_DAMAGED}"
        assert result.stderr.count(REPAIR_DAMAGED) == 1
        path.unlink()
        preprocess(config)
        result = pipeline("data", "verify", config.data_dir)
        assert result.returncode == 0
        assert re.search(r": 4 datasets, \d+ parts, 2 plans, \d+ receipts: everything is as it", result.stdout)

    @pytest.mark.parametrize(
        "name", ["train/manifest.json", "heldout/parts.bin", "train/tokenizer.json", "report.json"]
    )
    def test_what_was_written_anew_is_said(self, config, name, capsys):
        path = config.data_dir / "t" / name
        flip(path)
        capsys.readouterr()
        preprocess(config)
        shown = capsys.readouterr().out
        anew = path if name == "report.json" else path.parent
        assert f"all units were complete; wrote what was missing or damaged: {anew}\n" in shown
        preprocess(config)
        assert "preprocess: complete; " in capsys.readouterr().out


class TestTokenizerOfTheRun:
    @pytest.mark.first(1)
    @pytest.mark.parametrize("kind", ["train", "path"])
    @pytest.mark.parametrize("damage", ["garbled", "other ids", "missing"])
    def test_removing_the_folder_helps(self, config, sources, done, tmp_path, kind, damage):
        if kind == "path":
            kept = {"path": str(done.data_dir / "tokenizer")}
            config = make_config(tmp_path, sources, tokenizer=kept, dir=str(tmp_path / "loaded"))
            preprocess(config)
        before = tree(config.data_dir)
        path = config.data_dir / "tokenizer" / "tokenizer.json"
        if damage == "garbled":
            path.write_text("{")
        elif damage == "missing":
            path.unlink()
        else:
            other = make_config(tmp_path, sources, tokenizer={"train": {"vocab_size": 300}}, dir=str(tmp_path / "o"))
            preprocess(other)
            shutil.copy(other.data_dir / "tokenizer" / "tokenizer.json", path)
        for use in (run_tokenizer, preprocess):
            with pytest.raises(UserError, match=rf"remove {path.parent}, then run `pipeline preprocess"):
                use(config)
        shutil.rmtree(path.parent)
        preprocess(config)
        assert tree(config.data_dir) == before


class TestOtherSettings:
    """Training opens datasets by name; they must be those that the run file describes."""

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"heldout": 0.3}, "data.splits: {'heldout': '0.2'} then, {'heldout': '0.3'} now"),
            ({"preprocess": {"unit_bytes": 5000}}, "data.preprocess.unit_bytes: 4000 then, 5000 now"),
            ({"preprocess": {"seed": 8}}, "data.preprocess.seed: 7 then, 8 now"),
            ({"source": {"text_key": "body"}}, "text_key: 'text' then, 'body' now"),
            ({"tokenizer": {"train": {"vocab_size": 300}}}, "tokenizer.train changed since it was trained"),
            ({"tokenizer": {"train": {"vocab_size": 400}, "end_of_document": "<eod>"}}, "tokenizer.end_of_document"),
        ],
    )
    def test_are_refused(self, config, sources, tmp_path, change, said):
        change = dict(change)
        other = make_config(tmp_path, [sources[0], sources[1] | change.pop("source", {})], **change)
        with pytest.raises(UserError, match=re.escape(said)):
            check_run_file(other, open_datasets(other, "train"))
        with pytest.raises(UserError, match="remove"):  # which is where the message sends to
            preprocess(other)

    def test_another_tokenizer_file(self, config, sources, tmp_path):
        other = make_config(tmp_path, sources, tokenizer={"train": {"vocab_size": 300}}, dir=str(tmp_path / "o"))
        preprocess(other)
        loaded = make_config(tmp_path, sources, tokenizer={"path": str(other.data_dir / "tokenizer")})
        with pytest.raises(UserError, match="has other ids than the tokenizer kept there"):
            check_run_file(loaded, open_datasets(loaded, "train"))
        kept = make_config(tmp_path, sources, tokenizer={"path": str(config.data_dir / "tokenizer")})
        check_run_file(kept, open_datasets(kept, "train"))

    def test_what_does_not_decide_the_content_may_change(self, config, corpus, sources, tmp_path):
        moved = make_config(
            tmp_path,
            [sources[0] | {"paths": ["/gone/**/*.txt"]}, sources[1]],
            seed=8,
            preprocess={"workers": 2, "on_error": "fail", "max_error_rate": 0.5},
        )
        check_run_file(moved, open_datasets(moved, "train"))
        assert loader.open_loader(moved, open_datasets(moved, "train")).names == ["j", "t"]

    def test_a_dataset_of_another_run_is_what_it_is(self, config, tmp_path):
        other = make_config(
            tmp_path,
            [{"name": "again", "dataset": str(config.data_dir / "j")}],
            tokenizer={"path": str(config.data_dir / "tokenizer")},
            heldout=0.5,
            dir=str(tmp_path / "other"),
        )
        preprocess(other)
        check_run_file(other, open_datasets(other, "train"))
        assert loader.open_loader(other, open_datasets(other, "train")).names == ["again"]

    def test_the_seed_of_the_run_leaves_datasets_as_they_are(self, config, sources, tmp_path):
        before = tree(config.data_dir)
        other = make_config(tmp_path / "other", sources, seed=8)
        other = other.model_copy(update={"data": other.data.model_copy(update={"dir": config.data_dir})})
        assert preprocess(other).units_done == 0
        assert tree(config.data_dir) == before
