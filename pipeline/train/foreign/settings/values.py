"""Settings of a run of another suite, from the files and command lines that it has."""

from __future__ import annotations

import re
import shlex
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

_MOST_BYTES = 2**24
_VARIABLE = re.compile(r"\$\{?(\w+)(?::-([^}]*))?\}?")
_ALL_OF = re.compile(r"\$\{\w+\[[@*]\]\}")
"""All entries of a list, whose words were read where it was made."""
_PUNCTUATION = "();|&<>"
_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
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
        return _of_words(given)
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
        return _of_words(list(_words(data.decode())))
    except (UnicodeDecodeError, ValueError) as error:
        raise UserError(f"{path} is not a script: {error}; {_WANTED['megatron']}") from None


def _words(text: str) -> Iterator[str]:
    """Words of a shell script; an empty one where a list or a command ends. Nothing is run: commands stay texts."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=_PUNCTUATION)
    lexer.whitespace_split = True
    for word in lexer:
        if set(word) <= set(_PUNCTUATION):
            yield ""
        elif (assigned := _ASSIGNMENT.fullmatch(word)) and assigned[2].lstrip().startswith("--"):
            yield from _words(assigned[2])  # NAME="--lr 1e-4 --bf16"
            yield ""
        else:
            yield word


def _of_words(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Arguments by name, and notes about variables without a value."""
    variables: dict[str, str] = {}
    unknown: dict[str, str] = {}
    options: list[tuple[str, list[str]]] = []
    is_open = False
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, _, value = word[2:].partition("=")
            options.append((name, [value] if value else []))
            is_open = True
        elif assigned := _ASSIGNMENT.fullmatch(word):
            variables.setdefault(assigned[1], assigned[2])
            is_open = False
        elif not word or word.endswith(".py") or _ALL_OF.fullmatch(word):
            is_open = False
        elif is_open:
            options[-1][1].append(word)
    found: dict[str, Any] = {}
    for name, values in options:
        filled = [_filled(value, variables, unknown, name) for value in values]
        key, value = _argument(name, [each for each in filled if each])
        found[key] = value
    return found, [f"--{of}: the value of {name} is not known; write it in" for name, of in unknown.items()]


def _filled(text: str, variables: Mapping[str, str], unknown: dict[str, str], name: str) -> str:
    """A text with the values of variables that are known."""

    def value(found: re.Match[str]) -> str:
        variable, otherwise = found[1], found[2]
        if variable in variables and "$" not in variables[variable]:
            return variables[variable]
        if otherwise is not None:
            return otherwise
        unknown[found[0]] = name
        return found[0]

    return _VARIABLE.sub(value, text)


_NEGATED = {"disable_bias_linear": "add_bias_linear", "no_use_distributed_optimizer": "use_distributed_optimizer"}


def _argument(name: str, values: list[str]) -> tuple[str, Any]:
    """Name and value of an argument, as argparse of Megatron-LM has them."""
    key = name.replace("-", "_")
    if not values:
        if key in _NEGATED:
            return _NEGATED[key], False
        return (key.removeprefix("no_"), False) if key.startswith("no_") else (key, True)
    many = [_value(value) for value in values]
    return key, many[0] if len(many) == 1 else many


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
