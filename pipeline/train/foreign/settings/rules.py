"""Rules that make values of a run file out of settings of another suite; those that several suites have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.train.foreign.settings.rows import SettingRow

Settings = dict[str, Any]
"""Values by their keys in a run file; `Of` where one of several settings made a value."""


class Of(NamedTuple):
    """A value, and the setting that made it."""

    value: Any
    key: str


class Left(Exception):
    """A setting that nothing here does; the text says why.

    Args:
        text: why.
        to_set: key of the run file that the user has to choose, because its default could be another thing.
    """

    def __init__(self, text: str, to_set: str | None = None) -> None:
        super().__init__(text)
        self.to_set = to_set


class Given:
    """Settings of a run, and the values that its suite takes where one is not given."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values, self._defaults = values, defaults
        self._suffixes: dict[str, list[str]] = {}
        for name in values:
            parts = name.split(".")
            for at in range(len(parts)):
                self._suffixes.setdefault(".".join(parts[at:]), []).append(name)
        self.used: set[str] = set()
        self.notes: list[str] = []
        """For the user: what a rule could not do."""

    def find(self, key: str) -> str | None:
        """Full name of a setting that was given; its first sections may be left out."""
        names = self._suffixes.get(key)
        if names is None or key in self._values:
            return key if names else None
        return min(names, key=lambda name: ("optim" not in name, name.count(".")))

    def _note_others(self, key: str, name: str) -> None:
        """Say it where a short name fits several settings with different values."""
        others = [each for each in self._suffixes[key] if self._values[each] not in (None, self._values[name])]
        text = f"{key}: {name} is taken; there is {', '.join(others[:3])} too"
        if others and key != name and text not in self.notes:
            self.notes.append(text)

    def is_given(self, key: str) -> bool:
        """True if it was."""
        name = self.find(key)
        return name is not None and self._values[name] is not None

    def is_null(self, key: str) -> bool:
        """True if it was written down as null."""
        name = self.find(key)
        return name is not None and self._values[name] is None

    def is_other(self, key: str) -> bool:
        """True if it was given, with another value than the default."""
        return self.is_given(key) and self._values[str(self.find(key))] != self._defaults.get(key)

    def get(self, key: str, otherwise: Any = None) -> Any:
        """A value, or the default of the suite."""
        name = self.find(key)
        value = None
        if name is not None:
            self.used.add(name)
            value = self._values[name]
            self._note_others(key, name)
        value = self._defaults.get(key) if value is None else value
        return otherwise if value is None else value

    def first(self, keys: Sequence[str]) -> Of | None:
        """The value of the first key that was given, else of the first that has a default; all count as looked at."""
        found = [Of(value, key) for key in keys if (value := self.get(key)) is not None]
        return next((each for each in found if self.is_given(each.key)), found[0] if found else None)

    def look_at(self, keys: Sequence[str]) -> None:
        """Count settings as looked at."""
        for key in keys:
            self.get(key)

    def number(self, key: str, otherwise: float | None = None) -> Any:
        """A number of 0 or more."""
        value = self.get(key, otherwise)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
            raise Left(f"{value!r} is not a number of 0 or more")
        return value

    def need(self, key: str) -> Any:
        """A number that must be given, and be above 0."""
        value = self.number(key)
        if not value:
            raise Left(f"it needs {key}")
        return value

    def everything(self) -> dict[str, Any]:
        """All values, with defaults."""
        return {**self._defaults, **{name: value for name, value in self._values.items() if value is not None}}


Rule = Callable[[Given, SettingRow], Settings]


def _simple(convert: Callable[[Any], Any]) -> Rule:
    """A rule for one value, which goes to the key that the row names."""

    def rule(given: Given, row: SettingRow) -> Settings:
        found = given.first(row.keys)
        assert row.to is not None
        return {row.to: Of(convert(found.value), found.key)} if found else {}

    return rule


def steps(value: Any) -> str:
    """A duration in steps."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise Left(f"{value!r} is not a number of steps")
    return f"{value} steps"


_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}


def _dtype(value: Any) -> str:
    found = _DTYPES.get(str(value).rpartition(".")[2])
    if found is None:
        raise Left(f"{value!r} cannot be computed in here")
    return found


def _betas(given: Given, row: SettingRow) -> Settings:
    first, second = (given.number(key) for key in row.keys[:2])
    if first is None and second is None:
        return {}
    found: Settings = {"train.optimizer.betas": [0.9 if first is None else first, 0.95 if second is None else second]}
    if len(row.keys) > 2 and (eps := given.number(row.keys[2])) is not None:
        found["train.optimizer.eps"] = eps
    return found


def _optimizer(given: Given, row: SettingRow) -> Settings:
    names = {"lr": "lr", "eps": "eps", "weight_decay": "weight_decay", "betas": "betas", "clip_grad": "clip_norm"}
    found = {}
    for key in row.keys:
        value, to = given.get(key), names[key.rpartition(".")[2]]
        is_off = to == "clip_norm" and (value == 0 or given.is_null(key))
        if value is not None or is_off:
            found[f"train.optimizer.{to}"] = Of(None if is_off else value, key)
    return found


def _keep(given: Given, row: SettingRow) -> Settings:
    count = given.get(row.keys[0])
    if count is None:
        return {}
    if not isinstance(count, int) or count < 1:
        raise Left("all are kept there: set train.checkpoint.keep_every to keep every N-th")
    return {"train.checkpoint.keep": count}


def pairs(*targets: str) -> Rule:
    """A rule for several values, each of which goes to a key."""

    def rule(given: Given, row: SettingRow) -> Settings:
        found = zip(targets, row.keys, strict=False)
        return {to: Of(value, key) for to, key in found if (value := given.get(key)) is not None}

    return rule


def _min_ratio(given: Given, row: SettingRow) -> Settings:
    least = given.number(row.keys[0])
    peak = given.number("lr") or given.number("learning_rate") or given.number("max_lr")
    if least is None or not peak:
        return {}
    return {"train.schedule.min_ratio": float(f"{least / peak:.12g}")}


COMMON: dict[str, Rule] = {
    "same": _simple(lambda value: value),
    "switch": _simple(bool),
    "steps": _simple(steps),
    "dtype": _simple(_dtype),
    "zero_is_off": _simple(lambda value: value or None),
    "betas": _betas,
    "optimizer": _optimizer,
    "keep": _keep,
    "min_ratio": _min_ratio,
}
"""Rules by the name that rows have for them."""
