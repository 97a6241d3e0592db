"""Settings of a run of another suite, from the files and command lines that it has."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import yaml

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.train.foreign.megatron import find_checkpoint
from pipeline.train.foreign.megatron_arguments import COMMON, read_arguments
from pipeline.train.foreign.settings.rows import SuiteName
from pipeline.train.foreign.settings.shell import read_options, words_of

_MOST_BYTES = 2**24
_DEEPEST = 64
_MOST_SETTINGS = 20_000
_LONGEST = 512


def read_values(suite: SuiteName, given: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The settings of a run, by name.

    Args:
        suite: that the run is of.
        given: a file or folder; of Megatron-LM, arguments as well.

    Returns:
        The settings; those in files with sections are named with dots. And notes for the user.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    if suite == "megatron" and (len(given) > 1 or given[0].startswith("-")):
        found, notes = read_options(given)
        return _bounded(found.items(), "the command line"), notes
    if len(given) != 1:
        raise UserError(f"{given[1]!r}: give one file of {suite}")
    path = Path(given[0])
    if suite == "megatron":
        found, notes = _of_megatron(path)
        return _bounded(found.items(), str(path)), notes
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; {_WANTED[suite]}")
    text = storage.read_bytes(path, _MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise UserError(f"{path} has more than {_MOST_BYTES:,} bytes; {_WANTED[suite]}")
    parsed = _parsed(path, text, suite)
    if not isinstance(parsed, dict):
        raise UserError(f"{path} has no sections; {_WANTED[suite]}")
    return _bounded(_flat(parsed, path), str(path)), []


_WANTED: dict[SuiteName, str] = {
    "megatron": "give a script, a text with arguments, a checkpoint, or the arguments themselves behind --",
    "torchtitan": "give the TOML file of the run (releases up to v0.2; a configuration in Python cannot be read)",
    "nanotron": "give the YAML file of the run, or config.yaml of a checkpoint",
    "olmo": "give config.json of a checkpoint; a configuration in Python cannot be read",
    "nemo": "give context/model.yaml of a checkpoint; a recipe in Python and io.json cannot be read",
}


def _parsed(path: Path, text: bytes, suite: SuiteName) -> Any:
    try:
        if suite == "torchtitan":
            return tomllib.loads(text.decode())
        if suite == "olmo":
            return orjson.loads(text)
        # Names of classes (`_target_`, tags) are texts: nothing is imported.
        return yaml.load(text, _Plain)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else "nested too deep"
        raise UserError(f"{path} cannot be read: {first}; {_WANTED[suite]}") from None


class _Plain(yaml.SafeLoader):
    """A safe loader that takes values with an unknown tag for what they are without it, and `3e-5` for a number."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse aliases: a few lines could stand for more values than fit into memory."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases (*name), which are not read: write the values out")
        return super().compose_node(parent, index)


def _untagged(loader: Any, suffix: str, node: Any) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return loader.construct_scalar(node)


_Plain.add_multi_constructor("", _untagged)
_Plain.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _bounded(settings: Iterable[tuple[str, Any]], source: str) -> dict[str, Any]:
    """Settings that are not too many, with names that are not too long, since parts of names are kept too."""
    values = {}
    for name, value in settings:
        if len(name) > _LONGEST or name.count(".") > _DEEPEST:
            raise UserError(
                f"{source}: the name {name[:80]}... has more than {_LONGEST} letters or {_DEEPEST} sections"
            )
        values[name] = value
        if len(values) > _MOST_SETTINGS:
            raise UserError(f"{source} has more than {_MOST_SETTINGS:,} settings")
    return values


def _flat(values: Mapping[str, Any], path: Path, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > _DEEPEST or len(prefix) > _LONGEST:
        raise UserError(f"{path} has sections nested deeper than {_DEEPEST}")
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, path, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{prefix}{name}", value


def _of_megatron(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Arguments of a run of Megatron-LM: of a checkpoint, or of a text."""
    if path.is_dir():
        return read_arguments(find_checkpoint(path, None) / COMMON), []
    if path.name == COMMON:
        return read_arguments(path), []
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; {_WANTED['megatron']}")
    data = storage.read_bytes(path, _MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise UserError(f"{path} has more than {_MOST_BYTES:,} bytes; {_WANTED['megatron']}")
    try:
        return read_options(list(words_of(data.decode())))
    except (UnicodeDecodeError, ValueError) as error:
        raise UserError(f"{path} is not a script: {error}; {_WANTED['megatron']}") from None
