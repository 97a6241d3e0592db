"""Settings of a run of another suite, from the files and command lines that it has."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
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
        return read_options(given)
    if len(given) != 1:
        raise UserError(f"{given[1]!r}: give one file of {suite}")
    path = Path(given[0])
    if suite == "megatron":
        return _of_megatron(path)
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; {_WANTED[suite]}")
    text = storage.read_bytes(path, _MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise UserError(f"{path} has more than {_MOST_BYTES:,} bytes; {_WANTED[suite]}")
    found = _parsed(path, text, suite)
    if not isinstance(found, dict):
        raise UserError(f"{path} has no sections; {_WANTED[suite]}")
    return dict(_flat(found, path)), []


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
    """A safe loader that takes values with an unknown tag for what they are without it."""

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


def _flat(values: Mapping[str, Any], path: Path, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > _DEEPEST:
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
