"""Runs whose files are late, torn, absurd or secret: written by hand, so that what a report has to say is known."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import warnings
from pathlib import Path
from typing import Any

import orjson
import pytest
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.common.redaction import masked
from pipeline.data.order.journal import Journal
from pipeline.data.order.segments import Segment, SourceState
from pipeline.eval.report import drawing
from pipeline.eval.report.charts import curves, scales
from pipeline.eval.report.command import report, sheet
from pipeline.eval.report.drawing import png, svg
from pipeline.eval.report.facts import headline
from pipeline.eval.report.gather import RunFacts, gather, gather_all
from pipeline.eval.report.model import BarChart, LineChart
from pipeline.eval.report.outcomes import others
from pipeline.eval.report.page import page
from tests.config.runfile import MINIMAL
from tests.eval.report.reading import read

START = 1e9


def row(step: int, attempt: int = 1, **more: Any) -> dict[str, Any]:
    seconds = {"step_seconds": 1.0, "data_wait": 0.0}
    known = {"step": step, "attempt": attempt, "time": START + step, "tokens": 100 * step, "loss": 3.0 + 1 / step}
    return {**known, **seconds, **more}


def begin(number: int = 1, first_step: int = 0, **more: Any) -> dict[str, Any]:
    head = {"event": "attempt", "attempt": number, "time": START, "host": "h", "pid": 1, "layout": {}, "config": ""}
    return {**head, "first_step": first_step, **more}


def end(number: int = 1, step: int = 20, code: int | None = 0, seconds: float = 20.0) -> dict[str, Any]:
    known = {"event": "attempt end", "attempt": number, "seconds": seconds}
    return {**known, "step": step, "code": code, "reason": ""}


def write(run: Path, rows: list[dict[str, Any]], *ledger: dict[str, Any], values: dict[str, Any] | None = None) -> Path:
    run.mkdir()
    for name, lines in (("metrics.jsonl", rows), ("ledger.jsonl", [*ledger])):
        (run / name).write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    (run / "config.yaml").write_bytes(orjson.dumps(values or {"run": {"dir": str(run)}}))
    return run


def twenty(run: Path, *ledger: dict[str, Any], **more: Any) -> Path:
    return write(run, [row(step) for step in range(1, 21)], *(ledger or (begin(), end())), **more)


def about(run: Path, of: str) -> list[str]:
    return [line for line in gather(run).problems if of in line]


def evaluation(run: Path, step: int, loss: float, weights: str = "model", **made_with: Any) -> None:
    scores = {"loss": loss, "perplexity": 2.0, "bits_per_byte": 1.0}
    made = {"checkpoint": "c", "weights": weights, "data": {"a": "1"}, "split": "heldout"}
    value = {
        "step": step,
        "blended": scores,
        "sources": {"a": scores},
        "made_with": {**made, "sequence_length": 64, "compute": "bf16", **made_with},
    }
    (run / "eval").mkdir(exist_ok=True)
    name = f"step-{step:08d}{'-ema' * (weights == 'ema')}.json"
    (run / "eval" / name).write_bytes(orjson.dumps(value))


def heldout(*runs: RunFacts) -> LineChart:
    (chart,) = [chart for chart in others(runs) if chart.title == "Held-out loss"]
    assert isinstance(chart, LineChart)
    return chart


def tile(facts: RunFacts, label: str) -> tuple[str, str]:
    (found,) = [fact for fact in headline(facts) if fact.label == label]
    return found.value, found.detail


# An attempt that began long after the last step


@pytest.mark.parametrize("later", [86_400.0, 1e9, -1e6])
def test_an_attempt_that_began_long_after_the_last_step_is_in_the_chart(tmp_path: Path, later: float) -> None:
    run = twenty(tmp_path / "run", begin(), end(), begin(2, 20, time=START + later), end(2, 20, 1, 5.0))
    facts = gather(run)
    by_time = scales([facts])[1]
    chart = next(curves([facts], by_time))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "<path" in svg(chart, "k") and png([chart], "t", [])
    if later == 86_400.0:
        assert by_time.label == "hours since the start" and chart.rules[0][0] == pytest.approx(24.0)
        axes = Figure().add_subplot()
        drawing._draw(axes, chart, drawing.LIGHT)
        assert axes.get_xlim()[0] <= 0 and axes.get_xlim()[1] >= 24.0


# Time left


def test_the_time_left_has_no_pause_in_it(tmp_path: Path) -> None:
    rows = [row(step) for step in range(1, 11)]
    rows += [row(step, 2, time=START + 36_000 + 2 * step) for step in range(11, 21)]
    facts = gather(write(tmp_path / "run", rows, begin(), end(1, 10), begin(2, 10, time=START + 36_000), end(2)))
    facts.state, facts.steps = dataclasses.replace(facts.state, word="running"), 120
    assert tile(facts, "started")[1].endswith("3 min left")  # 100 steps of 2 s
    facts.columns.attempt[-1] = 3
    assert "left" not in tile(facts, "started")[1]  # one step of it: nobody knows


# Steps without metrics


def test_without_metrics_the_step_is_that_of_the_last_attempt(tmp_path: Path) -> None:
    run = twenty(tmp_path / "run", begin(), end(1, 10), begin(2, 10), end(2, 20))
    (run / "metrics.jsonl").unlink()
    assert gather(run).step == 20
    assert read(run, out=tmp_path / "r.html").tiles["step"] == "20"
    (run / "ledger.jsonl").unlink()
    (run / "checkpoints").mkdir()
    assert gather(run).step == 0


# Damage


def test_lines_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    run = twenty(tmp_path / "run")
    assert not about(run, ".jsonl")
    whole = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(whole + b'{"step": 21, "att')
    assert not about(run, "metrics.jsonl")  # a line that is being written
    (run / "metrics.jsonl").write_bytes(whole + b'{"step": 21, "att\n')
    assert about(run, "metrics.jsonl") == ["1 line of metrics.jsonl cannot be read"]
    odd = [b'{"step":', b"\xff\xfe\x00", b"[]", b"null", b"", b'{"step": -1}', b'{"step": 2000000000000, "tokens": 1}']
    (run / "metrics.jsonl").write_bytes(b"\n".join(odd) + b"\n" + whole)
    assert about(run, "metrics.jsonl") == ["6 lines of metrics.jsonl cannot be read"]
    assert "6 lines of metrics.jsonl cannot be read" in read(run, out=tmp_path / "r.html").text


def test_a_ledger_that_is_missing_or_damaged_is_said(tmp_path: Path) -> None:
    run = twenty(tmp_path / "run")
    whole = (run / "ledger.jsonl").read_bytes()
    (run / "ledger.jsonl").write_bytes(b"{\n" + whole)
    assert about(run, "ledger.jsonl") == ["1 line of ledger.jsonl cannot be read"]
    (run / "ledger.jsonl").write_bytes(b"\xff\n")
    assert len(about(run, "ledger.jsonl")) == 2 and about(run, "metrics.jsonl has steps of attempt 1")
    (run / "ledger.jsonl").write_bytes(b'{"event": "attempt"}\n')
    assert about(run, "metrics.jsonl has steps of attempt 1")
    (run / "ledger.jsonl").unlink()
    assert about(run, "ledger.jsonl is missing")
    assert about(run, "journal.json is missing")


def test_metrics_that_end_too_early_are_said(tmp_path: Path) -> None:
    run = twenty(tmp_path / "run", begin(), end(step=30))
    assert about(run, "step 30") == ["metrics.jsonl ends at step 20, but ledger.jsonl says that step 30 was made"]
    run = twenty(tmp_path / "other")
    (run / "exit.json").write_bytes(orjson.dumps({"attempt": 1, "code": 0, "reason": "done", "step": 40}))
    assert about(run, "step 40") == ["metrics.jsonl ends at step 20, but exit.json says that step 40 was made"]


# Evaluations that cannot be compared


def test_losses_that_cannot_be_compared_are_not_joined(tmp_path: Path) -> None:
    run = twenty(tmp_path / "run")
    for step, loss in ((5, 3.0), (10, 2.5)):
        evaluation(run, step, loss)
    assert tile(gather(run), "held-out loss") == ("2.5", "best of 2 evaluations, step 10")
    assert [line.label for line in heldout(gather(run)).lines] == ["heldout"]
    assert "the whole split" in heldout(gather(run)).note
    evaluation(run, 15, 1.0, samples=4)
    evaluation(run, 20, 1.5, sequence_length=128)
    chart = heldout(gather(run))
    assert [(line.label, line.curve.mean.tolist()) for line in chart.lines] == [
        ("heldout (samples all, sequence_length 64)", [3.0, 2.5]),
        ("heldout (samples 4, sequence_length 64)", [1.0]),
        ("heldout (samples all, sequence_length 128)", [1.5]),
    ]
    assert "the whole split" not in chart.note
    for place, step in enumerate((5, 10, 20, 15)):  # the newest is the one that was written last
        os.utime(run / f"eval/step-{step:08d}.json", (START + place, START + place))
    assert tile(gather(run), "held-out loss") == ("1", "step 15")
    os.utime(run / "eval/step-00000005.json", (START + 9, START + 9))
    assert tile(gather(run), "held-out loss") == ("2.5", "best of 2 evaluations, step 10")


def _journal(*segments: tuple[int, int, tuple[float, float]]) -> Journal:
    """Segments of (first step, batch size, shares of a and b)."""
    found: list[Segment] = []
    cursors = [0, 0]
    for first, batch, shares in segments:
        sample = 0
        if found:
            drawn = (first - found[-1].first_step) * found[-1].batch_size
            sample = found[-1].first_sample + drawn
            cursors = [at + int(more) for at, more in zip(cursors, found[-1].order().counts(drawn), strict=True)]
        sources = {
            name: SourceState(tokens=10**6, weight=int(share * 2**32), offset=0, lap=0, cursor=cursor)
            for name, share, cursor in zip("ab", shares, cursors, strict=True)
        }
        at = {"first_step": first, "first_sample": sample, "batch_size": batch}
        found.append(Segment(**at, sequence_length=10, sources=sources))
    return Journal(seed=1, segments=found)


def test_changes_of_the_plan_are_marked_and_a_source_keeps_its_colour(tmp_path: Path) -> None:
    rows = [row(step, loss_by_source={"a": 3.0, "b": 2.0}) for step in range(1, 21)]
    rows[9]["validation_loss"], rows[9]["validation_loss_by_source"] = 2.0, {"a": 3.0, "b": 2.0}
    run = write(tmp_path / "run", rows, begin(), end())
    journal = _journal((0, 4, (0.25, 0.75)), (5, 8, (0.25, 0.75)), (12, 8, (0.5, 0.5)), (30, 16, (0.5, 0.5)))
    (run / "journal.json").write_bytes(orjson.dumps(journal.to_json()))
    evaluation(run, 20, 2.0)
    facts = gather(run)
    loss, by_source, validation, *_ = curves([facts], scales([facts])[0])
    assert {marks.label: marks.x.tolist() for marks in loss.marks} == {
        "batch size changes": [600.0],
        "blend changes": [1300.0],
        "evaluated": [2000.0],
    }
    assert [len(places.first) for marks in loss.marks for _, places in marks.places] == [1, 1, 1]  # not of step 31
    looks = {line.label: line.look for line in by_source.lines}
    assert {line.label: line.look for line in validation.lines} == looks
    data = next(chart for chart in others([facts]) if chart.title == "Data by source")
    assert isinstance(data, BarChart)
    assert {bar.label: bar.parts[-1].look for bar in data.bars} == looks


def test_losses_at_one_step_are_bars_which_do_not_cover_each_other(tmp_path: Path) -> None:
    run = twenty(tmp_path / "run")
    evaluation(run, 20, 2.0)
    evaluation(run, 20, 2.001, "ema")
    (chart,) = [chart for chart in others([gather(run)]) if chart.title == "Held-out loss"]
    assert isinstance(chart, BarChart)
    assert [(bar.label, bar.text, bar.parts[0].value) for bar in chart.bars] == [
        ("heldout", "2", 2.0),
        ("heldout (average of weights)", "2.001", 2.001),
    ]
    assert chart.x_label == "nats per token at step 20"
    assert drawing.svg(chart, "k") and len(chart.table.rows) == 2
    evaluation(run, 10, 2.5)
    assert len(heldout(gather(run)).lines) == 2


def test_more_lines_than_can_be_told_apart_are_said(tmp_path: Path) -> None:
    runs = [twenty(tmp_path / f"run-{number:02d}") for number in range(12)]
    for number, run in enumerate(runs):
        evaluation(run, 9 + number, 2.0)
    facts = gather_all(runs)
    chart = heldout(*facts)
    assert len(chart.lines) == 8 and len(chart.table.rows) == 12
    assert "8 of 12 lines; the table has all." in chart.note
    figure = Figure()
    drawing._legend(figure, next(curves(facts, scales(facts)[0])))
    # 12 runs, and where they were evaluated.
    names = [text.get_text().strip("\u200b") for text in figure.legends[0].get_texts()]
    assert len(names) == 9 and names[0] == "run-00" and names[-1] == "and 5 more"


# Figures that make no sense


@pytest.mark.parametrize("key", ["loss", "grad_norm", "lr", "tokens_per_second", "tokens", "time", "validation_loss"])
@pytest.mark.parametrize("value", [1e308, -1e308, 10**30, None, "x", [1]])
def test_figures_that_are_none_make_no_noise(tmp_path: Path, key: str, value: Any) -> None:
    rows = [row(step, **({key: value} if step % 3 == 0 else {})) for step in range(1, 21)]
    run = tmp_path / "run"
    write(run, [], begin(), end())
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))  # orjson has no 10^30
    facts = gather(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (*_, by_time) = scales([facts])
        charts = list(curves([facts], by_time))
        if value == 1e308:  # the others are not drawn, as `None` is not
            svg(charts[0], "k")
    assert facts.goodput is not None and not [line for line in facts.problems if "unsupported" in line]


def test_a_step_far_beyond_is_no_step(tmp_path: Path) -> None:
    rows = [row(step) for step in range(1, 21)]
    rows[10:10] = [row(10**12 + 1), row(2**61, tokens=1), row(-7)]
    facts = gather(write(tmp_path / "run", rows, begin(), end()))
    assert facts.columns.step.tolist() == list(range(1, 21)) and facts.columns.lost == 0
    assert "3 lines of metrics.jsonl cannot be read" in facts.problems
    assert facts.goodput is not None and facts.goodput.productive == 20.0


def test_rows_without_a_time_are_said(tmp_path: Path) -> None:
    rows = [row(step, time=None if step in (1, 5) else START + step) for step in range(1, 21)]
    run = write(tmp_path / "run", rows, begin(), end())
    assert about(run, "no time") == ["metrics.jsonl: 2 lines have no time; the goodput leaves them out"]
    facts = gather(run)
    assert facts.goodput is not None and facts.goodput.productive == 18.0 and facts.step == 20


@pytest.mark.slow
def test_a_chart_that_cannot_be_drawn_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = gather(twenty(tmp_path / "run"))
    before, draw = page([facts]).decode(), drawing._draw_lines

    def broken(axes: Any, chart: LineChart, colours: dict[str, str]) -> None:
        if chart.title == "Loss":
            raise OverflowError("cannot convert float infinity to integer")
        draw(axes, chart, colours)

    monkeypatch.setattr(drawing, "_draw_lines", broken)
    text = page([facts]).decode()
    said = "This chart cannot be drawn"
    assert said not in before and text.count(said) == 1
    assert "Gradient norm" in text and "float infinity" not in text and text.endswith("</html>\n")
    (tmp_path / "r.png").write_bytes(sheet([facts]))
    with Image.open(tmp_path / "r.png") as image:
        image.load()
        assert image.width > 1500


# Where it is written


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    run = twenty(tmp_path / "run")
    out = tmp_path / "no such/deep/r.html"
    with pytest.raises(UserError, match=f"the folder {out.parent} is missing; make it .`mkdir -p '{out.parent}'`"):
        report([run], Console(quiet=True), out=out)
    out.parent.mkdir(parents=True)
    assert report([run], Console(quiet=True), out=out) == out


# Secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:pass@h/x?sig=a&b=c", "https://***@h/x?***"),
        ("s3://key:se/cret@bucket/a", "s3://***@bucket/a"),
        ("see https://h/x?sig=1 and https://t@h:80/y#z", "see https://h/x?*** and https://***@h:80/y#z"),
        ("https://h/x", "https://h/x"),
        ("mail a@b, is it? yes", "mail a@b, is it? yes"),
        ("https://h/x@v1", "https://h/x@v1"),
        ('["https://u@h/?a=1","b"]', '["https://***@h/?***","b"]'),
    ],
)
def test_addresses_lose_what_is_secret_in_them(text: str, shown: str) -> None:
    assert masked(text) == shown


@pytest.mark.guard
def test_what_others_wrote_commands_no_terminal(tmp_path: Path) -> None:
    run, said = twenty(tmp_path / "run\x1b[31m", begin(), end(1, 20, 1)), io.StringIO()
    (run / "exit.json").write_bytes(
        orjson.dumps({"attempt": 1, "code": 1, "reason": "no \x1b]0;title\x07", "step": 20})
    )
    report([run], Console(file=said, force_terminal=True), out=tmp_path / "r.html")
    assert "failed" in said.getvalue() and "\x1b" not in said.getvalue()


@pytest.mark.slow
def test_secrets_of_the_reader_are_not_in_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is somebody else's, and what its file names is the reader's."""
    monkeypatch.setenv("HF_TOKEN", "HIDDEN")
    monkeypatch.setenv("HARMLESS", "HIDDEN")
    mine = tmp_path / "mine.yaml"
    mine.write_text("generate: {prompt: HIDDEN}\n")
    for value in ("${oc.env:HF_TOKEN}", "${oc.env:HARMLESS}", "x ${oc.env:${generate.name}}"):
        run = twenty(tmp_path / value.strip("${}"))
        text = MINIMAL.replace("duration: 10", "duration: 20")
        (run / "config.yaml").write_text(f'include: {mine}\n{text}generate: {{prompt: "{value}", name: HARMLESS}}\n')
        out = report([run], Console(quiet=True), out=tmp_path / "r.html").read_text()
        assert "HIDDEN" not in out and "generate.prompt" in out


def test_a_run_file_of_aliases_is_not_expanded(tmp_path: Path) -> None:
    run = twenty(tmp_path / "run")
    lists = "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True))
    (run / "config.yaml").write_text(f"a: &a [1, 2]\n{lists}")
    assert "more than 100,000 values" in report([run], Console(quiet=True), out=tmp_path / "r.html").read_text()


def test_secrets_are_not_in_a_report(tmp_path: Path) -> None:
    long = "https://user:" + "HIDDEN" * 100 + "@h/x"
    values = {
        "run": {"dir": "x"},
        "data": {"url": "https://user:HIDDEN@h/x?sig=HIDDEN", "long": long, "list": ["https://HIDDEN@h/", "a"]},
        "wandb": {"api_key": "HIDDEN", "hf_token": "HIDDEN", "deep": [1, {"password": "HIDDEN"}], "Secret": ["HIDDEN"]},
        "generate": {"max_tokens": 64, "tokenizer": "shown", "api_key": None},
    }
    reason = "no https://user:HIDDEN@h/x?sig=HIDDEN"
    run = twenty(tmp_path / "run", begin(), end(code=1) | {"reason": reason}, values=values)
    other = twenty(tmp_path / "other", values={"run": {"dir": "y"}})
    for runs in ([run], [run, other]):
        out = report(runs, Console(quiet=True), out=tmp_path / "r.html")
        text = out.read_text()
        assert "HIDDEN" not in text and "https://***@h/x?***" in text and "shown" in text
    rows = {cells[0]: cells[1] for cells in read(run, out=out).tables["Keys that are not the default"][1:]}
    assert rows["wandb.api_key"] == rows["wandb.hf_token"] == rows["wandb.Secret"] == "***"
    assert rows["generate.max_tokens"] == "64" and rows["generate.api_key"] == "null"
