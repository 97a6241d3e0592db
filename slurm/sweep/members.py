"""The runs of a sweep: from `key=value,value` words to configs, each with a run folder whose name says what differs."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson

from pipeline.common.errors import UserError
from pipeline.common.hashing import value_hash
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.config.load import COMMAND_LINE, load, load_run
from pipeline.config.parsing.document import parse
from pipeline.config.parsing.schema import flat
from pipeline.data.datasets.files import MANIFEST_FILE, TRAIN
from pipeline.data.datasets.open import dataset_place, is_finished
from slurm.record.sweep_folder import SWEEPS

_MINE = ("run.dir", "data.dir")
"""Keys that the sweep sets."""
_NO_RESULT = ("slurm.", "launch.", "resume.", "generate.", "stage.", "train.metrics.", "train.checkpoint.")
"""Keys that change how a run is made and not what comes of it."""
_LONGEST = 120
"""Characters of a folder's name."""


@dataclass(frozen=True)
class Axis:
    """A key and what it is set to: one value in all runs, or several in turn."""

    key: str
    values: tuple[str, ...]
    """In YAML, as they were written."""

    @property
    def fixed(self) -> bool:
        """True if all runs have the same value."""
        return len(self.values) == 1


@dataclass(frozen=True)
class Member:
    """One run of a sweep."""

    name: str
    """Name of its folder, like `layers=2,lr=1e-4`."""
    values: dict[str, str]
    """Values that set it apart from the others, by key."""
    config: Config

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return self.config.run.dir


@dataclass(frozen=True)
class Sweep:
    """All runs of a sweep."""

    name: str
    """Name of its folder: the keys that are tried, and the values that are fixed."""
    folder: Path
    keys: tuple[str, ...]
    """Those with several values."""
    members: tuple[Member, ...]


def make_sweep(run: Path, words: Sequence[str]) -> Sweep:
    """The runs of a sweep, all of them valid.

    Args:
        run: the run file.
        words: `key.path=value,value ...`; a key with one value has it in all runs.

    Raises:
        UserError: everything that is wrong with the words or with any of the runs, in one message.
    """
    axes = parse_axes(words)
    tried = [axis for axis in axes if not axis.fixed]
    short = short_names([axis.key for axis in _named(axes)])
    keys = [axis.key for axis in tried]
    combinations = [dict(zip(keys, c, strict=True)) for c in itertools.product(*(axis.values for axis in tried))]
    fixed = [f"{axis.key}={axis.values[0]}" for axis in axes if axis.fixed]
    loaded: dict[str, tuple[dict[str, str], Config]] = {}
    problems: dict[str, list[str]] = {}
    for values in combinations:
        name = _joined([f"{short[key]}={value_name(value)}" for key, value in sorted(values.items())])
        try:
            loaded[name] = values, load(run, [*fixed, *(f"{key}={value}" for key, value in values.items())])
        except UserError as error:
            problems.setdefault(str(error), []).append(name)
    if problems:
        raise UserError(problems_message(problems, len(combinations)))
    base = next(iter(loaded.values()))[1]
    _refuse_missing_data(run, fixed, base)
    name = sweep_name(axes)
    folder = base.run.dir / SWEEPS / name
    members = tuple(
        Member(member, values, _placed(config, folder / member)) for member, (values, config) in loaded.items()
    )
    for member in members:
        for line in _changed_since(member):
            problems.setdefault(line, []).append(member.name)
    if problems:
        raise UserError(problems_message(problems, len(members)))
    return Sweep(name, folder, tuple(keys), members)


def find_sweep(run: Path, words: Sequence[str]) -> Path:
    """Folder of a sweep, without a look at its runs.

    Raises:
        UserError: as for `make_sweep`, but of the first run alone.
    """
    axes = parse_axes(words)
    base = load(run, [f"{axis.key}={axis.values[0]}" for axis in axes])
    return base.run.dir / SWEEPS / sweep_name(axes)


def problems_message(problems: dict[str, list[str]], members: int) -> str:
    """One message of all that is wrong: each text once, with the runs that it is about."""
    lines = []
    for text, names in problems.items():
        who = "all runs" if len(names) == members else ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
        lines.append(f"{who}: " + text.replace("\n", "\n  "))
    bad = len({name for names in problems.values() for name in names})
    return f"{bad} of the {members} runs of this sweep cannot be started, so none is:\n" + "\n".join(lines)


def parse_axes(words: Sequence[str]) -> list[Axis]:
    """Keys and their values in the order in which they were given.

    Raises:
        UserError: a word that is no `key=value`, a key twice or one that the sweep sets, values that are the same, or
            no key with several.
    """
    axes: dict[str, Axis] = {}
    problems = []
    for word in words:
        key, equals, text = word.partition("=")
        key = key.strip()
        if not equals or not key:
            problems.append(f"{word!r} does not have the form key.path=value,value")
            continue
        values = tuple(split_values(text))
        if key in axes:
            problems.append(f"{key} is given twice; write all its values after one `=`")
        if key in _MINE and len(values) > 1:
            problems.append(f"{key} is set by the sweep: each run has its own folder, and all have the same data")
        if len(values) > 1 and "" in values:
            problems.append(f"{word!r} has an empty value; write `null` for no value")
        axes[key] = Axis(key, values)
        problems += _same(key, values)
    if not problems and all(axis.fixed for axis in axes.values()):
        problems.append("no key has several values; give one, like train.optimizer.lr=1e-4,3e-4")
    if problems:
        raise UserError("the values of a sweep: " + "; ".join(problems))
    return list(axes.values())


def split_values(text: str) -> list[str]:
    """Cut at the commas that are in no list, section or quotes of YAML: `[1,2],[3,4]` is two lists."""
    values, begin, depth, quote, before = [], 0, 0, "", ","
    for place, letter in enumerate(text):
        if quote:
            # Backslashes escape between double quotes alone; doubled single quotes close and open again.
            if letter == quote and not (quote == '"' and text[place - 1] == "\\"):
                quote = ""
        elif letter in "\"'" and before in ",[{:":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and depth == 0:
            values.append(text[begin:place].strip())
            begin = place + 1
        if not letter.isspace():
            before = letter
    return [*values, text[begin:].strip()]


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last words of each key, as many as tell it from the others; a number never stands first."""
    found = {}
    for key in keys:
        parts = key.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[-count:])
            if not parts[-count].isdecimal() and sum(f".{other}".endswith(f".{name}") for other in keys) == 1:
                break
        found[key] = name
    return found


def value_name(text: str) -> str:
    """A value as part of a folder's name: the same for all ways to write a number, and without special letters."""
    value = _parsed(text)
    if isinstance(value, float):
        return _float_name(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    written = value if isinstance(value, str) else orjson.dumps(value).decode()
    spaced = written.strip().replace(" ", "_")
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "_", spaced).strip("_")
    return plain if plain == spaced else f"{plain}-{value_hash(value)[:6]}"


def sweep_name(axes: Sequence[Axis]) -> str:
    """The keys that are tried and what is fixed, but what does not matter to the result."""
    short = short_names([axis.key for axis in _named(axes)])
    tried = sorted(short[axis.key] for axis in axes if not axis.fixed)
    fixed = sorted(f"{short[axis.key]}={value_name(axis.values[0])}" for axis in _named(axes) if axis.fixed)
    return _joined([*tried, *fixed])


def _named(axes: Sequence[Axis]) -> list[Axis]:
    """Those that are part of the names of folders."""
    return [axis for axis in axes if not (axis.fixed and axis.key.startswith((*_NO_RESULT, *_MINE)))]


def _parsed(text: str) -> Any:
    try:
        return parse(text, COMMAND_LINE, lines=False).value
    except UserError:  # which loading it tells
        return text


def _float_name(value: float) -> str:
    """`0.0001` and `1e-4` are 1e-4, `0.10` is 0.1, `1e9` is 1e9."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int), "it is finite"
    power = exponent + len(digits) - 1
    if -3 < power < 6:
        return f"{Decimal(repr(value)).normalize():f}"
    mantissa = str(digits[0]) + ("." + "".join(map(str, digits[1:])) if digits[1:] else "")
    return f"{'-' if sign else ''}{mantissa}e{power}"


def _same(key: str, values: Sequence[str]) -> Iterator[str]:
    names: dict[str, str] = {}
    for value in values:
        name = value_name(value)
        if name in names:
            yield f"{key}: {names[name]} and {value} are the same value, or would have the same folder; leave one out"
        names[name] = value


def _joined(parts: Sequence[str]) -> str:
    name = ",".join(parts)
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 9]}-{value_hash(name)[:8]}"


def _placed(config: Config, folder: Path) -> Config:
    """The run in a folder of its own, with the data and so the tokenizer of the run file's."""
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": folder}),
            "data": config.data.model_copy(update={"dir": config.data.dir or config.data_dir}),
        }
    )


def _refuse_missing_data(run: Path, fixed: Sequence[str], config: Config) -> None:
    places = [dataset_place(config, source, TRAIN) for source in config.data.sources]
    missing = [place for place in places if not is_finished(config, place)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        words = "".join(f" {word}" for word in fixed)
        raise UserError(
            f"the runs of a sweep share the data of the run file, which do not exist yet: {missing[0]}{more} has no "
            f"{MANIFEST_FILE}. First: pipeline preprocess {run}{words}"
        )


def _changed_since(member: Member) -> Iterator[str]:
    """Keys that are other than when the run was begun: its figures would not compare with the others'."""
    if not RunFiles(member.folder).config.is_file():
        return
    with suppress(UserError):  # of another version, which training tells if it matters
        before = flat(load_run(member.folder).model_dump(mode="json"))
        now = flat(member.config.model_dump(mode="json"))
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key) and not key.startswith((*_NO_RESULT, "train.duration")):
                yield (
                    f"{key} was {before.get(key)!r} when it began and is {now.get(key)!r} now; set it back in the run "
                    f"file and give {key}=... to the sweep, which then gets another folder, or remove the run"
                )
