"""Tasks of lm-evaluation-harness on the model as it is laid out here, and what they need where there is no network."""

from __future__ import annotations

import difflib
import logging
import math
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from pipeline.common import storage
from pipeline.common.console import progress, say
from pipeline.common.errors import UserError, install_extra
from pipeline.common.hashing import value_hash
from pipeline.common.redaction import masked
from pipeline.config import Config
from pipeline.config.eval import HarnessConfig
from pipeline.config.parsing.code_keys import TASK_KEYS, refuse_code_of_others
from pipeline.data.tokenization.chat_prompts import ChatPrompts, chat_prompts
from pipeline.eval.engine import GenerationEngine
from pipeline.eval.reports import benchmark_path, evaluated_by, kept_results
from pipeline.eval.tasks.builtin import Row, made_with_weights, print_results, results_of, truncated_words
from pipeline.train.checkpoint.exported import Evaluated
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.distributed.process_group import barrier, broadcast_from_rank0
from pipeline.train.loop.out_of_memory import out_of_memory_means

PREFETCHED = "prefetched"
"""Folder of what `prefetch` writes, below `eval.harness.include_path`."""
_BOOTSTRAP = 1000
"""Resamples for the standard error of what has no formula for it: known to some percent."""
_KEPT = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
"""Keys of the harness's results that say how good the model is, and not what machine it ran on."""
_BEAT = 20.0
"""Seconds between two signs of life of a process that the others wait for, or that waits for them."""
_SEEDS = {"random_seed": 0, "numpy_random_seed": 1234, "torch_random_seed": 1234}
"""Seeds of the harness, set before it loads tasks: some shuffle their documents."""
_STATE = ("lm_eval", "files")
"""Keys of `made_with` that may change on their own. Results that differ in these alone replace one another."""


def run_harness(
    engine: GenerationEngine, console: Console, *, keep: bool = True, beat: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Make the tasks of `eval.harness`, if they are not made of these weights in this way yet. Every rank calls this.

    Args:
        engine: with weights that are kept.
        console: where the table goes.
        keep: whether the results are written down.
        beat: a sign of life, called after each batch, and in between where the harness takes its time.

    Returns:
        What the harness says of the tasks.

    Raises:
        UserError: the package is not there, a task is unknown, or its data is.
    """
    config, source = engine.config, engine.source
    assert source is not None and config.eval.harness is not None
    path = benchmark_path(config, evaluated_by(source), "harness")
    value: dict[str, Any] | None = broadcast_from_rank0(lambda: _made(config, source))
    if value is None:
        made_with = broadcast_from_rank0(lambda: _made_with(config, source))
        found = _evaluate(engine, config.eval.harness, console, beat)
        value = {**results_of(source), "made_with": made_with, **found}
        if keep and engine.is_first:
            path.parent.mkdir(exist_ok=True)
            storage.put_json(path, {**value, "others": _others(config, source, made_with)})
    if engine.is_first:
        title = "lm-evaluation-harness"
        print_results(config, source, console, title, _rows(value), path if keep else None)
    return value


def harness_is_made(config: Config, step: int) -> bool:
    """True if the tasks of `eval.harness` are made of this checkpoint already."""
    return config.eval.harness is None or _made(config, Checkpoints.of_run(config.run.dir).at(step)) is not None


def prefetch(config: Config, console: Console) -> None:
    """Fetch the data of the tasks of `eval.harness`, and write it and task files that read it.

    They are folders `include_path/prefetched/TASK` with a Parquet file for each split that the task uses (JSON would
    lose the types of columns) and a task file, which is the harness's own but for where its data is. They are found
    before the harness's own from then on.

    Raises:
        UserError: `include_path` is not set, a task is unknown, its data cannot be had, or it is not a table.
    """
    harness = config.eval.harness
    if harness is None:
        raise UserError("eval.harness is not set, so there is nothing to fetch; name its tasks")
    if harness.include_path is None:
        raise UserError("eval.harness.include_path is not set; name the folder where the tasks' data is to be written")
    for name in harness.tasks:
        if _is_file(name):
            raise UserError(
                f"eval.harness.tasks: {name} is a file that says where its data is read from, so it would not "
                f"find the fetched data; move it to eval.harness.include_path ({harness.include_path}) and name its "
                "task here, or leave it out"
            )
    _require()
    target = harness.include_path / PREFETCHED
    with _quiet(), storage.writing(f"eval.harness.include_path ({harness.include_path})"):
        target.mkdir(parents=True, exist_ok=True)
        manager = _manager(config, harness)
        for name, task in _load(manager, harness)["tasks"].items():
            entry = manager.task_index.get(name)
            if entry is not None and entry.yaml_path is not None and target in entry.yaml_path.parents:
                say(console, f"{name}: {target / name} exists already; remove it to fetch the task again")
            else:
                _write_task(target / name, name, task, entry)
                say(console, f"{name}: written to {target / name}")


def load_harness_tasks(config: Config, harness: HarnessConfig) -> dict[str, Any]:
    """Tasks of the harness with their data, by name; groups as the tasks that they have.

    Raises:
        UserError: the package is not there, a task is unknown, or its data is.
    """
    _require()
    with _quiet():
        tasks: dict[str, Any] = _load(_manager(config, harness), harness)["tasks"]
        return tasks


def check_harness_tasks(config: Config, harness: HarnessConfig) -> None:
    """Refuse names that the harness does not know. No data is loaded.

    Raises:
        UserError: the package is not there, or a task is unknown.
    """
    _require()
    with _quiet():
        _check_names(_manager(config, harness), harness)


def _write_task(folder: Path, name: str, task: Any, entry: Any) -> None:
    """The data and the file of a task."""
    if entry is None or entry.yaml_path is None or "class" in (entry.cfg or {}):
        raise UserError(
            f"eval.harness.tasks: {name} loads its data with its own code, so its data cannot be fetched here; run "
            "the task once with network and HF_HOME on a disk that the jobs see too, and then with HF_HUB_OFFLINE=1"
        )
    folder.mkdir(exist_ok=True)
    wanted = {getattr(task.config, f"{use}_split") for use in ("training", "validation", "test", "fewshot")}
    wanted.add(getattr(getattr(task.config, "fewshot_config", None), "split", None))
    files = {}
    for split in task.dataset:
        if split in wanted:
            file = folder / f"{split}.parquet"
            tmp = storage.temporary(file)
            try:
                task.dataset[split].to_parquet(str(tmp))
                storage.commit(tmp, file)
            finally:
                tmp.unlink(missing_ok=True)
            files[split] = str(file)
    lines = {
        "include": str(entry.yaml_path.resolve()),
        "task": name,
        # A tag of this name would have this task alone.
        "tag": None,
        "dataset_path": "parquet",
        "dataset_name": None,
        "custom_dataset": None,
        "dataset_kwargs": {"data_files": files},
    }
    storage.put(folder / f"{name}.yaml", storage.json_bytes(lines))  # JSON is YAML


def _evaluate(
    engine: GenerationEngine, harness: HarnessConfig, console: Console, beat: Callable[[], None]
) -> dict[str, Any]:
    """The results of the harness. Every rank calls this."""
    broadcast_from_rank0(_require)
    from lm_eval import simple_evaluate

    from pipeline.eval.tasks.harness_model import HarnessModel

    batch_size = harness.batch_size or engine.config.eval.batch_size
    with (
        _quiet(),
        _Alive(beat) as alive,
        out_of_memory_means(lambda: f"lower eval.harness.batch_size ({batch_size} now)"),
    ):
        model = HarnessModel(
            engine,
            batch_size,
            lambda what, count: alive.progress(console, what, count),
            _chat(engine) if harness.apply_chat_template else None,
        )
        found = simple_evaluate(
            model=model,
            tasks=_names(harness),
            task_manager=_Tasks(_manager(engine.config, harness), harness),
            num_fewshot=harness.num_fewshot,
            limit=harness.limit,
            bootstrap_iters=_BOOTSTRAP if engine.is_first else 0,
            log_samples=False,
            apply_chat_template=harness.apply_chat_template,
        )
        # Rank 0 resamples, for which the others wait here.
        result: dict[str, Any] = broadcast_from_rank0(
            lambda: {key: _plain(found[key]) for key in _KEPT if key in found} | {"truncated": dict(+model.truncated)}
        )
    return result


def _chat(engine: GenerationEngine) -> ChatPrompts:
    """Conversations by the template beside the weights."""
    assert engine.source is not None
    found = chat_prompts(engine.source.path, engine.tokenizer)
    if found is None:
        raise UserError(
            f"eval.harness.apply_chat_template: the weights in {engine.source.path} have no chat template "
            "(chat_template.jinja); they get one by training on a source with `chat:`"
        )
    return found


class _Tasks:
    """The tasks of a run file in place of the harness's task manager, for `simple_evaluate`.

    That one would be given tasks that are loaded already, and load them in a way that draws random numbers.
    """

    def __init__(self, manager: Any, harness: HarnessConfig) -> None:
        self._manager = manager
        self._harness = harness

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def load(self, _: list[str]) -> Any:
        """Load them; every rank calls this."""
        # Rank 0 first: it says what is wrong, and has fetched what the others then find.
        loaded: list[Any] = []
        broadcast_from_rank0(lambda: loaded.append(_load(self._manager, self._harness)))
        return loaded[0] if loaded else _load(self._manager, self._harness)


def _manager(config: Config, harness: HarnessConfig) -> Any:
    """The task manager that knows all tasks of a run file; without those of the harness where these are not needed.

    Whatever executes tasks of the harness asks for it.

    Raises:
        UserError: others may have written what tasks execute.
    """
    refuse_code_of_others(config, *TASK_KEYS)
    from lm_eval.tasks import TaskManager

    # What comes later takes the place of what came before.
    paths = [harness.include_path, harness.include_path / PREFETCHED] if harness.include_path else []
    paths = [path for path in paths if path.is_dir()]
    if paths:
        own = TaskManager(include_path=[*paths], include_defaults=False)
        # Reading all 10,000 files of the harness takes ten seconds.
        if all(name in own.all_subtasks or _is_file(name) for name in harness.tasks):
            return own
    return TaskManager(include_path=[*paths] or None)


def _names(harness: HarnessConfig) -> list[str]:
    """The tasks of a run file, those that are files by their whole path: they are relative to the current folder."""
    return [os.path.abspath(name) if _is_file(name) else name for name in harness.tasks]


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and Path(name).is_file()


def _load(manager: Any, harness: HarnessConfig) -> Any:
    """The tasks and groups of a run file, with their data.

    Raises:
        UserError: there is no such task, it cannot be loaded, or it is none for a model as it is here.
    """
    _check_names(manager, harness)
    found: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    random.seed(_SEEDS["random_seed"])
    np.random.seed(_SEEDS["numpy_random_seed"])
    torch.manual_seed(_SEEDS["torch_random_seed"])
    for name in _names(harness):
        try:
            for kind, values in manager.load([name]).items():
                found[kind] |= values
        except Exception as error:  # whatever a task's files and code raise, and those who fetch its data
            reason = " ".join(masked(str(error)).split())[:300]
            raise UserError(
                f"eval.harness.tasks: {name} cannot be loaded: {type(error).__name__}: {reason}; where there is no "
                "network, call `pipeline eval prefetch RUN.yaml` first on a machine that has one"
            ) from error
    for name, task in found["tasks"].items():
        for attribute, what in (
            ("UNSAFE_CODE", "runs code that the model wrote (unsafe_code), which is not supported"),
            ("MULTIMODAL", "needs image or audio input, and this model reads only text"),
        ):
            if getattr(task, attribute, False):
                raise UserError(f"eval.harness.tasks: {name} {what}; leave it out")
    return found


def _check_names(manager: Any, harness: HarnessConfig) -> None:
    for name in harness.tasks:
        if name not in manager.all_tasks and not _is_file(name):
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "`lm-eval ls tasks` lists them all"
            raise UserError(f"eval.harness.tasks: lm-evaluation-harness has no task {name!r}; {hint}")


def _require() -> None:
    try:
        import lm_eval.tasks  # noqa: F401
    except ImportError as error:
        raise UserError(f"eval.harness needs lm-evaluation-harness ({error}): {install_extra('eval')}") from None


def _made(config: Config, source: Evaluated) -> dict[str, Any] | None:
    """The results of some weights, if they are there and made of the same things."""
    kept = kept_results(config, source, "harness")
    made_with = _made_with(config, source) if kept else {}
    same = (value for value in kept.values() if value["made_with"] == made_with)
    return next((value for value in same if isinstance(value.get("results"), dict)), None)


def _others(config: Config, source: Evaluated, made_with: dict[str, Any]) -> list[dict[str, Any]]:
    """Results that are kept of the weights with other tasks or settings."""

    def settings(of: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in of.items() if key not in _STATE}

    kept = kept_results(config, source, "harness").values()
    return [value for value in kept if settings(value["made_with"]) != settings(made_with)]


def _made_with(config: Config, source: Evaluated) -> dict[str, Any]:
    harness = config.eval.harness
    assert harness is not None
    version = None
    with suppress(metadata.PackageNotFoundError):
        version = metadata.version("lm-eval")
    return {
        **made_with_weights(config, source),
        "lm_eval": version,
        "tasks": _names(harness),
        "num_fewshot": harness.num_fewshot,
        "limit": harness.limit,
        **({"apply_chat_template": True} if harness.apply_chat_template else {}),
        "files": value_hash(sorted(_files(harness))),
    }


def _files(harness: HarnessConfig) -> Iterator[list[str | int]]:
    """State of the files in `include_path` and in the folders of task files that are named: names, sizes, times.

    A task file may have code, other task files or data beside it.
    """
    folders = {Path(name).parent for name in _names(harness) if _is_file(name)}
    if harness.include_path is not None:
        folders.add(harness.include_path)
    for path in {path for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts}:
        if path.is_file():
            state = path.stat()
            yield [str(path), state.st_size, state.st_mtime_ns]


def _rows(value: dict[str, Any]) -> Iterator[Row]:
    for title, figures in (value["results"] | value.get("groups", {})).items():
        shots = value.get("n-shot", {}).get(title)
        count = value.get("n-samples", {}).get(title, {}).get("effective")
        documents = f"{count:,} documents{truncated_words(value.get('truncated', {}).get(title, 0))}" if count else ""
        words = [f"{shots}-shot" if isinstance(shots, int) else "", documents]
        for key, figure in figures.items():
            metric, comma, filter_ = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            stderr = figures.get(f"{metric}_stderr,{filter_}")
            of = [] if filter_ == "none" else [f"filter {filter_}"]
            yield title, metric, _number(figure), _number(stderr), ", ".join(word for word in [*words, *of] if word)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """A result as JSON has it."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, (bool, str, int)):
        return value
    with suppress(TypeError, ValueError):
        number = float(value)  # numpy's, too
        return number if math.isfinite(number) else None
    return str(value)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the harness's own log and the bars of `datasets`, and with one process for its bootstrap.

    It would fork as many as the machine has cores, of a process that has threads and perhaps a GPU.
    """
    import datasets
    from lm_eval import evaluator

    # It asks git which commit the current folder is at, and git complains where that is none of its own. Not kept here.
    commit, evaluator.get_git_commit_hash = evaluator.get_git_commit_hash, lambda: None
    log = logging.getLogger("lm_eval")
    level, bars = log.level, datasets.utils.logging.is_progress_bar_enabled()
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    log.setLevel(logging.ERROR)
    datasets.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = commit
        log.setLevel(level)
        if bars:
            datasets.utils.logging.enable_progress_bar()
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before


class _Alive:
    """A context manager in which a thread gives signs of life, but while a batch is computed: that does so by itself.

    Loading tasks, making requests and resampling may take longer than any batch, and no collective can be stuck there.
    """

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat = beat
        self._computing = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Alive:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @contextmanager
    def progress(self, console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """A progress bar; what is yielded is called after each batch, with what has been done in it."""
        with progress(console, f"eval {what}", total) as advance:

            def done(count: int) -> None:
                advance(count)
                self._beat()

            # Who loads tasks or makes requests for longer than the others is waited for while there are signs of life.
            barrier()
            self._beat()
            self._computing = True
            try:
                yield done
            finally:
                self._computing = False

    def _run(self) -> None:
        while not self._ended.wait(_BEAT):
            if not self._computing:
                self._beat()
