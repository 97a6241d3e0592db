"""What is refused after the stage began: the message is followed, and the same command then succeeds."""

import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.common.errors import UserError
from pipeline.data.preprocess.run_tokenizer import run_tokenizer, tokenizer_folder
from pipeline.data.preprocess.run_units import TokenizeRun
from pipeline.data.preprocess.source_plan import make_plan, source_job
from pipeline.data.preprocess.splits import make_splits
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.preprocess.tokenize_unit import UnitJob, WorkerContext
from pipeline.data.work import frozen_plan as plan_module
from pipeline.data.work.leases import LeaseWatch, take
from pipeline.data.work.units import find_source_files
from tests.data.runs import make_config, tree, write_jsonl
from tests.data.tokenization.test_tokenizer import byte_vocabulary, write

TEXTS = [f"some words number {i}" for i in range(50)]


@pytest.fixture
def tokenizer(tmp_path):
    return {"path": str(write(tmp_path / "t.json", byte_vocabulary(), special=["<|endoftext|>"]))}


def parquet(tmp_path, name, **columns):
    pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")


def config_of(tmp_path, *, tokenizer=None, **source):
    sources = [{"name": "s", "type": "parquet", "paths": [f"{tmp_path}/*.parquet"]} | source]
    options = {"tokenizer": tokenizer} if tokenizer else {}
    return make_config(tmp_path, sources, **options)


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_file_without_the_column_is_refused_before_the_plan(tmp_path, dry_run):
    """It is not the first file, and the tokenizer is trained."""
    parquet(tmp_path, "a", text=TEXTS)
    parquet(tmp_path, "b", body=TEXTS, text=[1] * 50)
    parquet(tmp_path, "c", body=TEXTS)
    with pytest.raises(UserError, match=r"b\.parquet: column 'text' is of type int64.*exclude"):
        preprocess(config_of(tmp_path))
    assert tree(tmp_path / "run") == {}
    excluded = config_of(tmp_path, exclude=["b.parquet"])
    with pytest.raises(UserError, match=r"c\.parquet has no column 'text'; .* set text_key .* or leave .* exclude"):
        preprocess(excluded)
    if dry_run:
        preprocess(config_of(tmp_path, exclude=["b.parquet", "c.parquet"]), dry_run=True)
    else:
        assert preprocess(config_of(tmp_path, text_key="body", exclude=["a.parquet"])).documents == 100


class TestNoUnitWasBegun:
    """Plan and tokenizer give way to those of the changed run file."""

    @pytest.fixture
    def path(self, tmp_path):
        return write_jsonl(tmp_path / "a.jsonl", 50)

    def config(self, tmp_path, path, tokenizer=None, **source):
        source = {"name": "s", "type": "jsonl", "paths": [str(path)]} | source
        return make_config(tmp_path, [source], tokenizer=tokenizer or {"train": {"vocab_size": 300}})

    def refused(self, monkeypatch, config):
        """All that comes before the units."""

        def refuse(*_, **__):
            raise UserError("refused")

        with monkeypatch.context() as patch, pytest.raises(UserError, match="^refused$"):
            patch.setattr(TokenizeRun, "run", refuse)
            preprocess(config)

    def test_a_changed_key(self, tmp_path, path, monkeypatch, capsys):
        first = self.config(tmp_path, path)
        self.refused(monkeypatch, first)
        (first.data_dir / "s" / "failures.jsonl").write_text("{}\n")
        kept = {"path": str(tokenizer_folder(first) / "tokenizer.json")}
        changed = self.config(tmp_path, path, kept, id_key="key")
        capsys.readouterr()
        preprocess(changed, dry_run=True)
        assert "s: would be planned again: id_key: 'id' then, 'key' now" in capsys.readouterr().out
        assert preprocess(changed).documents == 50
        assert "s: planned again, since no unit was started (id_key: 'id' then, 'key' now)" in capsys.readouterr().out
        assert not (first.data_dir / "s" / "failures.jsonl").exists()
        with pytest.raises(UserError, match="id_key: 'key' then, 'id' now"):
            preprocess(self.config(tmp_path, path, kept))

    def test_a_changed_tokenizer(self, tmp_path, path, monkeypatch, capsys):
        """One that is trained on the files that have changed."""
        self.refused(monkeypatch, self.config(tmp_path, path))
        write_jsonl(path, 60)
        changed = self.config(tmp_path, path, {"train": {"vocab_size": 290}})
        capsys.readouterr()
        preprocess(changed, dry_run=True)
        said = capsys.readouterr().out
        assert "it would be made again: tokenizer.train changed since" in said
        assert "refused" not in said
        assert preprocess(changed).documents == 60
        assert (
            "the tokenizer is made again, since no unit was started with it (tokenizer.train" in capsys.readouterr().out
        )

    @pytest.mark.parametrize("begun", ["receipts/00000/00000000.json", "train/parts/00000/00000000.bin", "lease"])
    def test_not_where_a_unit_was_begun(self, tmp_path, path, monkeypatch, begun):
        """Not even a receipt that cannot be read, and by whatever source of the folder."""
        config = self.config(tmp_path, path)
        self.refused(monkeypatch, config)
        if begun == "lease":
            take(config.data_dir / "s", 0, LeaseWatch())
        else:
            (config.data_dir / "s" / begun).parent.mkdir(parents=True)
            (config.data_dir / "s" / begun).touch()
        before = tree(config.data_dir)
        kept = {"path": str(tokenizer_folder(config) / "tokenizer.json")}
        with pytest.raises(UserError, match="id_key: 'id' then, 'key' now"):
            preprocess(self.config(tmp_path, path, kept, id_key="key"))
        with pytest.raises(UserError, match="not the one that the run file asks for"):
            preprocess(self.config(tmp_path, path, {"train": {"vocab_size": 290}}, name="other"))
        assert tree(config.data_dir) == before

    def test_a_worker_of_the_plan_that_gave_way(self, tmp_path, path, monkeypatch):
        """It is between reading the plan and taking its lease; what it would write is of the old plan."""
        config = self.config(tmp_path, path)
        self.refused(monkeypatch, config)
        plan = make_plan(find_source_files(config)[0], run_tokenizer(config), config, make_splits(config.data))
        bench = WorkerContext(tokenizer_folder(config), 0.0)
        kept = {"path": str(tokenizer_folder(config) / "tokenizer.json")}
        self.refused(monkeypatch, self.config(tmp_path, path, kept, id_key="key"))
        before = tree(config.data_dir)
        for _ in range(2):
            with pytest.raises(UserError, match=r"plan\.json was removed, or replaced by another command"):
                UnitJob(source_job(plan, config, ""), plan.units[0]).run(bench, lambda _: None)
            assert tree(config.data_dir) == before
            (config.data_dir / "s" / "plan.json").unlink(missing_ok=True)
            before.pop("s/plan.json", None)

    def test_a_unit_that_is_begun_while_the_plan_gives_way(self, tmp_path, path, monkeypatch):
        config = self.config(tmp_path, path)
        self.refused(monkeypatch, config)
        before = tree(config.data_dir)
        begun = iter([False, True])
        monkeypatch.setattr(plan_module, "has_units", lambda _: next(begun))
        assert not plan_module.remove_unused_plan(config.data_dir / "s")
        assert tree(config.data_dir) == before


def test_a_dataset_of_another_tokenizer(tmp_path, tokenizer):
    """What the message says: the tokenizer that was trained for nothing is not in the way."""
    write_jsonl(tmp_path / "a.jsonl", 50)
    source = {"name": "s", "type": "jsonl", "paths": [f"{tmp_path}/a.jsonl"]}
    made = make_config(tmp_path, [source], tokenizer=tokenizer, dir=str(tmp_path / "made"))
    preprocess(made)
    both = [source, {"name": "d", "dataset": str(made.data_dir / "s")}]
    with pytest.raises(UserError) as error:
        preprocess(make_config(tmp_path, both))
    (path,) = re.findall(r"set tokenizer\.path: (\S+),", str(error.value))
    preprocess(make_config(tmp_path, both, tokenizer={"path": path}))


def test_a_table_that_is_refused_while_it_is_read(tmp_path, tokenizer):
    """Another unit may be done by then; the message says what is to be removed."""
    parquet(tmp_path, "a", text=TEXTS)
    parquet(tmp_path, "b", text=pa.nulls(2_000_000, pa.string()))
    with pytest.raises(UserError, match=r"b\.parquet has .* Leave it out \(exclude\)") as error:
        preprocess(config_of(tmp_path, tokenizer=tokenizer))
    excluded = config_of(tmp_path, tokenizer=tokenizer, exclude=["b.parquet"])
    (removed,) = re.findall(r"remove (\S+), which was begun with the files as they are now", str(error.value))
    assert removed == str(excluded.data_dir / "s")
    shutil.rmtree(removed)
    assert preprocess(excluded).documents == 50


@pytest.mark.parametrize("preset", ["path", "end_of_document"])
def test_a_changed_tokenizer_file_is_named_as_the_run_file_has_it(tmp_path, tokenizer, preset):
    write_jsonl(tmp_path / "a.jsonl", 50)
    source = {"name": "s", "type": "jsonl", "paths": [f"{tmp_path}/a.jsonl"]}
    config = make_config(tmp_path, [source], tokenizer=tokenizer)
    preprocess(config)
    other = str(write(tmp_path / "o.json", byte_vocabulary(), special=["<|endoftext|>", "<|end|>"]))
    changed = {"path": other} if preset == "path" else tokenizer | {"end_of_document": "<|end|>"}
    if preset != "path":
        shutil.copy(other, tokenizer["path"])
    with pytest.raises(UserError) as error:
        preprocess(make_config(tmp_path, [source], tokenizer=changed))
    said = {
        "path": f"tokenizer.path: {tokenizer['path']} then, {other} now",
        "end_of_document": "tokenizer.end_of_document: <|endoftext|> then, <|end|> now",
    }
    assert said[preset] in str(error.value)
    kept = tokenizer_folder(config) / "tokenizer.json"
    assert f"write tokenizer.path: {kept} in place of tokenizer.path {changed['path']};" in str(error.value)
    assert "tokenizer.train" not in str(error.value)
    end = {"end_of_document": "<|endoftext|>"}
    assert preprocess(make_config(tmp_path, [source], tokenizer={"path": str(kept)} | end)).units_done == 0
