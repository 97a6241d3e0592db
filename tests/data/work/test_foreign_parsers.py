"""Parsers of other packages: each call names its record, and one that never ends takes neither the run nor a worker."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.data.sources import foreign_parser
from pipeline.data.sources.foreign_parser import FOREIGN_PARSERS, parsing, working_on
from pipeline.data.work import worker_pool, worker_watch
from pipeline.data.work.worker_pool import Done, Lost, Workers
from tests.data.preprocess.test_unknown import words_tokenizer
from tests.data.runs import make_config
from tests.data.sources.web.test_warc import Writer
from tests.data.stage import children, write_run_file
from tests.tiny import command
from tests.waiting import runs, until

DATA = Path(worker_pool.__file__).parents[1]
OURS_OR_TRUSTED = {
    *("pipeline", "numpy", "orjson", "xxhash", "rich", "pyarrow", "numba", "pydantic", "torch", "filelock"),
    *("datasets", "huggingface_hub", "zstandard", "fsspec", "yaml", "packaging", "_typeshed"),
    "jinja2",
}
"""Packages that get no text of a record, or whose readers of tables and streams have limits of their own, as the
process of `data/chat/renderer.py` has."""

NO_RECORDS = (
    "datasets/token_bytes.py",
    *(f"tokenization/{name}.py" for name in ("definition", "engine_check", "probe")),
)
"""Modules that give these packages the vocabulary, or texts of ours, and no record."""


def _imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    return {name.partition(".")[0] for name in found}


def test_each_package_that_parses_records_is_listed_and_each_module_that_calls_one_names_the_record() -> None:
    users: dict[str, set[Path]] = {}
    for path in DATA.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for name in _imports(tree) - OURS_OR_TRUSTED - set(sys.stdlib_module_names):
            users.setdefault(name, set()).add(path)
    assert set(users) == set(FOREIGN_PARSERS)
    modules = set().union(*users.values())
    modules -= {DATA / path for path in NO_RECORDS}
    without = [path for path in modules if not re.search(r"\bwith .*\bparsing\(", path.read_text())]
    assert without == []


def test_a_call_names_its_parser_and_record_while_it_lasts() -> None:
    slot = worker_watch.new_slot()
    watch = worker_watch.WorkerWatch(slot)
    before = foreign_parser._Here.memory
    try:
        foreign_parser.share(slot)
        working_on("dir/a.warc.gz#17")
        assert watch.parsed is None
        with parsing("trafilatura"):
            assert str(watch.parsed) == "trafilatura with dir/a.warc.gz#17"
        with pytest.raises(ZeroDivisionError), parsing("tokenizers"):
            working_on("a", "b")
            _ = 1 / 0
        assert watch.parsed is None
        with parsing("x" * 5000):
            assert watch.parsed is not None
    finally:
        foreign_parser._Here.memory = before


def make_stuck(note: str = ""):
    """A worker that a parser keeps busy, in C code that handles no signal."""

    def run(job, progress):
        if note:
            Path(note).write_text(str(os.getpid()))
        if job != "quick":
            # A batch is handed over record by record in the second attempt.
            working_on("a@1", "a@9") if job == "batch" and not foreign_parser.is_careful() else working_on("a@5")
            with parsing("ftfy"):
                re.match("(a+)+$", "a" * 60 + "b")
        return job

    return run


@pytest.mark.guard
def test_a_parser_above_its_bound_fails_the_job_once_the_record_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "CPU_BOUND_S", 0.2)
    monkeypatch.setattr(worker_pool, "_LOOK_S", 0.05)
    with Workers(make_stuck, (), 2) as workers:
        events = list(workers.retry(["stuck", "quick", "batch"]))
    lost = {job: [each for each in events if isinstance(each, Lost) and each.job == job] for job in ("stuck", "batch")}
    assert [each.job for each in events if isinstance(each, Done)] == ["quick"]
    assert [each.is_last for each in lost["stuck"]] == [True]
    assert "ftfy with a@5 took" in str(lost["stuck"][0]) and "skip_records: ['a@5']" in str(lost["stuck"][0])
    assert [each.is_last for each in lost["batch"]] == [False, True]
    assert "the batch a@1 to a@9" in str(lost["batch"][0]) and "skip_records: ['a@5']" in str(lost["batch"][1])


def make_greedy(looked: str):
    """A worker that a parser lets grow, once the parent has looked at it."""

    def run(job, progress):
        working_on("a@5")
        kept = []
        with parsing("ftfy"):
            until(Path(looked).exists)
            # More than the system may take from what this process has inherited, meanwhile.
            until(lambda: kept.append(b"x" * 2**28) if len(kept) < 16 else None, pause=0.2)

    return run


@pytest.mark.guard
def test_a_parser_that_takes_too_much_memory_fails_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = tmp_path / "looked"
    usage = worker_watch.usage

    def noted(pid: int) -> tuple[float, int] | None:
        found = usage(pid)
        looked.touch()
        return found

    monkeypatch.setattr(worker_watch, "usage", noted)
    monkeypatch.setattr(worker_watch, "MEMORY_BOUND", 2**26)
    monkeypatch.setattr(worker_pool, "_LOOK_S", 0.05)
    with Workers(make_greedy, (str(looked),), 1) as workers:
        (lost,) = [event for event in workers.retry(["job"]) if isinstance(event, Lost)]
    assert lost.is_last and "ftfy with a@5 took" in str(lost) and "of memory, more than" in str(lost)


STUCK = "<html><body><article><p>" + "<b>x</b> <i>y</i>" * 60_000 + "</p></article></body></html>"
"""Takes half an hour."""


@pytest.mark.first(1)
@pytest.mark.guard
@pytest.mark.parametrize(
    ("stage", "number", "in_worker"),
    [
        ("preprocess", signal.SIGTERM, True),
        ("curate", signal.SIGKILL, True),
        ("preprocess", signal.SIGINT, False),  # it reads the texts that the tokenizer is trained on itself
    ],
)
def test_a_command_ends_though_it_is_inside_of_a_page(tmp_path: Path, stage: str, number: int, in_worker: bool) -> None:
    pages = Writer()
    pages.page(1, STUCK.encode())
    file = pages.save(tmp_path / "a.warc.gz")
    limits = {"max_tags": 10**7, "max_attributes": 10**7, "max_paragraph_work": 10**15}
    source = {"name": "s", "type": "warc", "paths": [str(file)], "warc": {"html": "trafilatura", **limits}}
    tokenizer = words_tokenizer(tmp_path / "tokenizer.json") if in_worker else {"train": {"vocab_size": 300}}
    curate = {"duplicates": {"exact": "text"}} if stage == "curate" else None
    run_file = write_run_file(
        make_config(tmp_path, [source], tokenizer=tokenizer, curate=curate), tmp_path / "run.yaml"
    )
    process = subprocess.Popen(command(stage, run_file), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def busy() -> list[int]:
        """Processes that have begun the page, by the CPU seconds that imports do not take."""
        found = children(process.pid) if in_worker else [process.pid]
        return [pid for pid in found if (worker_watch.usage(pid) or (0, 0))[0] > (3 if in_worker else 8)]

    try:
        found = until(busy, process)
        process.send_signal(number)
        process.wait(60)
        until(lambda: not any(map(runs, found)))
    finally:
        process.kill()
        process.wait()


@pytest.mark.guard
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_the_command_whatever_it_is_inside_of(tmp_path: Path, number: int) -> None:
    note = tmp_path / "pid"
    program = f"""if True:
        from pipeline.data.work.worker_pool import Workers
        from tests.data.work.test_foreign_parsers import make_stuck
        with Workers(make_stuck, ({str(note)!r},), 1) as workers:
            list(workers.retry(["stuck"]))
    """
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    try:
        until(lambda: note.exists() and note.read_text())
        worker = int(note.read_text())
        process.send_signal(number)
        process.wait(60)  # it hung here for as long as the parser took: for ever
        until(lambda: not runs(worker))
    finally:
        process.kill()
        process.wait()
