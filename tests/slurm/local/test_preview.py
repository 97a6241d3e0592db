"""A preview and the start of a stage find the same problems, in the same words."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.common.console import Console
from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.data.curate.checks import CURATE_CHECKS
from pipeline.data.preprocess.checks import PREPROCESS_CHECKS
from pipeline.eval.checks import EVAL_CHECKS
from pipeline.train.start.checks import TRAIN_CHECKS
from slurm.local import stages
from slurm.local.preview import preview
from tests import tiny
from tests.data.chat.templates import TEMPLATES

CHECKS = {"curate": CURATE_CHECKS, "preprocess": PREPROCESS_CHECKS, "train": TRAIN_CHECKS, "eval": EVAL_CHECKS}


class Planted(NamedTuple):
    """A problem that a check finds before the stage of the check starts.

    Attributes:
        stage: whose check it is.
        check: its name.
        changes: of the run file, by key; texts may name the root as `{root}`.
        says: a part of the message.
        plant: makes files.
    """

    stage: str
    check: str
    changes: dict[str, Any]
    says: str
    plant: Callable[[Path], None] = lambda root: None


def tables(root: Path) -> None:
    for number in range(3):
        name = "text" if number < 2 else "body"
        (root / "tables").mkdir(exist_ok=True)
        pq.write_table(pa.table({name: ["a text"], "more": [1]}), root / "tables" / f"{number}.parquet")


def a_cut_file(root: Path) -> None:
    (root / "cut").mkdir()
    (root / "cut" / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n')[:0])


def a_file(root: Path) -> None:
    (root / "file").write_text("")


def a_conversation(root: Path) -> None:
    (root / "chat.jinja").write_text(TEMPLATES["plain"])
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    (root / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")


def an_endless_template(root: Path) -> None:
    turn = "{% if message.role == 'assistant' %}{% generation %}a{% endgeneration %}{% else %}b{% endif %}"
    (root / "endless.jinja").write_text("{% for message in messages %}" + turn + "{% endfor %}")
    turns = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
    (root / "endless.jsonl").write_text(f'{{"messages": {turns}}}\n')


TABLES = [{"name": "t", "type": "parquet", "paths": ["{root}/tables/*.parquet"]}]
CUT = [{"name": "t", "type": "jsonl", "paths": ["{root}/cut/*.gz"]}]
CURATED = {"rules": {"gopher_quality": {}}}
ADOPTED = [{"name": "t", "dataset": "{root}/none"}]
GREEDY = {"prompts": ["a"], "temperature": 1}
LAMBADA = [{"type": "lambada", "path": "{root}/none.jsonl"}]
AGAINST = {**CURATED, "duplicates": {"exact": "text"}, "against": ["{root}/none"]}
CHAT = [{"name": "c", "type": "jsonl", "paths": ["{root}/chat.jsonl"]}]
CHAT[0] |= {"chat": {"format": "openai", "template": "{root}/chat.jinja"}}
TURNS = {"tokenizer.special_tokens": ["<|start|>", "<|end|>"]}
ENDLESS = [{"name": "c", "type": "jsonl", "paths": ["{root}/endless.jsonl"]}]
ENDLESS[0] |= {"chat": {"format": "openai", "template": "{root}/endless.jinja"}}
PACKED = {"data.loader.packing": "best_fit", "model.document_attention": True}
MODEL = {"language": {"model": "{root}/none.bin"}}
CUT_EVAL = {"processes": 2, "parallel": {"cp": 2}}
ITEMS = {"decontaminate": {"files": ["{root}/none.jsonl"]}}
BEFORE_DATA = [
    Planted("curate", "files of sources", {"data.sources": TABLES, "data.curate": CURATED}, "2.parquet has", tables),
    Planted("curate", "files of sources", {"data.sources": CUT, "data.curate": CURATED}, "a.jsonl.gz", a_cut_file),
    Planted("curate", "items of evaluations", {"data.curate": ITEMS}, "none.jsonl"),
    Planted("curate", "earlier curations", {"data.curate": AGAINST}, "/none"),
    Planted("curate", "models and plans", {"data.curate": MODEL}, "none.bin"),
    Planted("preprocess", "data folder", {"data.dir": "{root}/file/data"}, "/file is a file", a_file),
    Planted("preprocess", "files of sources", {"data.sources": TABLES}, "2.parquet has no column", tables),
    Planted("preprocess", "files of sources", {"data.sources": CUT}, "a.jsonl.gz", a_cut_file),
    Planted("preprocess", "tokenizer", {"tokenizer": {"path": "{root}/none.json"}}, "tokenizer.path"),
    Planted("preprocess", "chat templates", PACKED | {"data.sources": ENDLESS}, "learn to stop", an_endless_template),
    Planted("train", "layout", {"parallel.tp": 3, "launch.processes": 3}, "model.heads=2 cannot be cut"),
    Planted("train", "loggers", {"train.metrics.mlflow": {"experiment": "a"}}, "train.metrics.mlflow"),
    Planted("train", "schedule", {"train.schedule.warmup": "9 steps"}, "warmup 9 steps lasts"),
    Planted("train", "conversations", {"data.sources": CHAT, **TURNS}, "windows would cut them", a_conversation),
    Planted("train", "checkpoint to resume from", {"resume": {"from": "latest"}}, "train first"),
    Planted("train", "checkpoints to evaluate", {"eval.every_checkpoint": True}, "train.checkpoint.keep_every"),
    Planted("eval", "layout of the evaluation", {"eval": {**CUT_EVAL, "max_length": 31}}, "=31"),
    Planted("eval", "kinds of benchmarks", {"eval": {"continuations": GREEDY, "processes": 2}}, "temperature"),
    Planted("eval", "files of eval.tasks", {"eval.tasks": LAMBADA}, "none.jsonl"),
    Planted("eval", "held-out splits", {"data.splits": {"heldout": 0}, "train.validation.samples": 0}, "held out"),
]  # fmt: skip
WITH_DATA = [
    Planted("preprocess", "plans of datasets", {"data.preprocess.max_document_bytes": 4000}, "max_document_bytes"),
    Planted("preprocess", "tokenizer", {"tokenizer": {"train": {"vocab_size": 301}}}, "the tokenizer in"),
    Planted("train", "datasets and their order", {"data.splits": {"heldout": 0.3}}, "made with other settings"),
    Planted("train", "weights to start from", {"train.init_from": {"path": "{root}/none"}}, "train.init_from.path"),
    Planted("train", "teacher", {"train.distill": {"teacher": {"path": "{root}/none"}}}, "train.distill.teacher.path"),
    Planted("eval", "checkpoint to evaluate", {}, "does not have a checkpoint"),
]
ELSEWHERE = {
    ("preprocess", "added files"): "tests/data/preprocess/test_grow.py",
    ("preprocess", "decisions of the curation"): "tests/data/curate/results/test_results.py",
    ("train", "mirror of checkpoints"): "tests/train/checkpoint/mirror/test_mirrored_run.py",
    ("train", "learning rate where the run resumes"): "tests/train/test_schedule_seam.py",
    ("train", "model"): "a vocabulary of unknown size, which no stage before it leaves",
    ("eval", "names of eval.harness.tasks"): "tests/eval/tasks/test_harness.py",
    ("eval", "held-out datasets"): "tests/eval/test_perplexity.py",
}
"""Checks whose problems are planted elsewhere."""


def filled(value: Any, root: Path) -> Any:
    """The value with `{root}` replaced in its texts."""
    if isinstance(value, dict):
        return {key: filled(each, root) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each, root) for each in value]
    return value.replace("{root}", str(root)) if isinstance(value, str) else value


def message(start: Callable[[], object]) -> str:
    """The error of a command."""
    with pytest.raises(UserError) as error:
        start()
    return str(error.value)


def names(config: Config) -> list[Any]:
    return (["curate"] if config.data.curate is not None else []) + ["preprocess", "train", "eval"]


def test_each_check_has_a_planted_problem() -> None:
    planted = {(each.stage, each.check) for each in [*BEFORE_DATA, *WITH_DATA]} | ELSEWHERE.keys()
    assert planted == {(stage, check.name) for stage, checks in CHECKS.items() for check in checks}


@pytest.mark.parametrize("planted", BEFORE_DATA, ids=lambda each: f"{each.stage}: {each.says}")
def test_before_there_are_data(tmp_path: Path, planted: Planted) -> None:
    config = load(tiny.write_run(tmp_path, filled(planted.changes, tmp_path)))
    planted.plant(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    shown = message(lambda: preview(config, names(config), Console(quiet=True)))
    assert planted.says in shown
    assert sorted(tmp_path.rglob("*")) == before
    assert shown == message(lambda: stages.run(config, Console(quiet=True)))
    if planted.stage in ("curate", "preprocess"):
        start = getattr(stages, planted.stage)
        assert shown == message(lambda: start(config)) == message(lambda: start(config, dry_run=True))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture(scope="module")
def preprocessed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run whose data are made."""
    root = tmp_path_factory.mktemp("preview")
    stages.preprocess(load(tiny.write_run(root)))
    return root


@pytest.mark.parametrize("planted", WITH_DATA, ids=lambda each: f"{each.stage}: {each.says}")
def test_where_there_are_data(preprocessed: Path, planted: Planted) -> None:
    file = tiny.write_run(preprocessed, filled(planted.changes, preprocessed), name="changed.yaml")
    config = load(file)
    shown = message(lambda: preview(config, [planted.stage], Console(quiet=True)))  # type: ignore[list-item]
    assert planted.says in shown
    start = {"preprocess": stages.preprocess, "train": stages.train, "eval": stages.evaluate}[planted.stage]
    assert shown == message(lambda: start(config))


def test_a_preview_lists_all_problems_and_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = [{"name": name, "paths": [f"{tmp_path}/none/{name}"]} for name in ("one", "two")]
    file = tiny.write_run(tmp_path, {"data.sources": nothing, "parallel.tp": 3, "launch.processes": 3})
    found = message(lambda: preview(load(file), ["preprocess", "train", "eval"], Console()))
    assert [part in found for part in ("data.sources.0.paths", "data.sources.1.paths", "parallel.tp=3")] == [True] * 3
    assert "not looked at: datasets and their order, held-out datasets: preprocessing" in capsys.readouterr().out
