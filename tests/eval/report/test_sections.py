"""Tables and texts of a report: losses compared, recorded losses, samples of text, memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from rich.console import Console

from pipeline.config import Config
from pipeline.config.load import load
from pipeline.data.order.journal_file import read_journal
from pipeline.data.order.sampler import Sampler
from pipeline.eval.inference import load_decoder
from pipeline.eval.perplexity import evaluate, read_report
from pipeline.eval.report.gather import gather
from pipeline.eval.report.sections import sample_losses as recorded
from pipeline.train.model.decoder import Context
from tests.eval.report.reading import Report, number, read
from tests.eval.report.test_odd import begin, row, write

HOSTILE = (
    "</td><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31mred\u202egnp.exe\u2066\x00 https://u:p@h/x?k=1"
)
PROMPT = "the sea "


def samples(run: Path) -> list[dict[str, Any]]:
    """Each sample with its loss, one by one, without a block or a sum."""
    data = np.frombuffer((run / "losses.bin").read_bytes()[32:], "<f2").astype(float)
    journal = read_journal(run)
    sampler = Sampler(journal)
    found: list[dict[str, Any]] = []
    for step in range(24):
        draws = sampler.step(step)
        for place, sample in enumerate(journal.samples(step)):
            source, epoch = journal.names[draws.source[place]], int(draws.epoch[place])
            found.append({"sample": sample, "step": step, "source": source, "epoch": epoch, "loss": abs(data[sample])})
    return found


@pytest.mark.guard
def test_recorded_losses_are_those_of_each_sample(root: Path) -> None:
    found, every = recorded.sample_losses(root / "done"), samples(root / "done")
    assert (found.recorded, found.read, found.searched, found.unplaced) == (96, 96, 96, "")
    for group in found.epochs:
        mine = [each["loss"] for each in every if (each["source"], each["epoch"]) == (group.source, group.epoch)]
        assert group.samples == len(mine) and group.loss == pytest.approx(np.mean(mine))
        expected = np.quantile(mine, (0.05, 0.5, 0.95), method="inverted_cdf")
        np.testing.assert_array_equal(group.quantiles, expected)
    assert sum(group.samples for group in found.epochs) == 96
    # 4 steps of 4 samples are neighbours.
    for each in every:
        near = [other["loss"] for other in every if other["step"] // 4 == each["step"] // 4]
        each["above"] = each["loss"] - np.mean(near)
    highest = sorted(every, key=lambda each: (-each["above"], each["sample"]))[:12]
    assert [(each.sample, each.step, each.source, each.epoch, each.loss) for each in found.highest] == [
        (each["sample"], each["step"] + 1, each["source"], each["epoch"], each["loss"]) for each in highest
    ]
    assert all(each.documents and "document " in each.place and ".txt" in each.place for each in found.highest)


def test_long_runs_are_read_in_pieces(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read is said, is spread over the run, and gives its own means; the data may be gone."""
    monkeypatch.setattr(recorded, "_MOST", 24)
    monkeypatch.setattr(recorded, "_PIECES", 3)
    monkeypatch.setattr(recorded, "_MOST_SEARCHED", 40)
    monkeypatch.setattr(recorded, "_MOST_QUANTILES", 1)
    run = shutil.copytree(root / "done", tmp_path / "done")
    config = orjson.loads(orjson.dumps(gather(run).values)) | {"data": gather(run).values["data"] | {"dir": "/nowhere"}}
    (run / "config.yaml").write_bytes(orjson.dumps(config))
    found = recorded.sample_losses(run)
    steps = [*range(0, 2), *range(8, 10), *range(16, 18)]
    mine = [each for each in samples(run) if each["step"] in steps]
    assert (found.recorded, found.read, found.searched) == (96, 24, 40)
    for group in found.epochs:
        losses = [each["loss"] for each in mine if (each["source"], each["epoch"]) == (group.source, group.epoch)]
        assert group.samples == len(losses) and group.loss == pytest.approx(np.mean(losses))
    assert [bool(group.quantiles) for group in found.epochs].count(True) == 1
    assert min(each.step for each in found.highest) > 14
    assert found.unplaced and all(each.documents is None for each in found.highest)
    text = read(run, out=tmp_path / "r.html").text
    assert "24 of 96 samples, in pieces" in text and "the newest 40 of 96 samples" in text


def test_runs_are_compared_at_the_tokens_of_the_shorter_one(tmp_path: Path) -> None:
    """Other sources, sets and keys in each; values that are none; a last line that is being written."""
    first = [row(step, loss_by_source={"a": 1.0 + step, "b": None, "c": 7.0}) for step in range(1, 21)]
    first[9] |= {"validation_loss": 2.5, "validation_loss_by_source": {"a": 2.0, "b": "x"}}
    first[19] |= {"validation_loss": 9.0, "validation": {"late": {"loss": 9.0}}}
    other = [row(step, loss=None, loss_by_source={"a": 2.0 + step}) for step in range(1, 11)]
    other[4] |= {"loss": 3.75, "validation": {"dev": {"loss": 4.0}, "odd": 5, "none": {"loss": None}}}
    other[7] |= {"validation": {"test": {"loss": 1e300}}, "memory": {"host": 2**30, "reserved": None, "allocated": "x"}}
    one, two = write(tmp_path / "one", first, begin()), write(tmp_path / "two", other, begin())
    with (two / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 11, "attempt": 1, "tokens": 11')
    found = read(one, two, out=tmp_path / "r.html")
    head, *rows = found.tables["Losses compared"]
    mean = sum(3.0 + 1 / step for step in range(1, 11)) / 10
    assert head == ["loss", "one", "two"] and "At 1,000 tokens" in found.text
    assert rows == [
        ["training", f"{mean:.6g}", f"3.75 ({3.75 - mean:+.4f})"],
        ["training: a", "6.5", "7.5 (+1.0000)"],
        ["training: b", "–", "–"],
        ["training: c", "7", "–"],
        ["validation", "2.5", "–"],
        ["validation: a", "2", "–"],
        ["set: dev", "–", "4"],
    ]
    assert found.tables["Memory of the process on the host"][-1][:1] == ["two"]
    assert "GPU memory: held by the allocator" not in found.tables


def texts(step: int, text: str, *, prompt: str = PROMPT, weights: str = "model", **how: Any) -> dict[str, Any]:
    scores = {"loss": 1.0, "perplexity": 2.7, "bits_per_byte": None}
    made_with = {
        "checkpoint": "c",
        "weights": weights,
        "data": {},
        "split": "heldout",
        "sequence_length": 8,
        "compute": "",
    }
    settings = {"prompts": [prompt], "max_tokens": 8, "temperature": 0.0, "seed": 0, **how}
    kept = {"made_with": settings, "texts": [{"prompt": prompt, "text": text, "finish": "length"}], "error": None}
    return {"step": step, "made_with": made_with, "sources": {}, "blended": scores, "continuations": kept}


def test_texts_stand_side_by_side_whatever_they_say(tmp_path: Path) -> None:
    one, two = (write(tmp_path / name, [row(1)], begin()) for name in ("one", "two"))
    reports = {
        (one, "step-00000001.json"): texts(1, "first"),
        (one, "step-00000002.json"): texts(2, HOSTILE),
        (two, "step-00000002.json"): texts(2, "x" * 5000, temperature=0.5),
        (two, "step-00000002-ema.json"): texts(2, "mean", weights="ema", prompt=HOSTILE),
        (two, "step-00000003.json"): texts(3, "") | {"continuations": {"made_with": {}, "texts": 3, "error": None}},
    }
    failed = texts(4, "")
    failed["continuations"] |= {"texts": [], "error": "the logits are not finite"}
    old = texts(5, "")
    del old["continuations"]
    reports |= {(two, "step-00000004.json"): failed, (two, "step-00000005.json"): old}
    for (run, name), value in reports.items():
        (run / "eval").mkdir(exist_ok=True)
        (run / "eval" / name).write_bytes(orjson.dumps(value))
    found = read(one, two, out=tmp_path / "r.html")
    head, first, second = found.tables["Samples of text"]
    assert head == ["run", "step 1", "step 2"]
    shown = HOSTILE.replace("\x1b", "\ufffd").replace("\u202e", "\ufffd").replace("\u2066", "\ufffd")
    shown = shown.replace("\x00", "\ufffd").replace("u:p@", "***@").replace("?k=1", "?***")
    assert first == ["one", "first", shown]
    assert second == ["two", "–", "x" * 2000 + "…"]
    assert found.text.count("max tokens 8, temperature 0.0, seed 0") == 3  # below each text where they differ
    assert "max tokens 8, temperature 0.5, seed 0" in found.text
    assert "two, step 4: the logits are not finite" in found.text and "step 2, average of weights" in found.text
    plain = read(write(tmp_path / "plain", [row(1)], begin()), out=tmp_path / "plain.html")
    assert found.tags.count("script") == plain.tags.count("script")
    assert "img" not in found.tags and "\u202e" not in found.text


@pytest.mark.slow
def test_an_evaluation_keeps_its_texts(root: Path, tmp_path: Path) -> None:
    """Greedy texts are those of whole forward passes, drawn ones are the same each time; another prompt asks anew."""
    run = shutil.copytree(root / "done", tmp_path / "done")
    file, quiet = run / "config.yaml", Console(quiet=True)
    ask = [f"run.dir={run}", f"eval.continuations.prompts={orjson.dumps([PROMPT, '', 'keeper']).decode()}"]
    config = load(file, [*ask, "eval.continuations.max_tokens=5"])
    assert read_report(config, 24) is None, "the report of before has no texts"
    report = evaluate(config, 24, quiet)
    assert report.continuations is not None and read_report(config, 24) == report
    assert [each["text"] for each in report.continuations.texts] == greedy(config, [PROMPT, "", "keeper"], 5)
    assert read_report(load(file, [f"run.dir={run}"]), 24) == report, "who asks for no texts has the losses"
    drawn = load(file, [*ask, "eval.continuations.max_tokens=5", "eval.continuations.temperature=5"])
    assert read_report(drawn, 24) is None
    both = [evaluate(drawn, step, quiet).continuations for step in (24, 24)]
    assert both[0] is not None and both[0] == both[1] and both[0].texts != report.continuations.texts
    evaluate(drawn, 21, quiet)
    found = read(run, out=tmp_path / "r.html")
    assert found.tables["Samples of text"][0] == ["step 21", "step 24"]


def greedy(config: Config, prompts: list[str], most: int) -> list[str]:
    """Token by token, each by a forward pass over all before it."""
    loaded = load_decoder(config, 24)
    found = []
    for prompt in prompts:
        ids = loaded.tokenizer.encode(prompt) or [loaded.tokenizer.end_of_document]
        new: list[int] = []
        while len(new) < most:
            with torch.no_grad():
                logits = loaded.model(torch.tensor([[*ids, *new]]), Context())
            token = int(logits[0, -1].argmax())
            if token == loaded.tokenizer.end_of_document:
                break
            new.append(token)
        found.append(loaded.tokenizer.decode([*ids, *new])[len(loaded.tokenizer.decode(ids)) :])
    return found


def test_the_summary_has_a_text_where_no_evaluation_has(tmp_path: Path) -> None:
    run = write(tmp_path / "one", [row(1)], begin())
    asked = {"prompt": "def ", "max_tokens": 4, "temperature": 0.8, "seed": 0}
    value = {"continuation": "main():", "generate": asked, "steps": 7, "weights": "model"}
    (run / "summary.json").write_bytes(orjson.dumps(value))
    assert read(run, out=tmp_path / "r.html").tables["Samples of text"] == [["step 7"], ["main():"]]
    (run / "summary.json").write_bytes(orjson.dumps(value | {"continuation": None}))
    assert "Samples of text" not in read(run, out=tmp_path / "r.html").tables


@pytest.mark.slow
def test_memory_is_in_rows_and_tiles(root: Path, seen: dict[str, Report]) -> None:
    last = orjson.loads((root / "done/metrics.jsonl").read_bytes().splitlines()[-1])
    rows = [orjson.loads(line) for line in (root / "done/metrics.jsonl").read_bytes().splitlines()]
    used = [each["memory"]["host"] for each in rows if "loss" in each]
    assert all(type(each) is int and 2**27 < each < 2**37 for each in used) and last
    assert "allocated" not in rows[0]["memory"]
    assert number(seen["done"].tiles["host memory"]) == pytest.approx(np.median(used) / 2**30, rel=0.01)
