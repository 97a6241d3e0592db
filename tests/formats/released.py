"""Keys of run files, commands and options as the last release had them, for `test_released`.

After a release, `python -m tests.formats.released` writes `released.json` anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import orjson
import typer
from pydantic_core import PydanticUndefined, to_jsonable_python

from pipeline import __version__
from pipeline.cli.main import app
from pipeline.config import Config
from pipeline.config.parsing.schema import keys, subsection

LISTING = Path(__file__).with_name("released.json")


def choices(annotation: Any) -> list[Any]:
    """Values of the `Literal`s in an annotation."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for argument in get_args(annotation) for value in choices(argument)]


def run_file() -> dict[str, dict[str, Any]]:
    """By key of a run file: its default, if it has one and is no section, and the values that it may choose from."""
    found = {}
    for key in keys(Config):
        found[key.path] = entry = dict[str, Any]()
        section, several = subsection(key.field.annotation)
        default = key.field.get_default(call_default_factory=True)
        if default is not PydanticUndefined and (section is None or several or default is None):
            entry["default"] = to_jsonable_python(default)
        if values := choices(key.field.annotation):
            entry["choices"] = sorted(values, key=str)
    return found


def commands() -> dict[str, list[str]]:
    """Arguments and options of all commands, by their words."""
    found: dict[str, list[str]] = {}

    def walk(command: Any, words: tuple[str, ...]) -> None:
        names = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        found[" ".join(words)] = sorted(names)
        for name, below in getattr(command, "commands", {}).items():
            walk(below, (*words, name))

    walk(typer.main.get_command(app), ("pipeline",))
    return found


if __name__ == "__main__":
    listing = {"release": __version__, "keys": run_file(), "commands": commands()}
    LISTING.write_bytes(
        orjson.dumps(listing, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)
    )
