"""The report on real runs: done, stopped and resumed, failed, forked, running; and on folders that lack most of it."""

from __future__ import annotations

import io
import math
import shutil
import signal
import statistics
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest
from PIL import Image
from rich.console import Console

from pipeline.common import storage
from pipeline.common.errors import EXIT_REFUSED, Stopped, UserError
from pipeline.config.load import load
from pipeline.data.plan.build import make_data_plan
from pipeline.eval.report.command import report
from pipeline.eval.report.gather import gather
from pipeline.train.run.goodput import goodput
from pipeline.train.start.fork import fork
from tests import tiny
from tests.clock import set_time
from tests.eval.report.reading import Report, number, read, steps_that_count
from tests.train.runs import start, train
from tests.waiting import until

pytestmark = pytest.mark.guard


@pytest.mark.slow
def test_figures_are_those_of_the_metrics(root: Path, seen: dict[str, Report]) -> None:
    found = seen["done"]
    steps = steps_that_count(root / "done")
    assert found.titles == ["done"] and found.states == ["done"]
    head, *rows = found.tables["Loss"]
    assert head[:5] == ["step", "tokens", "time", "value", "mean since the row above"]
    before = 0
    for row in rows:
        step = int(number(row[0]))
        assert number(row[1]) == steps[step]["tokens"]
        assert number(row[3]) == pytest.approx(steps[step]["loss"], rel=1e-5)
        since = [steps[each]["loss"] for each in range(before + 1, step + 1)]
        assert number(row[4]) == pytest.approx(statistics.mean(since), rel=1e-5)
        before = step
    assert before == 24 and len(rows) == 12
    for title, key in (("Learning rate", "lr"), ("Gradient norm", "grad_norm"), ("Throughput", "tokens_per_second")):
        for row in found.tables[title][1:]:
            assert number(row[3]) == pytest.approx(steps[int(number(row[0]))][key], rel=1e-5)
    last = found.tables["Loss by source"][-1]
    assert found.tables["Loss by source"][0] == ["step", "tokens", "sea", "land"]
    for name, cell in zip(("sea", "land"), last[2:], strict=True):
        values = [steps[each]["loss_by_source"].get(name) for each in (23, 24)]  # type: ignore[attr-defined]
        assert number(cell) == pytest.approx(statistics.mean(v for v in values if v is not None), rel=1e-5)


def test_losses_by_epoch_are_those_of_the_steps(root: Path, seen: dict[str, Report]) -> None:
    head, *rows = seen["done"].tables["Loss by source and epoch"]
    assert head[:4] == ["source", "epoch", "samples", "mean loss"] and {row[0] for row in rows} == {"sea", "land"}
    steps = steps_that_count(root / "done").values()
    assert sum(number(row[2]) for row in rows) == 4 * len(steps)
    mean = sum(number(row[2]) * number(row[3]) for row in rows) / (4 * len(steps))
    assert mean == pytest.approx(statistics.mean(row["loss"] for row in steps), rel=1e-3)


def test_validations_are_those_of_the_metrics(root: Path, seen: dict[str, Report]) -> None:
    found = seen["done"]
    lines = [orjson.loads(line) for line in (root / "done/metrics.jsonl").read_bytes().splitlines()]
    looks = {row["step"]: row for row in lines if "validation_loss" in row}
    _, *rows = found.tables["Validation by source"]
    assert [int(number(row[0])) for row in rows] == sorted(looks)
    for row in rows:
        by_source = looks[int(number(row[0]))]["validation_loss_by_source"]
        assert [number(cell) for cell in row[2:]] == pytest.approx([by_source["sea"], by_source["land"]], rel=1e-5)
    best = min(looks.values(), key=lambda row: row["validation_loss"])
    assert number(found.tiles["best validation"]) == pytest.approx(best["validation_loss"], rel=1e-5)
    assert found.tables["Loss"][-1][5] == f"{looks[24]['validation_loss']:.6g} (step 24)"


def test_time_goes_where_the_goodput_says(root: Path, seen: dict[str, Report]) -> None:
    for name in ("done", "again"):
        spent = goodput(root / name)
        assert spent is not None
        shares = {row[1]: number(row[3]) for row in seen[name].tables["Goodput"][1:]}
        assert shares["steps that count"] == pytest.approx(100 * spent.share, abs=0.06)
        assert shares["steps lost"] == pytest.approx(100 * spent.lost / spent.wall, abs=0.06)
        assert sum(shares.values()) == pytest.approx(100, abs=0.5)


def test_data_are_compared_with_the_plan(root: Path, seen: dict[str, Report]) -> None:
    """The plan is made anew from the run file, as `pipeline data plan` does it."""
    config = load(root / "run.yaml", ["train.batch_size=8"])
    plan = make_data_plan(config).to_json()
    planned = {row["source"]: row["end"] for row in plan["sources"]}
    found = seen["failed"]
    steps = steps_that_count(root / "failed")
    drawn: dict[str, Any] = steps[max(steps)]["tokens_by_source"]  # type: ignore[assignment]
    assert max(steps) < 24
    for row in found.tables["Data by source"][1:]:
        name = row[0]
        assert number(row[1]) == number(row[2]) == drawn[name]
        assert number(row[3]) == planned[name]["drawn"]
        assert number(row[4]) == pytest.approx(100 * drawn[name] / sum(drawn.values()), abs=0.06)


def test_evaluations_over_steps(root: Path, tmp_path: Path) -> None:
    harness = {
        "step": 24,
        "made_with": {"weights": "model", "checkpoint": "c"},
        "results": {"arc": {"alias": "arc", "acc,none": 0.25, "acc_stderr,none": 0.01, "word_perplexity,none": 99.5}},
        "others": [{"made_with": {"weights": "model", "checkpoint": "c"}, "results": {"arc": {"acc,none": 0.125}}}],
    }
    lambada = {"made_with": {"weights": "model"}, "results": {"accuracy": 0.5, "perplexity": 7.25, "passages": 40}}
    run = shutil.copytree(root / "done", tmp_path / "done")
    storage.put_json(run / "eval/harness-step-00000024.json", harness)
    storage.put_json(run / "eval/tasks-step-00000021.json", {"step": 21, "tasks": {"lambada": lambada}})
    (run / "eval/tasks-step-00000022.json").write_text("{")
    evaluated = run / "eval/step-00000024.json"
    lossy = {"coverage": {"sea": {"unknown": 0.0, "lost": 0.1}}}
    storage.put_json(evaluated, orjson.loads(evaluated.read_bytes()) | lossy)
    found = read(run, out=tmp_path / "r.html")
    rows = {(row[0], row[1]): row[2:] for row in found.tables["Held-out loss"][1:]}
    for step in (21, 24):
        value = orjson.loads((run / f"eval/step-{step:08d}.json").read_bytes())
        for label, scores in (("heldout", value["blended"]), ("heldout: sea", value["sources"]["sea"])):
            expected = [scores["loss"], scores["perplexity"], scores["bits_per_byte"]]
            assert [number(cell) for cell in rows[label, str(step)]] == pytest.approx(expected, rel=1e-5)
    assert found.tables["Benchmarks"][1:] == [
        ["arc, acc", "24", "0.25", "0.01"],
        ["lambada, accuracy", "21", "0.5", "–"],
    ]
    assert found.tables["Benchmarks: perplexity, bits"][1:] == [
        ["arc, word perplexity", "24", "99.5", "–"],
        ["lambada, perplexity", "21", "7.25", "–"],
    ]
    assert "eval/tasks-step-00000022.json is damaged" in found.text
    assert "Bits per byte of sea are too low" in found.text


def test_a_run_that_failed_says_why(root: Path, seen: dict[str, Report]) -> None:
    found = seen["failed"]
    reason = orjson.loads((root / "failed/exit.json").read_bytes())["reason"]
    assert found.states == ["failed: it diverged"] and reason in found.text
    assert "spike" in found.text and "not applied" in found.text


def test_steps_that_were_made_again_count_once(root: Path, seen: dict[str, Report]) -> None:
    found = seen["again"]
    steps, failed = steps_that_count(root / "again"), steps_that_count(root / "failed")
    first = int(number(found.tables["Attempts"][2][5]))
    assert [row[3] for row in found.tables["Attempts"][1:]] == ["diverged", "done"] and found.tiles["attempts"] == "2"
    assert f"Steps that were made and lost: {max(failed) - first}." in found.text
    for row in found.tables["Loss"][1:]:
        assert number(row[3]) == pytest.approx(steps[int(number(row[0]))]["loss"], rel=1e-5)
    assert number(found.tables["Loss"][-1][0]) == 24


@pytest.mark.slow
def test_a_run_that_was_stopped_and_begins_again(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "runs", ignore=shutil.ignore_patterns("done", "failed", "again"))
    run = tmp_path / "runs/run"
    run.mkdir()
    (run / "stop").touch()
    with suppress(Stopped):
        start(root, str(run))
    found = read(run, out=tmp_path / "r.html")
    assert found.states == ["stopped"] and "stop file" in found.text and found.tiles["step"] == "1"
    train(root, str(run))
    found = read(run, out=tmp_path / "r.html")
    assert found.states == ["done"] and [row[5] for row in found.tables["Attempts"][1:]] == ["0", "1"]


def test_differences_between_runs(root: Path, tmp_path: Path, seen: dict[str, Report]) -> None:
    found = seen["two"]
    assert found.states == ["done", "failed: it diverged"]
    head, *rows = found.tables["Differences between the run files"]
    assert head == ["key", "done", "failed"]
    assert {row[0]: row[1:] for row in rows} == {
        "train.batch_size": ["4", "8"],
        "train.optimizer.lr": ["0.01", "0.05"],
        "train.faults.on_spike": ["ignore", "skip"],
        "train.faults.spike_window": ["128", "8"],
        "train.faults.spike_zscore": ["6.0", "20.0"],
        "train.faults.max_in_a_row": ["3", "2"],
    }
    steps = {name: steps_that_count(root / name) for name in ("done", "failed")}
    for row in found.tables["Loss"][1:]:
        assert number(row[4]) == pytest.approx(steps[row[0]][int(number(row[1]))]["loss"], rel=1e-5)
    with pytest.raises(UserError, match="named more than once"):
        report([root / "done", root / "done"], Console(quiet=True), out=tmp_path / "r.html")


def test_runs_of_one_name_are_told_apart(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "done", tmp_path / "more/done")
    found = read(root / "done", tmp_path / "more/done", out=tmp_path / "r.html")
    assert found.titles[1:] == [f"{root.name}/done", "more/done"]


def test_keys_of_one_run_that_are_not_the_default(seen: dict[str, Report]) -> None:
    rows = dict(map(tuple, seen["done"].tables["Keys that are not the default"][1:]))
    assert rows["model.dim"] == "32" and rows["data.sources.sea.weight"] == "3.0"
    assert "train.optimizer.eps" not in rows and "train.batch_size" in rows


@pytest.mark.slow
def test_a_forked_run_begins_where_its_parent_was(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "child.yaml"
    child = tmp_path / "child"
    file.write_text(f"include: {root / 'run.yaml'}\nrun: {{dir: {child}}}\ntrain: {{duration: 27 steps}}\n")
    fork(root / "done", 24, load(file), Console(quiet=True))
    found = read(child, out=tmp_path / "r.html")
    assert found.states == ["not begun"] and found.tiles["step"] == "24"
    train(tmp_path, "child", file="child.yaml")
    found = read(child, out=tmp_path / "r.html")
    assert found.tiles["step"] == "27" and f"a fork of {root / 'done'} at step 24" in found.text
    assert [row[0] for row in found.tables["Loss"][1:]] == ["25", "26", "27"]


@pytest.mark.slow
def test_a_run_that_goes_on_is_left_alone(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    long = [f"run.dir={run}", "train.duration=100000 steps", "train.checkpoint.every_steps=100000"]
    process = subprocess.Popen(tiny.command("train", root / "run.yaml", *long), stdout=subprocess.DEVNULL)
    try:
        metrics = run / "metrics.jsonl"
        until(lambda: metrics.exists() and metrics.stat().st_size >= 5000, process, pause=0.1)
        lock = (run / "lock").read_bytes()
        found = read(run, out=tmp_path / "r.html")
        assert found.states == ["running"] and found.tables["Attempts"][1][3] == "running"
        assert process.poll() is None and (run / "lock").read_bytes() == lock
        assert not {file.name for file in run.iterdir()} & {"report.html", "exit.json"}
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 100, "attempt": 1, "lo')  # as a kill may leave it
    assert read(run, out=tmp_path / "r.html").states == ["failed: it was killed"]


def test_no_sign_of_life(root: Path, tmp_path: Path) -> None:
    """A run of another machine, which cannot be asked, and whose files have not changed for an hour."""
    run = shutil.copytree(root / "done", tmp_path / "run")
    (run / "exit.json").unlink()
    lines = [line for line in storage.read_json_lines(run / "ledger.jsonl") if line["event"] == "attempt"]
    (run / "ledger.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    (run / "lock").write_bytes(orjson.dumps({"host": "elsewhere", "pid": 1, "started": 1}))
    long = Report(_report(run, tmp_path / "a.html", now=time.time() + 7200))
    assert long.states == ["no sign of life"] and "2 h" in long.text
    # Just after its last step: the run was made at the start of all tests, which may be minutes ago.
    newest = max(row["time"] for row in storage.read_json_lines(run / "metrics.jsonl"))
    assert Report(_report(run, tmp_path / "b.html", now=newest + 5)).states == ["running"]


def _report(run: Path, out: Path, now: float) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        set_time(patch, time=lambda: now)
        return report([run], Console(quiet=True), out=out)


@pytest.mark.parametrize("gone", ["metrics.jsonl", "ledger.jsonl", "journal.json", "config.yaml", "checkpoints", "all"])
def test_what_is_missing_is_said(root: Path, tmp_path: Path, gone: str) -> None:
    run = shutil.copytree(root / "done", tmp_path / "run")
    for path in run.iterdir() if gone == "all" else [run / gone]:
        if path.name != "exit.json":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    facts = gather(run)
    assert facts.state.word == "done"  # as exit.json has it
    if gone in ("metrics.jsonl", "config.yaml"):
        assert [line for line in facts.problems if line.startswith(f"{gone} is missing")]
    if gone == "all":
        found = read(run, out=tmp_path / "r.html")
        assert all(f"{name} is missing" in found.text for name in ("metrics.jsonl", "config.yaml"))


@pytest.mark.parametrize("damaged", ["metrics.jsonl", "ledger.jsonl", "journal.json", "config.yaml", "exit.json"])
def test_what_is_damaged_is_no_reason_to_say_nothing(root: Path, tmp_path: Path, damaged: str) -> None:
    run = shutil.copytree(root / "done", tmp_path / "run")
    for content in (b"", b"\xff\xfe{", b"[1, 2]", b'{"step": {}, "attempt": [], "segments": 3}\n'):
        (run / damaged).write_bytes(content)
        facts = gather(run)
        assert facts.name == "run"
        if damaged in ("config.yaml", "journal.json"):
            assert [line for line in facts.problems if damaged in line or "plan" in line]
    if damaged == "metrics.jsonl":
        assert read(run, out=tmp_path / "r.html").titles == ["run"]


@pytest.mark.slow
def test_rows_of_metrics_that_make_no_sense_are_passed_over(root: Path, tmp_path: Path) -> None:
    run = shutil.copytree(root / "done", tmp_path / "run")
    odd: list[dict[str, Any]] = [
        {"step": 25, "attempt": 1, "tokens": "many", "time": None, "loss": "low", "loss_by_source": [1]},
        {"step": True, "attempt": 1, "tokens": 3},
        {"step": -4, "tokens": 1},
        {"step": 2**63, "attempt": 1, "tokens": 1},
        {"attempt": 1, "loss": 3},
        {"step": 26, "attempt": 1, "tokens": 1e300, "time": 1e300, "loss": None, "validation_loss": None},
    ]
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"".join(orjson.dumps(row) + b"\n" for row in odd))
    assert read(run, out=tmp_path / "r.html").tiles["step"] == "26"


def test_before_the_first_step(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_bytes((root / "done/config.yaml").read_bytes())
    storage.put_json(run / "exit.json", {"attempt": 1, "code": EXIT_REFUSED, "reason": "lr is wrong", "step": 0})
    found = read(run, out=tmp_path / "r.html")
    assert found.states == ["refused"] and "lr is wrong" in found.text
    assert found.tiles["step"] == "0" and found.tiles["training loss"] == "–"


def test_where_it_is_written(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = shutil.copytree(root / "done", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    said = io.StringIO()
    file = tmp_path / "file.yaml"
    file.write_text(f"include: {root / 'run.yaml'}\nrun: {{dir: {run}}}\n")
    assert report([file], Console(file=said, width=200)) == run / "report.html"
    assert f"report: {run / 'report.html'}" in said.getvalue() and (run / "report.html").is_file()
    assert report([run, root / "done"], Console(quiet=True)) == Path("report.html") and Path("report.html").is_file()
    with pytest.raises(UserError, match=r"--out is no/where.html, but the folder no is missing"):
        report([run], Console(quiet=True), out=Path("no/where.html"))
    with pytest.raises(UserError, match=r"--out is file.yaml; name a file that ends with .html"):
        report([run], Console(quiet=True), out=Path("file.yaml"))


def test_what_is_no_run(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=str(tmp_path)):
        report([tmp_path], Console(quiet=True))
    file = tmp_path / "file.yaml"
    file.write_text(f"include: {root / 'run.yaml'}\nrun: {{dir: {tmp_path / 'none'}}}\n")
    with pytest.raises(UserError, match=r"run.dir .*none of .* does not exist"):
        report([file], Console(quiet=True))
    with pytest.raises(UserError, match=str(tmp_path / "nothing")):
        report([tmp_path / "nothing"], Console(quiet=True))


def test_the_picture(picture: Path) -> None:
    with Image.open(picture) as image:
        image.load()
        assert image.format == "PNG" and 1500 < image.width < 2500 and 1000 < image.height < 4000
        colours = image.convert("RGB").getcolors(2**24)
        assert colours is not None and len(colours) > 100 and max(colours)[1] == (255, 255, 255)


@pytest.mark.slow
def test_the_command(root: Path, tmp_path: Path) -> None:
    done = tiny.pipeline("report", root / "done", "--out", tmp_path / "r.html", "--png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r.png").is_file() and "done: done" in done.stdout
    assert not math.isnan(number(Report(tmp_path / "r.html").tiles["training loss"]))
    refused = tiny.pipeline("report", tmp_path)
    assert refused.returncode == EXIT_REFUSED and str(tmp_path) in refused.stderr.replace("\n", "")
