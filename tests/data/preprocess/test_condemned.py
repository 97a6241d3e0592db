"""An engine that gives another id in the middle of a run: condemned, and everything it made is made again."""

import json
import re
import shutil

import orjson
import pytest

from pipeline.common.errors import UserError
from pipeline.data.datasets.verify import verify
from pipeline.data.preprocess.stage import preprocess
from tests.data import mixed
from tests.data.runs import datasets, tree
from tests.data.stage import left_behind, start, write_run_file
from tests.data.tokenization import broken_engine

pytestmark = pytest.mark.guard

MARK = "the engine errs at these words"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return mixed.write(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def errs(tmp_path, monkeypatch):
    """A release of gigatoken that passes the proof and gives another id for a text with certain words."""
    fault = f"if {MARK!r} in text: ids[0] += 1"
    monkeypatch.setitem(broken_engine.FAULTS, "marked", fault)
    broken_engine.install(tmp_path / "broken", monkeypatch, "marked")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))


@pytest.fixture
def marked(tmp_path, corpus):
    """The corpus, and one document with the words."""
    copy = shutil.copytree(corpus, tmp_path / "corpus")
    with (copy / "a.jsonl").open("ab") as file:
        file.write(orjson.dumps({"id": "marked", "text": f"then {MARK}, as it seems"}) + b"\n")
    return copy


@pytest.mark.slow
def test_an_engine_that_errs_is_condemned_and_its_units_made_again(tmp_path, marked, errs):
    expected = mixed.config_of(tmp_path / "expected", marked, "tokenizers")
    preprocess(expected)
    config = mixed.config_of(tmp_path, marked, "auto")
    process = start(write_run_file(config, tmp_path / "run.yaml"))
    said = process.communicate(timeout=300)[0].replace("\n", " ")
    assert process.returncode == 0, said
    assert "engine: gigatoken 9.9 (" in said
    assert re.search(
        r"document marked \(record \d+ of its unit\): gigatoken 9\.9 differs from tokenizers at id 0", said
    )
    assert "all output of gigatoken 9.9 is made again with another engine" in said
    assert re.search(r"engine: tokenizers [\d.]+ \(.*because gigatoken 9\.9 gave other ids", said)
    assert "Traceback" not in said
    assert datasets(config) == datasets(expected)
    condemned = json.loads((config.data_dir / "tokenizer" / "condemned.json").read_text())
    assert list(condemned) == ["gigatoken 9.9"]
    assert "document marked" in condemned["gigatoken 9.9"]
    for source in config.data.sources:
        assert list(mixed.report(config, source.name)["engines"]) == [mixed.own("tokenizers")]
    assert left_behind(config) == []
    assert verify(config.data_dir).problems == []
    before = tree(config.data_dir)
    again = start(tmp_path / "run.yaml")
    assert again.wait(60) == 0
    assert tree(config.data_dir) == before


@pytest.mark.slow
def test_units_of_an_earlier_run_are_made_again(tmp_path, marked, errs):
    """No sample found it when they were made; the one of a later run, which has some units left to do, does."""
    expected = mixed.config_of(tmp_path / "expected", marked, "tokenizers")
    preprocess(expected)
    config = mixed.config_of(tmp_path, marked, "gigatoken", verify_rate=0.0)
    (tmp_path / "broken" / "sitecustomize.py").write_text(
        "import pipeline.data.tokenization.engines as e\ne.CHECK_MIN = 0\n"
    )
    process = start(write_run_file(config, tmp_path / "run.yaml"))
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    wrong, right = datasets(config), datasets(expected)
    assert [name for name in right if wrong[name] != right[name]]
    (tmp_path / "broken" / "sitecustomize.py").unlink()
    for path in (config.data_dir / "plain").glob("receipts/*/*.json"):
        path.unlink()
    process = start(tmp_path / "run.yaml")
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    assert datasets(config) == right
    assert verify(config.data_dir).problems == []


def test_an_engine_asked_for_that_does_not_load(tmp_path, corpus, monkeypatch):
    broken_engine.install(tmp_path / "broken", monkeypatch, load="raise ValueError('this format is not known')")
    config = mixed.config_of(tmp_path, corpus, "gigatoken")
    with pytest.raises(UserError, match=r"data\.preprocess\.engine: gigatoken 9\.9 cannot load this tokenizer"):
        preprocess(config)
    assert left_behind(config) == []
