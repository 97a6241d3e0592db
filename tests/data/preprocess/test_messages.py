"""What the stage says: to bad records, to mistakes in the config, and on the terminal."""

import io
import re
import shutil

import orjson
import pytest
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.inspect import inspect
from pipeline.data.work.progress import ProgressLine
from tests import tiers
from tests.data.runs import make_config, write_text
from tests.data.tokenization.test_tokenizer import byte_vocabulary, write

GOOD = [b'{"text": "some words number %d"}\n' % i for i in range(200)]


@pytest.fixture
def tokenizer(tmp_path):
    return {"path": str(write(tmp_path / "t.json", byte_vocabulary(), special=["<|endoftext|>"]))}


def jsonl(tmp_path, *lines, name="a.jsonl", **options):
    path = tmp_path / name
    path.write_bytes(b"".join(lines))
    return make_config(tmp_path, [{"name": "s", "type": "jsonl", "paths": [str(path)]}], **options)


class TestBadRecords:
    def test_empty_documents_are_not_among_the_bad(self, tmp_path):
        with pytest.raises(UserError) as error:
            preprocess(jsonl(tmp_path, b'{"text": ""}\n' * 3, *GOOD, b"bad\n" * 2))
        assert "2 of 205 records are bad" in str(error.value)
        assert "allows: 2 invalid JSON. The first is" in str(error.value)
        assert "a.jsonl:204 (invalid JSON)" in str(error.value)

    @pytest.mark.parametrize(
        ("lines", "heldout", "said"),
        [
            ([b"\n"], 0.2, "its files hold no records; add documents"),
            ([b'{"text": ""}\n'], 0.2, "of 1 record 1 is empty; add documents"),
            ([b"x\n", b'{"text": ""}\n'], 0, "of 2 records 1 is bad (1 invalid JSON) and 1 is empty; add documents"),
            (GOOD[:3], 0.9999, "of 3 records 3 are held out; add documents, or lower data.splits (heldout: 0.9999)"),
        ],
    )
    def test_nothing_to_train_on(self, tmp_path, tokenizer, lines, heldout, said):
        config = jsonl(tmp_path, *lines, tokenizer=tokenizer, heldout=heldout, preprocess={"max_error_rate": 1})
        with pytest.raises(UserError) as error:
            preprocess(config)
        assert str(error.value) == f"source 's' has no document to train on: {said}"

    @pytest.mark.parametrize("on_error", ["skip", "fail"])
    @pytest.mark.parametrize("kind", tiers.first(1, ["train", "path", "shared"], rest="guard"))
    def test_mended_data_goes_through_as_the_message_says(self, tmp_path, tokenizer, on_error, kind):
        trained = {"train": {"vocab_size": 300}}
        other = {"name": "other", "paths": [f"{tmp_path}/other/**/*.txt"]}
        options = {"tokenizer": tokenizer if kind == "path" else trained}
        if kind == "shared":  # another source is finished with the tokenizer that both were sampled for
            write_text(tmp_path / "other", 20)
            preprocess(make_config(tmp_path, [other], **options))
            options["tokenizer"] = {"path": str(tmp_path / "run" / "data" / "tokenizer")}
        preparation = {"preprocess": {"on_error": on_error}}
        with pytest.raises(UserError) as error:
            preprocess(jsonl(tmp_path, *GOOD, b'{"txt": 1}\n', **preparation, **options))
        removed = re.search(r"remove (\S+), which was begun with the files as they are now", str(error.value))
        assert removed is not None, str(error.value)
        assert removed[1] == str(tmp_path / "run" / "data" / ("" if kind == "train" else "s")).rstrip("/")
        shutil.rmtree(removed[1])
        assert preprocess(jsonl(tmp_path, *GOOD, **preparation, **options)).documents == 200

    def test_a_tokenizer_that_others_were_made_with_is_kept(self, tmp_path):
        """Removing all would take finished sources with it."""
        write_text(tmp_path / "other", 20)
        other = {"name": "other", "paths": [f"{tmp_path}/other/**/*.txt"]}
        bad = jsonl(tmp_path, *GOOD, b"x\n").data.sources[0].model_dump()
        with pytest.raises(UserError) as error:
            preprocess(make_config(tmp_path, [other, bad]))
        assert (tmp_path / "run" / "data" / "other" / "train" / "manifest.json").exists()
        kept = tmp_path / "run" / "data" / "tokenizer" / "tokenizer.json"
        assert f"with tokenizer.path: {kept} in place of tokenizer.train" in str(error.value)
        jsonl(tmp_path, *GOOD)
        shutil.rmtree(tmp_path / "run" / "data" / "s")
        assert preprocess(make_config(tmp_path, [other, bad], tokenizer={"path": str(kept)})).documents == 220

    def test_rejected_records_of_an_earlier_run_go(self, tmp_path):
        config = jsonl(tmp_path, *GOOD)
        preprocess(config)
        path = config.data_dir / "s" / "rejected.jsonl"
        path.write_text("{}\n")
        preprocess(config)
        assert not path.exists()


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_data_folder_that_is_a_file(tmp_path, dry_run, below):
    (tmp_path / "file").write_text("x")
    config = jsonl(tmp_path, *GOOD)
    folder = tmp_path / f"file{below}"
    config = config.model_copy(update={"data": config.data.model_copy(update={"dir": folder})})
    with pytest.raises(UserError) as error:
        preprocess(config, dry_run=dry_run)
    assert str(error.value).startswith(f"data.dir {folder}")
    assert str(error.value).endswith(f"{tmp_path / 'file'} is a file; set data.dir to a folder")


class TestTerminal:
    def test_rejected_records(self, tmp_path, capsys):
        lines = [*GOOD[:4], b"x\n", *GOOD[4:], b"y\n", b'{"text": ""}\n']
        config = jsonl(tmp_path, *lines, name=f"{'long' * 30}.jsonl", preprocess={"max_error_rate": 0.5})
        preprocess(config)
        shown = capsys.readouterr().out
        file = config.data_dir / "s" / "rejected.jsonl"
        assert f"s: 3 of 203 records rejected, see {file}\n" in shown
        assert f"  2 invalid JSON, the first is {'long' * 30}.jsonl:5\n" in shown
        assert f"  1 empty document, the first is {'long' * 30}.jsonl:203\n" in shown
        assert shown.count("rejected.jsonl") == 1

    def test_one_unit_and_nothing_held_out(self, tmp_path, tokenizer, capsys):
        preprocess(jsonl(tmp_path, GOOD[0], tokenizer=tokenizer, heldout=1e-9))
        shown = capsys.readouterr().out
        assert "tokenizing 1 unit, " in shown
        assert "s: none of 1 document went to heldout (data.splits.heldout is 1e-09); nothing to evaluate on\n" in shown

    def test_dry_run(self, tmp_path, tokenizer, capsys):
        write_text(tmp_path / "t", 20)
        config = make_config(tmp_path, [{"name": "t", "paths": [f"{tmp_path}/t/**/*.txt"]}])
        preprocess(config, dry_run=True)
        shown = capsys.readouterr().out
        assert f"output: {config.data_dir}\n" in shown
        assert "tokenizer: will be trained, 400 entries\n" in shown
        first = sorted((tmp_path / "t").rglob("*.txt"))[:3]
        assert f"t: {', '.join(map(str, first))}, and 17 more\n" in shown
        preprocess(
            make_config(tmp_path, [{"name": "t", "paths": [f"{tmp_path}/t/**/*.txt"]}], tokenizer=tokenizer),
            dry_run=True,
        )
        assert f"tokenizer: {tokenizer['path']}\n" in capsys.readouterr().out

    @pytest.mark.parametrize("width", [80, 100, 120, 160])
    def test_the_bar_fits(self, width):
        console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
        with ProgressLine(console, total_bytes=987_654_321_000, units=12_345, done_before=1) as line:
            line.advance(123_456_789_000)
            line.unit_done(45_678_901_234)
            line._bar.refresh()
        shown = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part) for part in re.split(r"[\r\n]", console.file.getvalue())]
        assert all(len(part) <= width for part in shown)
        assert "1/12,345 units" in shown[-2] or any("1/12,345 units" in part for part in shown)
        assert not any("…" in part for part in shown)
        assert any("123.5/987.7 GB" in part for part in shown)

    def test_inspect(self, tmp_path, tokenizer, capsys):
        text = "a line that is longer than any terminal that a pipe might be taken for, " * 3
        config = jsonl(
            tmp_path, *[orjson.dumps({"text": f"{text}{i}"}) + b"\n" for i in range(20)], tokenizer=tokenizer
        )
        preprocess(config)
        capsys.readouterr()
        inspect(config.data_dir, documents=2)
        shown = capsys.readouterr().out
        assert shown.index("s/train") < shown.index("s/heldout")
        assert re.search(
            rf"\n\ndocument 0: .*\n{re.escape(text)}\d+\n\ndocument 1: .*\n{re.escape(text)}\d+\n\n", shown
        )
