"""The evaluations of a run in one table, which is always made from the reports."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from pipeline.common import storage
from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.eval.perplexity import evaluate
from pipeline.eval.table import show_table, write_table
from pipeline.train.loop.trainer import train
from pipeline.train.run.folder import read_metrics
from tests import tiny


def report(step: int, loss: float | None = 2.0, weights: str = "model", **made_with: Any) -> dict[str, Any]:
    """As an evaluation leaves it."""
    scores = {"documents": 3, "targets": 9, "text_bytes": 30, "loss": loss, "perplexity": 7.5, "bits_per_byte": 0.9}
    data = {"checkpoint": f"c{step}", "data": {"sea": "1"}, "split": "heldout", "weights": weights}
    settings = data | {"sequence_length": 32, "compute": "bf16"} | made_with
    return {"step": step, "made_with": settings, "sources": {"sea": scores}, "blended": scores}


def put(run: Path, value: dict[str, Any]) -> None:
    (run / "eval").mkdir(parents=True, exist_ok=True)
    of = "-ema" if value["made_with"]["weights"] == "ema" else ""
    storage.put_json(run / "eval" / f"step-{value['step']:08d}{of}.json", value)


def rows_of_csv(run: Path) -> list[dict[str, str]]:
    with (run / "eval" / "table.csv").open() as file:
        return list(csv.DictReader(file))


def as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    show_table(load(tiny.write_run(run.parent)), Console(), as_json=True)
    value = json.loads(capsys.readouterr().out)
    assert value["run"] == str(run)
    found: list[dict[str, Any]] = value["evaluations"]
    return found


ADD = """
import sys
from pathlib import Path
from pipeline.common import storage
from pipeline.eval.table import write_table
for name in sys.argv[2:]:
    storage.put(Path(sys.argv[1], "eval", name), Path(sys.argv[1], name).read_bytes())
    write_table(Path(sys.argv[1]))
"""


def test_of_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(tiny.write_run(tmp_path, {"train.checkpoint.keep_every": 4}))
    preprocess(config)
    train(config)
    quiet = Console(quiet=True)
    reports = {step: evaluate(config, step, quiet) for step in (8, 4)}
    capsys.readouterr()

    found = as_json(config.run.dir, capsys)
    tokens = {row["step"]: row["tokens"] for row in read_metrics(config.run.dir)}
    assert [(row["step"], row["tokens"]) for row in found] == [(4, tokens[4]), (8, tokens[8])]
    for row in found:
        said = reports[row["step"]]
        assert row["loss"] == pytest.approx(said.blended.loss)
        assert row["bits_per_byte"] == pytest.approx(said.blended.bits_per_byte)
        assert {name: scores["loss"] for name, scores in row["sources"].items()} == pytest.approx(
            {name: scores.loss for name, scores in said.sources.items()}
        )
        assert not row["replaced"]
    best = min(reports, key=lambda step: reports[step].blended.loss)
    assert [row["step"] for row in found if row["best"]] == [best]

    written = rows_of_csv(config.run.dir)
    assert [int(row["step"]) for row in written] == [4, 8]
    assert float(written[1]["loss of land"]) == pytest.approx(reports[8].sources["land"].loss)
    show_table(config, Console(width=200))
    shown = capsys.readouterr().out
    assert "loss of sea" in shown
    assert sum("best" in line for line in shown.splitlines()) == 1


@pytest.mark.guard
def test_evaluations_that_end_at_once_lose_no_row(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "eval").mkdir(parents=True)
    names = []
    for step in range(10, 130, 10):
        names.append(f"step-{step:08d}.json")
        storage.put_json(run / names[-1], report(step))
    commands = [[sys.executable, "-c", ADD, str(run), *names[part::4]] for part in range(4)]
    processes = [subprocess.Popen(command) for command in commands]
    assert [process.wait(timeout=300) for process in processes] == [0] * 4
    assert [int(row["step"]) for row in rows_of_csv(run)] == list(range(10, 130, 10))


def test_a_report_that_comes_while_the_table_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    put(run, report(10))
    written: list[str] = []

    def late(file: Path, data: bytes) -> None:
        """Another process adds a report and its table just before ours takes the place of that."""
        if not written:
            put(run, report(20))
        written.append(file.name)
        file.write_bytes(data)

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.eval.table.storage.put", late)
        patch.setattr(
            "tests.eval.test_table.storage.put_json", lambda file, value: file.write_bytes(orjson.dumps(value))
        )
        write_table(run)
    assert written == ["table.csv"] * 2
    assert [int(row["step"]) for row in rows_of_csv(run)] == [10, 20]


def test_the_best_is_one_of_those_that_can_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    put(run, report(10, 3.0))
    put(run, report(20, 2.0, "ema"))
    put(run, report(20, 2.5))
    put(run, report(30, 1.0, sequence_length=64))  # alone of its kind
    put(run, report(40, None))  # not finite
    found = as_json(run, capsys)
    assert [(row["step"], row["weights"]) for row in found if row["best"]] == [(20, "ema")]
    assert [row["loss"] for row in found] == [3.0, 2.5, 2.0, 1.0, None]
    assert all(row["tokens"] is None for row in found)
    assert rows_of_csv_after_writing(run)[-1]["loss"] == ""


def rows_of_csv_after_writing(run: Path) -> list[dict[str, str]]:
    write_table(run)
    return rows_of_csv(run)


def test_damaged_reports_are_named_and_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    put(run, report(10))
    for number, content in enumerate((b"", b"{}", b"[1]", b'{"step": 3, "blended": null, "sources": {}}')):
        (run / "eval" / f"step-0000002{number}.json").write_bytes(content)
    assert [row["step"] for row in as_json(run, capsys)] == [10]
    assert len(rows_of_csv_after_writing(run)) == 1
    show_table(load(tiny.write_run(tmp_path)), Console(width=200))
    assert capsys.readouterr().out.count("is damaged; remove it") == 4


def test_steps_without_a_checkpoint_and_with_another_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    put(run, report(10, 1.0))
    put(run, report(20, 2.0))
    put(run, report(30, 3.0))
    folder = run / "checkpoints" / "step-00000010"
    folder.mkdir(parents=True)
    (folder / "COMMIT").write_text("the run went back, and came here again")
    (folder / "state.json").write_bytes(b'{"tokens": 1000}')
    (run / "metrics.jsonl").write_text('{"step": 20, "tokens": 1}\n{"step": 20, "tokens": 2000}\n{"step": 21')
    found = as_json(run, capsys)
    assert [(row["tokens"], row["replaced"], row["best"]) for row in found] == [
        (1000, True, False),
        (2000, False, True),
        (None, False, False),
    ]


def test_nothing_was_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(tmp_path / "run", capsys) == []
    show_table(load(tiny.write_run(tmp_path)), Console(width=200))
    assert "`pipeline eval RUN.yaml --step N`" in capsys.readouterr().out
