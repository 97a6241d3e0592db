"""What there is to do and how far it is, by `--dry-run` and `--status`: from files alone, and nothing is written."""

import json
import subprocess

import pytest

from pipeline.data.preprocess import preprocess
from tests.data import mixed
from tests.data.runs import make_config
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


def test_nothing_is_written_and_its_units_are_those_of_the_plan(config, corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    before = times(tmp_path), times(corpus)
    preprocess(config, dry_run=True)
    assert (times(tmp_path), times(corpus)) == before
    shown = capsys.readouterr().out
    assert "All documents are read twice, because data.splits has numbers of documents." in shown
    preprocess(config)
    report = capsys.readouterr().out
    assert "looking at all documents" in report
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
        about = float(table[name][4].split()[0]) * (1000 if "k" in table[name][4] else 1)
        assert abs(about - tokens) < 0.02 * tokens


def test_on_the_command_line(config, tmp_path):
    file = write_run_file(config, tmp_path / "run.yaml")
    before = times(tmp_path)
    result = pipeline("preprocess", file, "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "preprocess: dry run" in result.stdout
    assert times(tmp_path) == before


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
    said = process.communicate(timeout=60)[0]
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
