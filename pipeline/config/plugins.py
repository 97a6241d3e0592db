"""Plug-ins: classes of other packages, which a run file names and entry points of installed packages announce.

Nothing is imported but what a run file names. Names of plug-ins have a dot, and ours never have one.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from pipeline.common.errors import UserError
from pipeline.config.base import DATA, Section

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Kind = Literal["sources", "mixers", "mlps", "objectives", "loggers"]
"""Kinds of plug-ins. The group of its entry points is named after it: `pipeline.sources`."""
KEYS: dict[Kind, str] = {
    "sources": "data.sources.N.type",
    "mixers": "model.mixer",
    "mlps": "model.mlp",
    "objectives": "train.objective.type",
    "loggers": "train.metrics.loggers.N.type",
}
"""By kind, a key of the run file that names a plug-in."""
OPTION_KEYS: dict[Kind, str] = {
    kind: f"{key}_options" if kind in ("mixers", "mlps") else f"{key.removesuffix('type')}options"
    for kind, key in KEYS.items()
}
"""By kind, the key beside it that has the options."""
BASES: dict[Kind, str] = {
    "sources": "pipeline.data.sources.reader.Reader",
    "mixers": "pipeline.train.model.part_spec.MixerSpec",
    "mlps": "pipeline.train.model.part_spec.LayerPartSpec",
    "objectives": "pipeline.data.loading.objectives.custom.CustomObjective",
    "loggers": "pipeline.train.monitor.loggers.base.Logger",
}
"""By kind, the class that each plug-in is a subclass of. Named, since the config is read without these modules."""
NAME = r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+$"
"""Pattern of the names of plug-ins."""

_Class = TypeVar("_Class")


@dataclass(frozen=True)
class Plugin:
    """An installed plug-in, not yet imported."""

    kind: Kind
    name: str
    distribution: str
    """Name of the installed package that has it."""
    version: str
    """Version of that package."""
    entry: EntryPoint = field(repr=False, compare=False)

    @property
    def identity(self) -> dict[str, str]:
        """Package and version, which fingerprints have."""
        return {"distribution": self.distribution, "version": self.version}

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"

    def load(self, base: type[_Class] | None = None) -> type[_Class]:
        """Import its class.

        Args:
            base: The class in `BASES`, for the type checker.

        Raises:
            UserError: It cannot be imported, is not a subclass of that class, or lacks methods of it.
        """
        where = f"the plug-in {self} of the group pipeline.{self.kind}"
        try:
            found = self.entry.load()
        except (Exception, SystemExit) as error:
            cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise UserError(
                f"{where} cannot be imported from {self.entry.value}: {cause}; repair or reinstall {self.distribution}"
            ) from error
        wanted = BASES[self.kind]
        if not isinstance(found, type) or wanted not in [
            f"{each.__module__}.{each.__name__}" for each in found.__mro__
        ]:
            raise UserError(
                f"{where} must be a subclass of {wanted}, and {self.entry.value} is {found!r}; see docs/plugins.md"
            )
        if missing := sorted(getattr(found, "__abstractmethods__", ())):
            raise UserError(f"{where}: {found.__name__} does not define {', '.join(missing)}; see docs/plugins.md")
        _LOADED.add(self)
        return found

    def options(self) -> type[Section] | None:
        """The section of its options, if it has any.

        Raises:
            UserError: As `load`.
        """
        options: Any = getattr(self.load(), "Options", None)
        if options is not None and not (isinstance(options, type) and issubclass(options, Section)):
            raise UserError(
                f"Options of the plug-in {self} must be a subclass of pipeline.config.base.Section, not {options!r}"
            )
        return options


_LOADED: set[Plugin] = set()
"""Those that this process has imported."""


def plugins_in(trace: str) -> list[Plugin]:
    """The imported plug-ins that a traceback, as text, goes through: by their modules, or else by their packages."""
    for whole_package in (False, True):
        found = []
        for plugin in _LOADED:
            module = plugin.entry.module.partition(".")[0] if whole_package else plugin.entry.module
            file = getattr(sys.modules.get(module), "__file__", None) or ""
            place = file.removesuffix("__init__.py") if file.endswith("__init__.py") else f'{file}"'
            if file and f'File "{place}' in trace:
                found.append(plugin)
        if found:
            return sorted(found, key=str)
    return []


def is_plugin(name: object) -> bool:
    """True of names of plug-ins, installed or not; ours have no dot."""
    return isinstance(name, str) and "." in name


def installed(kind: Kind) -> Iterator[Plugin]:
    """All installed plug-ins of a kind, by name; none is imported. Two packages may have the same name."""
    yield from sorted(_plugins(kind, None, tuple(sys.path)), key=lambda each: (each.name, each.distribution))


def find_plugin(kind: Kind, name: str) -> Plugin:
    """The installed plug-in of a name, not yet imported.

    Raises:
        UserError: No installed package has it, or several do, or the one that does has no version.
    """
    found = _plugins(kind, name, tuple(sys.path))
    if not found:
        known = {plugin.name: str(plugin) for plugin in installed(kind)}
        near = difflib.get_close_matches(name, known, n=len(known) or 1, cutoff=0.6)
        shown = [known[each] for each in dict.fromkeys([*near, *known])]
        raise UserError(
            f"no installed package has this plug-in (entry points pipeline.{kind}); "
            f"{'installed are ' + ', '.join(shown) if shown else 'none are installed'}. Install the package that has "
            "it where this command and its jobs run: pip install PACKAGE; `pipeline plugins` lists what is there"
        )
    if len(found) > 1:
        several = " and ".join(sorted(f"{each.distribution} {each.version}" for each in found))
        raise UserError(f"several installed packages have this plug-in: {several}; uninstall all but one")
    if not found[0].version:
        raise UserError(f"the installed package {found[0].distribution} does not give its version; reinstall it")
    return found[0]


def plugin_identities(kind: Kind, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Identities of the plug-ins among some names, by name, for a fingerprint."""
    return {name: find_plugin(kind, name).identity for name in sorted(set(filter(is_plugin, names)))}


@lru_cache(maxsize=64)
def _plugins(kind: Kind, name: str | None, path: tuple[str, ...]) -> tuple[Plugin, ...]:
    """Plug-ins with a name, or all of a kind; `path` is where they are looked for.

    Kept, since training asks at each step, and package and version are read from a file each time.
    """
    from importlib.metadata import entry_points

    found = []
    for entry in entry_points(group=f"pipeline.{kind}"):
        if entry.name == name or (name is None and re.match(NAME, entry.name)):
            about = ("?", "") if entry.dist is None else (entry.dist.name, entry.dist.version or "")
            found.append(Plugin(kind, entry.name, *about, entry))
    return tuple(found)


@dataclass(frozen=True)
class NamedPlugin:
    """Annotation of a key with one of our names, those of its `Literal`, or the name of an installed plug-in."""

    kind: Kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        ours = _ours(source)

        def check(value: Any) -> str:
            if value in ours and isinstance(value, str):
                return value
            if not isinstance(value, str) or "." not in value:
                if ours:
                    shown = [repr(name) for name in ours]
                    expected = " or ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
                    raise PydanticKnownError("literal_error", {"expected": expected})
                raise ValueError("must be the name of an installed plug-in, which has a dot, like acme.name")
            find_plugin(self.kind, value)
            return value

        return core_schema.no_info_plain_validator_function(
            check, serialization=core_schema.to_string_ser_schema(), metadata={"ours": list(ours)}
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        ours = schema.get("metadata", {}).get("ours", [])
        plugin = {"type": "string", "pattern": NAME}
        return {"anyOf": [{"type": "string", "enum": ours}, plugin]} if ours else plugin


def _ours(annotation: Any) -> tuple[str, ...]:
    """Our names: the values of the `Literal` in an annotation like `Literal["a"] | str`."""
    literals = [part for part in get_args(annotation) if get_args(part)]
    return tuple(name for part in literals for name in get_args(part))


@dataclass(frozen=True)
class PluginOptions:
    """Annotation of a key with the options of the plug-in that another key of its section names."""

    kind: Kind
    named_by: str
    """Key of the name, declared before this one."""

    def section(self, name: Any) -> type[Section] | None:
        """The section of the options of the plug-in of a name; None if it has none, or cannot be imported."""
        try:
            return find_plugin(self.kind, name).options() if is_plugin(name) else None
        except UserError:
            return None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "object"}, {"type": "null"}]}

    def _check(self, value: Any, info: ValidationInfo) -> Section | None:
        name = info.data.get(self.named_by)
        if name is None:  # its own error is enough
            return None
        section = find_plugin(self.kind, name).options() if is_plugin(name) else None
        if section is not None:
            return _kept(section.model_validate(value), name)
        if value is None:
            return None
        key = self.named_by
        if is_plugin(name):
            raise ValueError(f"the plug-in {name} has no options; remove the key")
        raise ValueError(f"is for plug-ins, and {key} is {name}; remove it, or name a plug-in with {key} beside it")


def _kept(options: Section, name: str) -> Section:
    """Options as they are; a `ValueError` where they are others when they come back from the files of a run."""
    section = type(options)
    try:
        again = section.model_validate(options.model_dump(mode="json"))
        changed = [key for key in section.model_fields if getattr(again, key) != getattr(options, key)]
    except ValueError as error:
        raise ValueError(f"options of the plug-in {name} cannot be kept in the files of a run: {error}") from None
    if changed:
        raise ValueError(
            f"{changed[0]} of the plug-in {name} changes where the files of a run keep it "
            f"({section.model_fields[changed[0]].annotation}); a secret comes from the environment instead"
        )
    return options


SourceOptions = Annotated[Any, PluginOptions("sources", "type"), DATA]
"""Options of a source's plug-in."""
ObjectiveOptions = Annotated[Any, PluginOptions("objectives", "type"), DATA]
"""Options of an objective's plug-in."""
LoggerOptions = Annotated[Any, PluginOptions("loggers", "type"), DATA]
"""Options of a logger's plug-in."""
MixerOptions = Annotated[Any, PluginOptions("mixers", "mixer"), DATA]
"""Options of a mixer's plug-in."""
MlpOptions = Annotated[Any, PluginOptions("mlps", "mlp"), DATA]
"""Options of an mlp's plug-in."""
