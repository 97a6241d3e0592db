"""A dataset that grows under a run: a run that has begun keeps its data, and reads what is new where it asks for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from pipeline.config.load import load
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.open import open_datasets
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.document_to_steps import when
from pipeline.data.provenance.losses import LossQuestion, answer_losses
from pipeline.data.provenance.run import open_view
from pipeline.data.provenance.step_to_documents import where
from pipeline.train.start.fork import fork
from tests import tiny
from tests.train.runs import column, exact, start, train, weights_hash

pytestmark = pytest.mark.guard

CONSTANT = "train.schedule={type: constant, warmup: 2 steps}"


@pytest.fixture(scope="module", params=["windows", "best_fit"])
def grown(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A corpus that has grown, with runs from before: 8 steps `straight`, and `half` of 4 steps. And as it was."""
    root = tmp_path_factory.mktemp("corpus")
    file = tiny.write_run(root, {"data.loader": {"packing": request.param}})
    preprocess(load(file))
    train(root, "straight", CONSTANT)
    train(root, "half", CONSTANT, "train.duration=4 steps")
    before = tmp_path_factory.mktemp("before") / "data"
    shutil.copytree(root / "data", before)
    more = tiny.write_corpus(root / "more", documents=40, seed=5)
    for path in more.iterdir():
        path.rename(root / "sea" / f"new-{path.name}")
    preprocess(load(file), grow=True)
    return root, before


def copy_of(root: Path, name: str) -> Path:
    shutil.copytree(root / "half", root / name)
    return root / name


def test_a_run_that_has_begun_keeps_its_data(grown: tuple[Path, Path]) -> None:
    root, before = grown
    assert Dataset.open(root / "data/sea/train").documents > Dataset.open(before / "sea/train").documents
    assert Dataset.open(root / "data/sea/heldout").documents > Dataset.open(before / "sea/heldout").documents
    run = copy_of(root, "resumed")
    code, out = start(root, "resumed", CONSTANT)
    assert code == 0, out
    # With the hashes of order and data, and what is validated on.
    assert exact(run) == exact(root / "straight")
    assert weights_hash(run) == weights_hash(root / "straight")
    states = [
        orjson.loads((each / "checkpoints/step-00000008/state.json").read_bytes()) for each in (run, root / "straight")
    ]
    for key in ("journal", "fingerprints"):
        assert states[0][key] == states[1][key]
    config = load(root / "run.yaml", [f"run.dir={run}"])
    assert open_datasets(config, "heldout")["sea"].documents == Dataset.open(before / "sea/heldout").documents


def test_a_fork_keeps_the_data_of_its_parent(grown: tuple[Path, Path]) -> None:
    root, _ = grown
    child = load(root / "run.yaml", [f"run.dir={root / 'child'}", f"data.dir={root / 'data'}", CONSTANT])
    fork(root / "half", 4, child, Console(quiet=True))
    run = train(root, "child", CONSTANT)
    assert exact(run) == exact(root / "straight")[4:]


def test_a_new_run_reads_all_of_it(grown: tuple[Path, Path]) -> None:
    root, _ = grown
    run = train(root, "new", CONSTANT, "train.duration=2 steps")
    journal = orjson.loads((run / "journal.json").read_bytes())
    assert journal["segments"][0]["sources"]["sea"]["tokens"] == Dataset.open(root / "data/sea/train").tokens
    assert column(run, "data_hash")[0] != column(root / "straight", "data_hash")[0]


def test_a_later_phase_reads_what_is_new(grown: tuple[Path, Path]) -> None:
    root, before = grown
    whole, old = Dataset.open(root / "data/sea/train"), Dataset.open(before / "sea/train")
    new = [f"{old.documents} documents", f"{whole.documents} documents"]
    phases = [{"until": "6 steps"}, {"slices": {"sea": new}}]
    settings = (CONSTANT, f"blend.phases={json.dumps(phases)}", "train.validation.samples=0")
    settings += ("train.metrics.windows=true",)
    run = copy_of(root, "phased")
    code, out = start(root, "phased", *settings, "train.duration=7 steps")
    assert code == 0, out
    code, out = start(root, "phased", *settings)  # from a checkpoint that has read some
    assert code == 0, out
    assert column(run, "data_hash")[:6] == column(root / "straight", "data_hash")[:6]
    state = orjson.loads((run / "checkpoints/step-00000008/state.json").read_bytes())
    assert state["fingerprints"]["data"]["sea"] == {"begun": old.fingerprint, "grown": whole.fingerprint}
    view = open_view(root / "run.yaml", [f"run.dir={run}", *settings])
    for step, is_new in ((5, False), (8, True)):
        samples = where(view, step, say=lambda _: None).json["samples"]
        found = [each for sample in samples if sample["source"] == "sea" for each in sample["documents"]]
        assert found
        for each in found:
            assert (each["document"] >= old.documents) == is_new
            assert ("/new-" in each["file"]) == is_new
    (times,) = when(view, "sea", document=found[0]["document"], say=lambda _: None).json["documents"]
    assert 8 in [seen["step"] for seen in times["seen"]]
    (table,) = answer_losses(view, LossQuestion(steps="8", source="sea", highest=9), say=lambda _: None).json["tables"]
    assert {each["document"] for each in found} >= {row["document"] for row in table["rows"]} and table["rows"]
    # Percentages are of what the run began with.
    half = [{"until": "6 steps"}, {"slices": {"sea": [0, 0.5]}}]
    run = copy_of(root, "percent")
    code, out = start(root, "percent", CONSTANT, f"blend.phases={json.dumps(half)}")
    assert code == 0, out
    journal = orjson.loads((run / "journal.json").read_bytes())
    assert journal["segments"][1]["sources"]["sea"]["documents"] == [0, old.documents // 2]


def test_other_documents_in_a_generation_are_refused(grown: tuple[Path, Path], tmp_path: Path) -> None:
    root, before = grown
    old = Dataset.open(before / "sea/train").documents
    phases = json.dumps([{"until": "5 steps"}, {"slices": {"sea": [f"{old} documents", f"{old + 20} documents"]}}])
    settings = (CONSTANT, f"blend.phases={phases}", "train.validation.samples=0")
    copy_of(root, "other")
    assert start(root, "other", *settings, "train.duration=6 steps")[0] == 0
    # The same data folder, grown by other files.
    there = tmp_path / "root"
    shutil.copytree(root / "sea", there / "sea")
    shutil.copytree(root / "land", there / "land")
    shutil.copytree(before, there / "data")
    for path in sorted((there / "sea").glob("new-*")):
        path.write_text(path.read_text()[::-1])
    file = tiny.write_run(there)
    preprocess(load(file), grow=True)
    code, out = start(root, "other", *settings, f"data.dir={there / 'data'}")
    assert code == 2 and ("data.sea.grown" in out or "before it grew" in out), out
    # Where nothing new was read, nothing has changed.
    copy_of(root, "unread")
    assert start(root, "unread", CONSTANT, f"data.dir={there / 'data'}")[0] == 0
