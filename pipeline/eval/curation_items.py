"""Items of evaluations for curation: the texts of the files that the evaluation itself reads.

They are written to a file that `pipeline.data.curate.decontamination` makes its index of: data knows of no tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import file_hash
from pipeline.config import Config
from pipeline.config.eval import HarnessConfig, TaskConfig
from pipeline.data.curate.decontamination.items import KEY, PIECE, TASK_ITEMS, EvalItem, strings_of, write_items
from pipeline.eval.tasks.lambada import read_passages
from pipeline.eval.tasks.wikitext import read_pages

_ABOUT = "task_items.json"
_VERSION = 1
"""Of how an item becomes a text."""
_SHORT = 20
"""Characters; shorter values of a document say nothing."""


def write_task_items(config: Config, folder: Path) -> Path | None:
    """Write the items of `data.curate.decontaminate.tasks` into a folder, unless they are there.

    Those of lm-evaluation-harness stay as they were first written; remove the file to load them again.

    Args:
        config: run file.
        folder: of the file `TASK_ITEMS`.

    Returns:
        path of the file; None if no tasks are named.

    Raises:
        UserError: a task is neither one of `eval.tasks` nor of the harness, or has no items.
    """
    names = _asked(config)
    if not names:
        return None
    path, about_path = folder / TASK_ITEMS, folder / _ABOUT
    about = _about(config, names)
    known = storage.find_json(about_path, "about", "hash")
    if known is not None and known["about"] == about and path.is_file() and f"{file_hash(path):016x}" == known["hash"]:
        return path
    write_items(path, (item for name in names for item in _items(config, name)))
    storage.put_json(about_path, {"about": about, "hash": f"{file_hash(path):016x}"})
    return path


def task_problems(config: Config) -> list[str]:
    """Reasons why items of tasks could not be read, for a dry run; no data of the harness is loaded."""
    problems = []
    for name in _asked(config):
        task = _built_in(config, name)
        if task is not None:
            if not task.path.is_file():
                problems.append(f"{KEY}.tasks: {name} reads {task.path}, which is missing")
            continue
        from pipeline.eval.tasks.harness import check_harness_tasks

        try:
            check_harness_tasks(config, _harness(config, name))
        except UserError as error:
            problems.append(_of_harness(config, error))
    return problems


def _asked(config: Config) -> list[str]:
    curate = config.data.curate
    return [] if curate is None or curate.decontaminate is None else list(dict.fromkeys(curate.decontaminate.tasks))


def _about(config: Config, names: list[str]) -> dict[str, Any]:
    """Settings and files that the items of built-in tasks come from, and what says which those of others are."""
    built_in = {name: task for name in names if (task := _built_in(config, name)) is not None}
    about: dict[str, Any] = {"version": _VERSION, "names": names}
    about["files"] = {name: [task.type, _hash(task.path)] for name, task in built_in.items()}
    if len(built_in) < len(names):
        harness = config.eval.harness
        about["include_path"] = str(harness.include_path) if harness is not None and harness.include_path else None
        try:
            about["lm_eval"] = metadata.version("lm-eval")
        except metadata.PackageNotFoundError:
            about["lm_eval"] = None
    return about


def _hash(path: Path) -> str | None:
    return f"{file_hash(path):016x}" if path.is_file() else None


def _built_in(config: Config, name: str) -> TaskConfig | None:
    """The task of `eval.tasks` with a name, or the only one of a type."""
    for task in config.eval.tasks:
        if task.title == name:
            return task
    of_type = [task for task in config.eval.tasks if task.type == name]
    return of_type[0] if len(of_type) == 1 else None


def _items(config: Config, name: str) -> Iterator[EvalItem]:
    task = _built_in(config, name)
    found = _harness_items(config, name) if task is None else _built_in_items(task, name)
    count = 0
    for item in found:
        count += 1
        yield item
    if not count:
        raise UserError(f"{KEY}.tasks: {name} has no items; leave it out, or see what `pipeline eval` says of its data")


def _built_in_items(task: TaskConfig, name: str) -> Iterator[EvalItem]:
    """Passages of LAMBADA, or articles of WikiText."""
    texts = read_passages(task.path) if task.type == "lambada" else read_pages(task.path, documents=True)
    for number, text in enumerate(texts):
        yield EvalItem(name, str(number), text)


def _harness_items(config: Config, name: str) -> Iterator[EvalItem]:
    """Documents of a task, or of all tasks of a group or tag."""
    from pipeline.eval.tasks.harness import load_harness_tasks

    try:
        loaded = load_harness_tasks(config, _harness(config, name))
    except UserError as error:
        raise UserError(_of_harness(config, error)) from error
    for title, task in loaded.items():
        full = title if title == name else f"{name}/{title}"
        for number, doc in enumerate(task.eval_docs):
            yield EvalItem(full, str(number), _document_text(task, doc))


def _harness(config: Config, name: str) -> HarnessConfig:
    own = config.eval.harness
    return HarnessConfig(tasks=[name], include_path=None if own is None else own.include_path)


def _of_harness(config: Config, error: UserError) -> str:
    """A refusal of the harness by the key that named the task here."""
    titles = ", ".join(repr(task.title) for task in config.eval.tasks) or "none"
    return f"{str(error).replace('eval.harness.tasks', f'{KEY}.tasks')}. Tasks in eval.tasks: {titles}"


def _document_text(task: Any, doc: Any) -> str:
    """Prompt with the right answer, and the values of the document that are in it: a question without the template."""
    prompt, answers = task.doc_to_text(doc), task.doc_to_target(doc)
    choices = _choices(task, doc)
    if isinstance(prompt, int):  # the beginnings are the choices, as in Winogrande
        prompt = choices[prompt] if prompt < len(choices) else ""
    elif isinstance(answers, int):
        answers = choices[answers] if 0 <= answers < len(choices) else ""
    answers = answers if isinstance(answers, (list, tuple)) else [answers]
    texts = [choices[each] if isinstance(each, int) and each < len(choices) else str(each) for each in answers]
    whole = [f"{prompt} {text}" for text in texts or [""]]
    values = [value for _, value in strings_of(doc)] if isinstance(doc, dict) else []
    parts = [value for value in values if len(value) >= _SHORT and any(value.strip() in text for text in whole)]
    return PIECE.join(dict.fromkeys(text.replace(PIECE, " ") for text in [*whole, *parts]))


def _choices(task: Any, doc: Any) -> list[str]:
    if getattr(task.config, "doc_to_choice", None) is None:
        return []
    return [str(choice) for choice in task.doc_to_choice(doc)]
