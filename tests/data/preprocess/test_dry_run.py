"""What there is to do and how far it is, by `--dry-run` and `--status`: from files alone, and nothing is written."""

import bz2
import gzip
import json
import lzma
import subprocess
from contextlib import suppress

import pytest

from pipeline.common.errors import UserError
from pipeline.config.base import parse_count
from pipeline.data.curate.stage import curate
from pipeline.data.preprocess.stage import preprocess
from tests.data import mixed
from tests.data.runs import make_config, write_jsonl, write_text
from tests.data.stage import receipts, start, wait_for, write_run_file
from tests.tiny import pipeline


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return mixed.write(tmp_path_factory.mktemp("corpus"), scale=4)


@pytest.fixture
def config(corpus, tmp_path):
    settings = {"unit_bytes": 16_000, "max_error_rate": 0.1, "workers": 2}
    return make_config(tmp_path, mixed.sources(corpus), preprocess=settings, splits={"heldout": "20 documents"})


def rows(shown):
    """Cells of the table by source."""
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines() if "│" in line]
    return {row[0]: row[1:] for row in cells}


def times(folder):
    return {str(path): path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}


@pytest.mark.guard
def test_nothing_is_written_and_its_units_are_those_of_the_plan(config, corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    before = times(tmp_path), times(corpus)
    preprocess(config, dry_run=True)
    assert (times(tmp_path), times(corpus)) == before
    shown = capsys.readouterr().out
    assert "All documents are read twice, because data.splits has numbers of documents." in shown
    preprocess(config)
    report = capsys.readouterr().out
    assert "counting all documents" in report
    table = rows(shown)
    for source in config.data.sources:
        plan = json.loads((config.data_dir / source.name / "plan.json").read_text())
        files, size, units = table[source.name][1:4]
        assert int(units) == len(plan["units"])
        assert int(files) == len(plan["files"])
        assert int(size.replace(",", "")) == sum(size for _, _, size in plan["files"])
    # With a tokenizer the tokens are estimated from a sample, which is all of a small source.
    preprocess(config, dry_run=True)
    table = rows(capsys.readouterr().out)
    for name in ("plain", "text", "pq"):
        made = json.loads((config.data_dir / name / "report.json").read_text())["splits"]
        tokens = sum(split["tokens"] for split in made.values())
        assert abs(parse_count(table[name][4].replace(",", "")) - tokens) < 0.02 * tokens


def test_on_the_command_line(config, tmp_path):
    file = write_run_file(config, tmp_path / "run.yaml")
    before = times(tmp_path)
    result = pipeline("preprocess", file, "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "preprocess: dry run" in result.stdout
    assert times(tmp_path) == before
    result = pipeline("preprocess", file, "data.dir=other place", "--status")
    assert f"run `pipeline preprocess {file} 'data.dir=other place'` to start" in result.stdout.replace("\n", " ")


@pytest.mark.slow
def test_status_before_during_and_after(config, tmp_path):
    file = write_run_file(config, tmp_path / "run.yaml")

    def status():
        before = times(tmp_path) if not running else None
        result = pipeline("preprocess", file, "--status")
        assert result.returncode == 0, result.stderr
        assert before is None or times(tmp_path) == before
        return result.stdout

    running = False
    assert "not begun" in status()
    process = start(file)
    running = True
    wait_for(lambda: receipts(config) >= 3, process)
    process.send_signal(subprocess.signal.SIGSTOP)
    half = status()
    process.send_signal(subprocess.signal.SIGCONT)
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    running = False
    done = status()
    assert "unfinished" not in done
    for source in config.data.sources:
        folder = config.data_dir / source.name
        units = len(json.loads((folder / "plan.json").read_text())["units"])
        assert f"{source.name}: finished; {units} of {units} unit" in done
        assert f"{source.name}: finished" not in half
        splits = json.loads((folder / "report.json").read_text())["splits"]
        for split in splits.values():
            assert f"{split['tokens']:,} tokens" in done


def dry_run(root, sources, **data):
    preprocess(make_config(root, sources, **data), dry_run=True)


def lines_source(root, **keys):
    return {"name": "s", "type": "jsonl", "paths": [str(root / "a.jsonl")], **keys}


def test_some_records_are_bad(tmp_path, capsys):
    path = write_jsonl(tmp_path / "a.jsonl", 40)
    with path.open("ab") as file:
        file.write(b'{"id": 1, "content": "x: {"}\n' * 3 + b"x\n" + b'{"text": ""}\n')
    dry_run(tmp_path, [lines_source(tmp_path)])
    said = "s: 4 of 45 sampled records are bad: 3 no key 'text' (keys: 'id', 'content'), 1 invalid JSON (unexpected"
    assert said in capsys.readouterr().out


def test_all_records_are_bad(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", 12)
    write_text(tmp_path / "t", 5)
    sources = [{"name": "t", "paths": [f"{tmp_path}/t/**/*.txt"]}, lines_source(tmp_path, text_key="content")]
    with pytest.raises(UserError) as error:
        dry_run(tmp_path, sources)
    assert str(error.value) == (
        "data.sources.1 (s): 12 of 12 sampled records are bad: 12 no key 'content' (keys: 'id', 'text'); the first is "
        f"in {path}; correct data.sources.1.text_key (now 'content') or data.sources.1.type (now jsonl), or repair the "
        "files"
    )
    path.write_text("\n" * 5)  # no records at all: nothing is wrong with them
    dry_run(tmp_path, sources)


@pytest.mark.parametrize(
    ("head", "hint"),
    [
        (b"PAR1\x15\x04\xff" + bytes(90), "it looks like Parquet: type: parquet"),
        (gzip.compress(b"words " * 90), "it is gzip-compressed: name it .gz"),
        (bz2.compress(b"words " * 90), "it is bzip2-compressed: name it .bz2"),
        (lzma.compress(b"words " * 90), "it is xz-compressed: name it .xz"),
        (b"\x28\xb5\x2f\xfd" + bytes(9), "it is zstd-compressed: name it .zst"),
    ],
    ids=["parquet", "gzip", "bzip2", "xz", "zstd"],  # gzip writes the time
)
@pytest.mark.parametrize("type", ["text", "jsonl"])
def test_files_of_another_kind(tmp_path, head, hint, type):
    (tmp_path / "a.data").write_bytes(head)
    with pytest.raises(UserError, match="data.sources.0") as error:
        dry_run(tmp_path, [{"name": "s", "type": type, "paths": [f"{tmp_path}/a.data"]}])
    assert str(error.value).endswith(hint)


@pytest.mark.parametrize(
    ("content", "type", "command"),
    [
        (b'[\n {"text": "one"},\n {"text": "two"}\n]\n', "jsonl", "jq -c '.[]' {} > NEW"),
        (b'{\n  "text": "one"\n}\n', "jsonl", "jq -c . {} > NEW"),
        ('{"text": "one"}\n'.encode("utf-16"), "jsonl", "iconv -f UTF-16 -t UTF-8 {} > NEW"),
        ("one two".encode("utf-16"), "text", "iconv -f UTF-16 -t UTF-8 {} > NEW"),
    ],
    ids=["array", "lines of a record", "UTF-16 records", "UTF-16 text"],
)
def test_files_that_a_command_converts(tmp_path, capsys, content, type, command):
    path = tmp_path / "a.data"
    for compressed in (False, True):
        path = path.with_suffix(".gz" if compressed else ".data")
        path.write_bytes(gzip.compress(content) if compressed else content)
        capsys.readouterr()
        with suppress(UserError):  # if no record is good
            dry_run(tmp_path, [{"name": "s", "type": type, "paths": [str(path)]}])
        assert command.format(path) in capsys.readouterr().out


def test_text_that_is_html_is_warned_of(tmp_path, capsys):
    (tmp_path / "a.html").write_text("\n<!DOCTYPE html><html><p>words</p></html>")
    dry_run(tmp_path, [{"name": "s", "type": "text", "paths": [f"{tmp_path}/*.html"]}])
    assert "a.html looks like HTML" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "a.html").write_text("words without markup " * 20)
    dry_run(tmp_path, [{"name": "s", "type": "html", "paths": [f"{tmp_path}/*.html"]}])
    assert "a.html does not look like HTML" in " ".join(capsys.readouterr().out.split())


def test_more_bad_records_than_allowed_are_warned_of(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "one two"}\n{"text": null}\n' * 5)
    dry_run(tmp_path, [{"name": "s", "type": "jsonl", "paths": [f"{tmp_path}/a.jsonl"]}])
    assert "more than data.preprocess max_error_rate 0 allows" in " ".join(capsys.readouterr().out.split())


def test_a_compressed_file_with_the_name_of_a_table(tmp_path):
    (tmp_path / "a.parquet").write_bytes(gzip.compress(b"words"))
    with pytest.raises(UserError, match=r"damaged Parquet file, .*; it is gzip-compressed: decompress it"):
        dry_run(tmp_path, [{"name": "s", "type": "parquet", "paths": [f"{tmp_path}/a.parquet"]}])


@pytest.mark.parametrize("splits", [{"heldout": 0.2}, {"heldout": "9 documents"}])
def test_what_is_there(tmp_path, capsys, splits):
    write_jsonl(tmp_path / "a.jsonl", 60)

    def said(**settings):
        capsys.readouterr()
        data = {"splits": settings.pop("splits", splits)}
        dry_run(tmp_path, [lines_source(tmp_path)], preprocess=settings, **data)
        shown = capsys.readouterr().out.splitlines()
        return [line for line in shown if line.startswith(("s: ", "would")) and line != f"s: {tmp_path}/a.jsonl"]

    assert said() == []
    preprocess(config := make_config(tmp_path, [lines_source(tmp_path)], splits=splits))
    assert said() == ["s: finished"]
    units = len(json.loads((config.data_dir / "s" / "plan.json").read_text())["units"])
    assert units > 2
    (config.data_dir / "s" / "train" / "manifest.json").unlink()
    (config.data_dir / "s" / "receipts" / "00000" / "00000001.json").unlink()
    assert said() == [f"s: {units - 1} of {units} units are done"]

    def refusal(**settings):
        with pytest.raises(UserError) as error:
            said(**settings)
        return str(error.value)

    assert "data.preprocess.unit_bytes: 4000 then, 4096 now" in refusal(unit_bytes=4096)
    # The tokenizer was trained with this seed too.
    for text, difference in (
        (refusal(seed=5), "data.preprocess.seed: 7 then, 5 now"),
        (refusal(splits={"heldout": "5 documents"}), "data.splits: "),
    ):
        assert "the tokenizer in" in text and difference in text
    write_jsonl(tmp_path / "a.jsonl", 61)
    assert "files changed: 1, the first is a.jsonl (" in refusal()
    (config.data_dir / "s" / "plan.json").write_text("{")
    assert "plan.json" in refusal()


def test_sources_without_files_are_not_called_datasets(tmp_path, capsys):
    with pytest.raises(UserError, match=r"data\.sources\.0"):
        dry_run(tmp_path, [lines_source(tmp_path)])
    assert "nothing to do" not in capsys.readouterr().out


def test_an_unknown_time_has_its_reason(tmp_path, capsys):
    write_jsonl(tmp_path / "a.jsonl", 20)
    dry_run(tmp_path, [lines_source(tmp_path)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "the tokenizer is not trained yet, so 4 bytes per token are assumed, and the time is not known." in shown


def test_the_tokens_are_those_that_the_curation_keeps(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    long, short = "the windows of music and letters that have been garden " * 20, "be the of. " * 6
    texts = [f"{number} {long if number % 2 else short}" for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))

    def tokens(mode):
        rules = {"gopher_quality": {"min_words": 20}}
        config = make_config(tmp_path, [lines_source(tmp_path)], curate={"mode": mode, "rules": rules})
        curate(config)
        capsys.readouterr()
        preprocess(config, dry_run=True)
        shown = capsys.readouterr().out
        return parse_count(rows(shown)["s"][4].replace(",", "")), shown

    everything, shown = tokens("observe")
    assert "keeps" not in shown
    kept, shown = tokens("apply")
    share = sum(len(line) for line in texts[1::2]) / sum(map(len, texts))
    assert f"s: the tokens are those of the documents that data.curate keeps, {100 * share:.1f} % of the text" in shown
    assert kept == pytest.approx(share * everything, rel=0.01)


def test_nothing_but_datasets_made_before(tmp_path, capsys):
    write_jsonl(tmp_path / "a.jsonl", 60)
    made = make_config(tmp_path, [lines_source(tmp_path)])
    preprocess(made)
    kept = {"path": str(made.data_dir / "tokenizer" / "tokenizer.json")}
    source = {"name": "s", "dataset": str(made.data_dir / "s")}
    config = make_config(tmp_path, [source], dir=str(tmp_path / "other"), tokenizer=kept)
    capsys.readouterr()
    for is_dry_run in (True, False):
        preprocess(config, dry_run=is_dry_run)
        assert capsys.readouterr().out == "nothing to do: all sources are existing datasets\n"
