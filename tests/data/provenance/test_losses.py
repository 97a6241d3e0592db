"""`pipeline data losses` against plain loops over what `data where` shows of each step."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.cli.main import app
from pipeline.common.errors import UserError
from pipeline.config.load import dump, load
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance import loss_documents, loss_stream
from pipeline.data.provenance.loss_file import encode, losses
from pipeline.data.provenance.losses import Losses, LossQuestion, answer_losses
from pipeline.data.provenance.run import RunView, open_view
from pipeline.data.provenance.step_to_documents import where
from pipeline.train.loop.quantities.windows import LossWriter
from tests.data.runs import make_config, write_text

STEPS = 40


def _quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module", params=["windows", pytest.param("best_fit", marks=pytest.mark.guard)])
def root(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A run on windows or on packs: several epochs, a ramp, a phase, a slice, skips; losses of its first 40 steps."""
    root = tmp_path_factory.mktemp("losses")
    write_text(root / "text", 30)
    rows = [
        {"id": f"r{n}", "text": f"{n} while workers flow 漢字 " * (n % 9 + 1), "lang": "de" if n % 3 else "en"}
        for n in range(60)
    ]
    (root / "lines.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    sources = [
        {"name": "t", "paths": [f"{root}/text/**/*.txt"], "weight": 1},
        {"name": "j", "type": "jsonl", "paths": [f"{root}/lines.jsonl"], "metadata": ["lang"], "weight": 2},
    ]
    config = make_config(root, sources)
    values = yaml.safe_load(dump(config))
    values["train"] |= {"duration": "60 steps", "sequence_length": 24, "batch_size": 6, "micro_batch_size": 2}
    values["train"] |= {
        "batch_ramp": {"start": 3, "increment": 3, "tokens": 700},
        "loss": {"mask_document_start": True},
    }
    values["blend"] = {
        "phases": [{"until": "30 steps"}, {"sequence_length": 17, "slices": {"j": [0.1, 0.8]}}],
        "skip": [{"steps": "7-8"}, {"samples": "30-33"}, {"source": "t", "documents": ["3-9", 15], "from_step": 10}],
    }
    values["data"]["loader"] = {"packing": request.param}
    (root / "run.yaml").write_text(yaml.safe_dump(values))
    preprocess(load(root / "run.yaml"))
    return root


@pytest.fixture(scope="module")
def run(root: Path) -> RunView:
    return open_view(root / "run.yaml")


@pytest.fixture(scope="module")
def pieces(run: RunView) -> list[dict[str, Any]]:
    """Every piece of a document in the recorded samples, by `data where`; the losses are written beside."""
    writer, chance, found = LossWriter(run.folder / "losses.bin", 1), np.random.default_rng(0), []
    for step in range(1, STEPS + 1):
        shown = where(run, step, say=_quiet).json
        nats, targets = chance.uniform(20, 60, len(shown["samples"])), np.empty(len(shown["samples"]))
        for place, sample in enumerate(shown["samples"]):
            mine = []
            for piece in sample["documents"]:
                first, end = piece["targets"]
                skipped = piece["masked"] or sample["masked"] or shown["skipped"]
                counted = 0 if skipped else end - max(first, 1)
                mine.append(
                    {"step": step, "source": sample["source"], "epoch": sample["lap"], "document": piece["document"]}
                )
                mine[-1] |= {"sample": sample["sample"], "position": sample["position"], "file": piece["file"]}
                mine[-1] |= {"targets": 0 if skipped else end - first, "counted": max(0, counted)}
            targets[place] = sum(one["counted"] for one in mine)
            if step == 12 and place == 1:
                nats[place] = np.inf
            loss = float(losses(encode(nats[place : place + 1], targets[place : place + 1]))[0])
            found += [{**one, "loss": loss} for one in mine]
        if step != 15:
            writer.write({"step": step, "first": shown["first_sample"], "codes": encode(nats, targets)})
    writer.close()
    return [one for one in found if one["step"] != 15]


def known(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in pieces if np.isfinite(one["loss"])]


def ask(run: RunView, **options: Any) -> Losses:
    return answer_losses(run, LossQuestion(**options), say=_quiet)


def table(found: Losses, number: int = 0) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows of a table by the columns before the first number of another kind."""
    rows = found.json["tables"][number]["rows"]
    return {
        tuple(
            row[key] for key in ("source", "epoch", "first_step", "last_step", "file", "lang", "document") if key in row
        ): row
        for row in rows
    }


def mean(some: list[dict[str, Any]], weight: str) -> float:
    return sum(one["loss"] * one[weight] for one in some) / sum(one[weight] for one in some)


@pytest.mark.parametrize("by", ["source", "epoch", "step"])
def test_tables_of_samples(
    run: RunView, pieces: list[dict[str, Any]], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_stream, "_SAMPLES", 16)
    found = table(ask(run, by=by, steps="5:36", every=7 if by == "step" else None))
    group = {
        "source": lambda one: (one["source"],),
        "epoch": lambda one: (one["source"], one["epoch"]),
        "step": lambda one: ((s := (one["step"] - 5) // 7 * 7 + 5), min(s + 6, 36)),
    }[by]
    groups = defaultdict(list)
    for one in pieces:
        if 5 <= one["step"] <= 36:
            groups[group(one)].append(one)
    assert found.keys() == groups.keys()
    for key, some in groups.items():
        row, fine = found[key], known(some)
        assert row["loss"] == pytest.approx(mean(fine, "counted")), key
        assert row["targets"] == sum(one["counted"] for one in fine)
        samples = {one["sample"]: one["loss"] for one in some}
        assert row["samples"] == len({one["sample"] for one in fine})
        assert (row["masked"], row["not_finite"]) == (
            sum(np.isnan(x) for x in samples.values()),
            sum(np.isinf(x) for x in samples.values()),
        )
    assert sum(row["not_recorded"] for row in found.values()) == len(run.journal.samples(14))
    assert sum(row["masked"] for row in found.values()) >= 10 and sum(row["not_finite"] for row in found.values()) == 1


@pytest.mark.parametrize("by", ["file", "lang"])
def test_tables_of_documents(run: RunView, pieces: list[dict[str, Any]], by: str, root: Path) -> None:
    lines = (root / "lines.jsonl").read_bytes().splitlines()
    groups = defaultdict(list)
    for one in known(pieces):
        if one["targets"]:
            at = where_document(run, one["source"], one["document"])
            value = (
                one["file"]
                if by == "file"
                else "(none)"
                if one["source"] == "t"
                else orjson.loads(lines[at - 1])["lang"]
            )
            groups[one["source"], value].append(one)
    found = table(ask(run, by=by))
    assert found.keys() == groups.keys()
    for key, some in groups.items():
        assert found[key]["loss"] == pytest.approx(mean(some, "targets"))
        assert found[key]["documents"] == len({one["document"] for one in some})
        assert found[key]["targets"] == sum(one["targets"] for one in some)


def where_document(run: RunView, source: str, document: int) -> int:
    """Line of a document."""
    origin = run.describe(source, [document], False, _quiet)[document].origin
    assert origin is not None
    return origin.number or 0


@pytest.mark.parametrize("steps", [None, "11:30"])
def test_documents(
    run: RunView, pieces: list[dict[str, Any]], steps: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_documents, "_BLOCK", 7)
    monkeypatch.setattr(loss_documents, "_IN_MEMORY", 0)
    first, end = (1, STEPS) if steps is None else (11, 30)
    groups = defaultdict(list)
    for one in known(pieces):
        if one["targets"] and first <= one["step"] <= end:
            groups[one["source"], one["document"]].append(one)
    expected = {key: (mean(some, "targets"), sum(one["targets"] for one in some)) for key, some in groups.items()}
    found = ask(run, steps=steps, highest=12, lowest=5)
    for number, (count, sign) in enumerate([(12, -1), (5, 1)]):
        order = sorted(expected, key=lambda key: (sign * round(expected[key][0], 9), -expected[key][1], key))[:count]
        rows = found.json["tables"][number]["rows"]
        assert [row["loss"] for row in rows] == pytest.approx([expected[key][0] for key in order])
        for row in rows:
            value, targets = expected[row["source"], row["document"]]
            assert row["loss"] == pytest.approx(value) and row["targets"] == targets
            assert row["place"].startswith(str(run.folder.parent)) and row["text"]
    source, document = max(groups, key=lambda key: len(groups[key]))
    (one,) = ask(run, steps=steps, source=source, document=document).json["tables"]
    assert [(row["step"], row["sample"]) for row in one["rows"]] == sorted(
        {(each["step"], each["sample"]) for each in groups[source, document]}
    )
    assert sum(row["targets"] for row in one["rows"]) == expected[source, document][1]
    assert f"loss {expected[source, document][0]:.4f} over" in one["title"]


def test_gains(run: RunView, pieces: list[dict[str, Any]]) -> None:
    by_epoch = defaultdict(list)
    for one in known(pieces):
        if one["targets"]:
            by_epoch[one["source"], one["document"], one["epoch"]].append(one)
    gains = {
        (source, document): (
            mean(some, "targets") - mean(by_epoch[source, document, 1], "targets"),
            sum(one["targets"] for one in by_epoch[source, document, 1]),
        )
        for (source, document, epoch), some in list(by_epoch.items())
        if epoch == 0 and (source, document, 1) in by_epoch
    }
    found = ask(run, gain=True, highest=4)
    rows = found.json["tables"][1]["rows"]
    assert [row["gain"] for row in rows] == pytest.approx(
        sorted((gain for gain, _ in gains.values()), reverse=True)[:4]
    )
    for source, row in table(found).items():
        mine = [value for key, value in gains.items() if key[0] == source[0]]
        assert row["documents_in_both"] == len(mine) > 0
        assert row["their_gain"] == pytest.approx(sum(a * b for a, b in mine) / sum(b for _, b in mine))
        zero, one = ([p for p in known(pieces) if (p["source"], p["epoch"]) == (source[0], e)] for e in (0, 1))
        assert row["gain"] == pytest.approx(mean(zero, "counted") - mean(one, "counted"))


def test_parquet(run: RunView, pieces: list[dict[str, Any]], tmp_path: Path) -> None:
    ask(run, parquet=tmp_path / "losses.parquet", documents=True)
    rows = pq.read_table(tmp_path / "losses.parquet").to_pylist()
    samples = defaultdict(list)
    for one in pieces:
        samples[one["sample"]].append(one)
    assert [row["sample"] for row in rows] == sorted(samples)
    for row in rows:
        some = samples[row["sample"]]
        for key in ("step", "source", "epoch", "position"):
            assert row[key] == some[0][key]
        loss = some[0]["loss"]
        assert row["loss"] == (None if np.isnan(loss) else loss)
        assert row["tokens"] == (sum(one["counted"] for one in some) if np.isfinite(loss) else 0)
        shown = dict[int, int]()
        for number, count in zip(row["documents"], row["document_targets"], strict=True):
            shown[number] = shown.get(number, 0) + count
        expected = defaultdict(int)
        for one in some:
            expected[one["document"]] += one["targets"]
        if np.isfinite(loss):
            assert shown == {number: count for number, count in expected.items() if count}
    with pytest.raises(UserError, match="exists"):
        ask(run, parquet=tmp_path / "losses.parquet")


def test_what_cannot_be_answered_says_what_can(run: RunView, pieces: list[dict[str, Any]], root: Path) -> None:
    for options, says in [
        ({"steps": "39:41"}, "has the losses of steps 1 to 40"),
        ({"steps": "x"}, "give a step"),
        ({"by": "url"}, "kept of documents .*: lang"),
        ({"document": 3}, "also give --source"),
        ({"steps": "3:2"}, "give the first and the last step"),
        ({"every": 3}, "also give --by step"),
        ({"documents": True}, "also give --parquet"),
        ({"by": "file", "gain": True}, "do not go together"),
        ({"source": "no"}, "not one of the run's sources"),
    ]:
        with pytest.raises(UserError, match=says):
            ask(run, **options)
    with pytest.raises(UserError, match=r"set train\.metrics\.windows=true"):
        answer_losses(
            open_view(root / "run.yaml", [f"run.dir={root / 'other'}", f"data.dir={root / 'run/data'}"]),
            LossQuestion(),
            say=_quiet,
        )
    from typer.testing import CliRunner

    shown = CliRunner().invoke(app, ["data", "losses", str(root / "run.yaml"), "--by", "epoch", "--json"])
    assert shown.exit_code == 0, shown.output
    assert len(orjson.loads(shown.stdout)["tables"][0]["rows"]) == len(table(ask(run, by="epoch")))
