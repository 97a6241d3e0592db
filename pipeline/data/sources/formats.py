"""The formats that a source can have, by the name that its `type` gives.

`SourceConfig.type` lists the same names: the config is read without the data pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from pipeline.common.errors import UserError
from pipeline.config.plugins import find_plugin, is_plugin
from pipeline.data.sources.arrow import ArrowReader
from pipeline.data.sources.delimited import CsvReader, TsvReader
from pipeline.data.sources.hub import HubReader
from pipeline.data.sources.jsonl import JsonlReader
from pipeline.data.sources.parquet import ParquetReader
from pipeline.data.sources.reader import PLUGIN, Reader
from pipeline.data.sources.records import Numbering
from pipeline.data.sources.text import TextReader
from pipeline.data.sources.web.html import HtmlReader
from pipeline.data.sources.web.warc import WarcReader

SOURCE_FORMATS: dict[str, type[Reader]] = {
    each.type: each
    for each in (
        TextReader,
        HtmlReader,
        JsonlReader,
        CsvReader,
        TsvReader,
        WarcReader,
        ParquetReader,
        ArrowReader,
        HubReader,
    )
}


def source_format(name: str) -> type[Reader]:
    """The format of a name, ours or a plug-in's.

    Raises:
        UserError: a plug-in is not installed, or does not have this name.
    """
    if not is_plugin(name):
        return SOURCE_FORMATS[name]
    plugin = find_plugin("sources", name)
    found = plugin.load(Reader)
    if getattr(found, "type", None) != name:
        raise UserError(
            f"the plug-in {plugin}: type of the class is {getattr(found, 'type', None)!r}, and must be {name!r}, the "
            "name of its entry point"
        )
    numbering = getattr(found, "numbering", None)
    if numbering not in get_args(Numbering):
        raise UserError(
            f"the plug-in {plugin}: numbering of the class is {numbering!r}, and must be one of "
            f"{', '.join(get_args(Numbering))}"
        )
    return found


def planned_reader(plan: Path, settings: Mapping[str, Any], **limits: Any) -> Reader:
    """The reader that a plan was made with.

    Args:
        plan: its file, for messages.
        settings: of the plan.
        limits: fields of the reader.

    Raises:
        UserError: there is no such format; or a plug-in, and another version of it is installed.
    """
    name = settings["type"]
    if not is_plugin(name) and name not in SOURCE_FORMATS:
        raise UserError(f"{plan}: type {name!r} is not one of {', '.join(SOURCE_FORMATS)}")
    try:
        found = source_format(name)
    except UserError as error:
        raise UserError(f"{plan}: type {name!r}: {error}") from None
    if is_plugin(name) and (made := settings.get(PLUGIN)) != (now := find_plugin("sources", name).identity):
        raise UserError(
            f"{plan}: the files of type {name!r} were read with {_package(made)}, and {_package(now)} is installed, "
            f"which may read them in another way; install {_package(made)} again"
        )
    try:
        return found.from_plan(settings, **limits)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("options", *first["loc"])))
        raise UserError(f"{plan}: {key}: {first['msg']}; the plug-in {name} has other options now") from None


def _package(identity: Any) -> str:
    """A package with its version, as plans have it."""
    known = isinstance(identity, dict) and identity.keys() == {"distribution", "version"}
    return f"{identity['distribution']}=={identity['version']}" if known else "another package"
