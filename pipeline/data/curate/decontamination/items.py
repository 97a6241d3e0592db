"""Items of evaluations: texts that training data must not have, in a file of JSON Lines that indexes are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from pipeline.common import links, storage
from pipeline.common.errors import UserError
from pipeline.config.curation.curate import DecontaminateConfig
from pipeline.data.datasets.indexed import HashedFile
from pipeline.data.sources.globs import find_files

KEY = "data.curate.decontaminate"
TASK_ITEMS = "task_items.jsonl"
"""Items of the tasks of `data.curate.decontaminate.tasks`, which the evaluation resolves and writes."""


PIECE = "\x1e"
"""Between texts of an item that are looked for each on its own: a question, and the prompt that it stands in."""


@dataclass(frozen=True)
class EvalItem:
    """An item of an evaluation.

    Attributes:
        task: name of the task, or of the file.
        name: of the item in it: its number, or file and line.
        text: all that a model would see of it and should answer; n-grams do not cross a `PIECE`.
    """

    task: str
    name: str
    text: str

    def line(self) -> bytes:
        """The item as a line of a file of items."""
        value = {"task": self.task, "item": self.name, "text": self.text}
        return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)


def write_items(path: Path, items: Iterable[EvalItem]) -> int:
    """Write a file of items into a folder whose parent exists; returns how many."""
    count = 0
    links.make_folder(path.parent)
    with HashedFile(path) as file:
        for item in items:
            file.write(item.line())
            count += 1
        file.commit()
    return count


def read_items(path: Path) -> Iterator[tuple[int, EvalItem]]:
    """Items of a file of items, each with the place of its line in bytes.

    Raises:
        UserError: a line is damaged.
    """
    place = 0
    with storage.open_regular(path) as file:
        for line in file:
            yield place, _parse(path, line)
            place += len(line)


def item_at(path: Path, place: int) -> EvalItem:
    """The item whose line begins at a byte of a file of items."""
    with storage.open_regular(path) as file:
        file.seek(place)
        return _parse(path, file.readline())


def _parse(path: Path, line: bytes) -> EvalItem:
    try:
        value = orjson.loads(line)
        return EvalItem(str(value["task"]), str(value["item"]), str(value["text"]))
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise UserError(f"{path} is damaged; remove it, and run `pipeline curate` again to write it anew") from None


def all_items(config: DecontaminateConfig, folder: Path) -> Iterator[EvalItem]:
    """Items of tasks and files of a run file, in its order.

    Args:
        config: of the run file.
        folder: that has `TASK_ITEMS`, if there are tasks.

    Raises:
        UserError: a task or a file has no items: an empty index would find nothing, and say nothing of it.
    """
    if config.tasks:
        yield from _task_items(config, folder / TASK_ITEMS)
    for number, pattern in enumerate(config.files):
        try:
            found = find_files([pattern], [], f"{KEY}.files.{number}")
        except UserError as error:
            raise UserError(str(error).replace(f".{number}.paths:", ":", 1)) from None  # it knows sources
        for file in found:
            yield from file_items(Path(file.path), file.name)


def _task_items(config: DecontaminateConfig, path: Path) -> Iterator[EvalItem]:
    if not path.is_file():
        raise UserError(f"{path} is missing, which has the items of {KEY}.tasks; `pipeline curate RUN.yaml` writes it")
    seen = set()
    for _, item in read_items(path):
        seen.add(item.task)
        yield item
    for task in config.tasks:
        if not any(name == task or name.startswith(f"{task}/") for name in seen):
            raise UserError(
                f"{KEY}.tasks: {path} has no items of {task!r}, but of {', '.join(sorted(seen)) or 'nothing'}; remove "
                "it, and run `pipeline curate RUN.yaml` again"
            )


def file_items(path: Path, name: str) -> Iterator[EvalItem]:
    """Items of a file: lines of a `.txt` file, or all texts of each line of a `.jsonl` file together.

    Args:
        path: of the file.
        name: of the task that it stands for.

    Raises:
        UserError: it has another ending, is not readable, or has no items.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(f"{KEY}.files: {path} is neither .txt (an item per line) nor .jsonl; convert it to one of them")
    count = 0
    try:
        with storage.open_regular(path) as file:
            for number, text in _texts(path, file):
                count += 1
                yield EvalItem(name, str(number), text)
    except OSError as error:
        raise UserError(f"{KEY}.files: {path} cannot be read: {error.strerror}") from error
    if not count:
        raise UserError(f"{KEY}.files: {path} has no items; leave it out, or write one on each line")


def _texts(path: Path, file: BinaryIO) -> Iterator[tuple[str, str]]:
    """Texts of the lines of a file, with numbers: `3`, or `3:question` for a key of the object on line 3."""
    for number, line in enumerate(file, 1):
        try:
            if path.suffix == ".txt":
                found = [("", line.decode())]
            else:
                found = list(strings_of(orjson.loads(line), "")) if line.strip() else []
        except ValueError as error:
            raise UserError(f"{KEY}.files: {path}:{number} is damaged: {error}") from None
        for key, text in found:
            if text.strip():
                yield f"{number}{key}", text


def strings_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Strings in a JSON value, however deep, with their keys."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from strings_of(each, f"{key}:{name}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from strings_of(each, f"{key}:{number}")
