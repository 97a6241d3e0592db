"""Base of every section of the config: strictness, and the value types of the run file."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from pipeline.common.objects.urls import is_url, parse_folder, parse_url


def _sort_sets(schema: Any) -> None:
    """Have the sets of a schema written in an order that is the same in every process, for hashes and files."""
    if isinstance(schema, list | tuple):
        for part in schema:
            _sort_sets(part)
    if not isinstance(schema, dict):
        return
    for key, part in schema.items():
        # These are values, not schemas; in a dictionary without a type they are names of fields.
        if key not in ("default", "expected", "metadata") or not isinstance(schema.get("type"), str):
            _sort_sets(part)
    if schema.get("type") in ("set", "frozenset") and "serialization" not in schema:
        schema["serialization"] = core_schema.wrap_serializer_function_ser_schema(_in_order, when_used="json")


def _in_order(value: Any, handler: SerializerFunctionWrapHandler) -> list[Any]:
    return sorted(handler(value), key=lambda entry: json.dumps(entry, sort_keys=True))


class Section(BaseModel):
    """A section of the run file. Unknown keys are errors; values cannot change after loading."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        serialize_by_alias=True,  # some keys are words of Python
    )
    described_at: ClassVar[str | None] = None
    """Path of another section whose keys these are, for the reference."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _sort_sets(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, value: Any) -> Any:
        # `eval:` with all its keys commented out is null in YAML and means the defaults to whoever wrote it.
        return {} if value is None else value

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        # Python counts True as 1, and so does pydantic; whoever writes `batch_size: true` means something else.
        if any(isinstance(entry, bool) for entry in (value if isinstance(value, list) else [value])):
            types = set(_scalar_types(cls.model_fields[str(info.field_name)].annotation))
            if bool not in types and types & {int, float}:
                raise PydanticKnownError("int_type" if int in types else "float_type")
        return value

    @field_validator("*")
    @classmethod
    def _in_64_bits(cls, value: Any) -> Any:
        # NumPy and torch compute with no others; bounds of what sizes something are at the fields.
        if any(type(entry) is int and abs(entry) >= 2**63 for entry in (value if isinstance(value, list) else [value])):
            raise ValueError("must be less than 2**63")
        return value


def _scalar_types(annotation: Any) -> Iterator[Any]:
    """The types that an annotation is made of, like int and NoneType of `int | None`."""
    below = get_args(annotation)
    if not below:
        yield annotation
    for part in below:
        yield from _scalar_types(part)


@contextmanager
def record_reads() -> Iterator[set[tuple[type[Section], str]]]:
    """Collect which keys of which sections are read as attributes while the context is active (for tests).

    Validation, comparison and dumping do not go through attributes, so only uses by the program count.
    """
    reads: set[tuple[type[Section], str]] = set()

    def recording(self: Section, name: str) -> Any:
        if name in type(self).__pydantic_fields__:
            reads.add((type(self), name))
        return object.__getattribute__(self, name)

    Section.__getattribute__ = recording  # type: ignore[method-assign, assignment]
    try:
        yield reads
    finally:
        del Section.__getattribute__


_COUNT = re.compile(r"^([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)\s*([KMBT]?)$")
_BYTES = re.compile(r"^([0-9][0-9_]*(?:\.[0-9]+)?)\s*(?:([KMGT]i?)?B)?$")
_COUNT_SCALE = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_BYTES_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_count(value: Any) -> Any:
    """`300`, `1e9`, `2_000_000`, `1.5B` -> int. Anything but text or a whole float is left to pydantic."""
    if isinstance(value, str):
        found = _COUNT.match(value.strip())
        value = _whole(found[1], _COUNT_SCALE[found[2]]) if found else None
        if value is None:
            raise ValueError("must be a whole number, like 300, 2_000_000, 1e9 or 1.5B (K, M, B, T)")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def parse_bytes(value: Any) -> Any:
    """`4096`, `64MiB`, `1.5GB` -> bytes. Anything but text or a whole float is left to pydantic."""
    if isinstance(value, str):
        found = _BYTES.match(value.strip())
        unit = (found[2] or "") if found else ""
        value = _whole(found[1], (1024 if "i" in unit else 1000) ** _BYTES_POWER[unit[:1]]) if found else None
        if value is None:
            raise ValueError("must be a size in bytes, like 4096, 64MiB or 1.5GB (KB, MB, GB, TB, KiB, MiB, GiB, TiB)")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole(number: str, scale: int) -> int | None:
    """The product, exactly; None if it is not a whole number or needs more than 63 bits."""
    try:
        product = Decimal(number.replace("_", "")) * scale
        return int(product) if product < 2**63 and product % 1 == 0 else None
    except ArithmeticError:  # an exponent of astronomical size
        return None


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""Beginning of a URL; `Path` has made one slash of two."""


def absolute(path: Path) -> Path:
    """Relative to the working directory, `~` expanded; a resolved config must not depend on where it is read.

    Raises:
        ValueError: it is a URL.
    """
    _refuse_url(str(path))
    return Path(os.path.abspath(path.expanduser()))


def _refuse_url(path: str) -> None:
    if found := _URL.match(path):
        raise ValueError(
            f"must be a path, not a {found[0].rstrip(':/')} URL: only data.sources.N.paths, data.sources.N.dataset, "
            "data.dir and tokenizer.path may be URLs. Mount the bucket (mount-s3, gcsfuse, rclone mount) or copy it "
            "(rclone copy, aws s3 sync)"
        )


def absolute_glob(pattern: str) -> str:
    """`absolute` for a path that may have wildcards."""
    _refuse_url(pattern)
    return os.path.abspath(os.path.expanduser(pattern))


def glob_or_url(pattern: str) -> str:
    """`absolute_glob`, or a URL of objects as it is.

    Raises:
        ValueError: it is a URL of something else, or has a secret in it.
    """
    return str(parse_url(pattern)) if is_url(pattern) else absolute_glob(pattern)


def path_or_url(value: Any) -> Path | str:
    """`absolute` for a path, or the URL of an object as text.

    Raises:
        ValueError: it is a URL of something else, or has a secret in it.
    """
    if isinstance(value, str) and is_url(value):
        return str(parse_url(value))
    if not isinstance(value, str | Path):
        raise PydanticKnownError("string_type")
    return absolute(Path(value))


def folder_or_url(value: Any) -> Path | str:
    """`absolute` for a path, or the URL of a folder in a bucket as text.

    Raises:
        ValueError: it is a URL of something else, or has a secret in it.
    """
    if isinstance(value, str) and is_url(value):
        return str(parse_folder(value))
    return path_or_url(value)


def folder_url(text: str) -> str:
    """The URL of a folder in a bucket, without a slash at its end.

    Raises:
        ValueError: it is a URL of something else, or has a secret in it.
    """
    return str(parse_folder(text))


def single_line(text: str) -> str:
    """Text that can stand in one line of a script: no control characters, no other line ends, whole characters alone.

    Raises:
        ValueError: it has one; the message shows it escaped.
    """
    if odd := next((each for each in text if unicodedata.category(each) in _NOT_IN_A_LINE), None):
        raise ValueError(f"must be one line without control characters, but has {odd!a} in {text[:200]!a}")
    return text


_NOT_IN_A_LINE = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Categories of Unicode: control characters, halves of surrogate pairs, ends of lines and paragraphs."""


def _line_of_path(path: Path) -> Path:
    return Path(single_line(str(path)))


def _lines(text: str) -> str:
    """As `single_line`, with the line ends and tabs of a block."""
    single_line(text.replace("\n", "").replace("\t", ""))
    return text


def _names_in_a_line(values: dict[str, str]) -> dict[str, str]:
    for name in values:
        single_line(name)
    return values


def _variables(values: dict[str, str]) -> dict[str, str]:
    for name in values:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!a} cannot be the name of a variable; use letters, digits and _")
    return values


@dataclass(frozen=True)
class KeyMark:
    """KeyMark of a key that is a text or a path: what becomes of its value. Each such key has one."""

    kind: Literal["data", "code", "credentials"]
    files: Callable[[Any], Iterable[Path]] | None = field(default=None, compare=False)
    """Of code that is in files: those that a value names. Without it the value itself is executed."""
    applies: Callable[[Any], bool] | None = field(default=None, compare=False)
    """False of values that are data all the same. Without it none is."""


DATA = KeyMark("data")
"""Read, compared, printed or sent. It may choose among the code that is installed, and names no other."""
CODE = KeyMark("code")
"""Executed as this user: `pipeline.config.parsing.code_keys` refuses it where somebody else may have written it."""
CREDENTIALS = KeyMark("credentials")
"""Address of a server that gets requests with this user's credentials: refused like code."""

Count = Annotated[int, BeforeValidator(parse_count, json_schema_input_type=int | float | str)]
"""A whole number; `1e9`, `300B`, `2_000_000` are understood."""
Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | float | str)]
"""A size in bytes; `4MiB`, `1GB` are understood."""
AbsPath = Annotated[Path, AfterValidator(absolute)]
"""A path, absolute after loading."""
Line = Annotated[str, AfterValidator(single_line)]
"""Text of one line, for what becomes a word or an option of a script."""
Lines = Annotated[str, AfterValidator(_lines)]
"""Shell for a script, of one line or more."""
AbsLinePath = Annotated[Path, AfterValidator(absolute), AfterValidator(_line_of_path)]
"""A path that scripts name, absolute after loading."""
LineByName = Annotated[dict[str, Line], AfterValidator(_names_in_a_line)]
"""Options of a script with their values."""
Variables = Annotated[dict[str, Line], AfterValidator(_variables)]
"""Values of environment variables."""
AbsGlob = Annotated[str, AfterValidator(absolute_glob)]
"""A path or glob, absolute after loading."""
Text = Annotated[str, DATA]
"""Text that is data."""
TextLine = Annotated[Line, DATA]
"""Text of one line that is data."""
DataPath = Annotated[AbsPath, DATA]
"""Path of data, absolute after loading."""
DataGlob = Annotated[AbsGlob, DATA]
"""Path or glob of data, absolute after loading."""


def _name_objects(paths: Iterable[str]) -> bool:
    """Tell whether one of them is a URL at which credentials are used."""
    return any(is_url(path) and parse_url(path).is_listable for path in paths)


GlobOrUrl = Annotated[str, AfterValidator(glob_or_url), KeyMark("credentials", applies=_name_objects)]
"""Path or glob of files, absolute after loading, or URL of objects; a key of it is a list."""

PathOrUrl = Annotated[
    Path | str,
    PlainValidator(path_or_url, json_schema_input_type=Path),
    KeyMark("credentials", applies=lambda value: isinstance(value, str) and _name_objects([value])),
]
"""Path, absolute after loading, or the URL of an object, which is text."""

FolderOrUrl = Annotated[
    Path | str,
    PlainValidator(folder_or_url, json_schema_input_type=Path),
    KeyMark("credentials", applies=lambda value: isinstance(value, str)),
]
"""Folder of data, absolute after loading, or the URL of a folder in a bucket, which is text."""
FolderUrl = Annotated[str, AfterValidator(folder_url), CREDENTIALS]
"""URL of a folder in a bucket."""

MAX_SEQUENCE = 2**26
"""Tokens of a window: 60 times the longest published. Plans, masks and tables of positions grow with it, and are made
before anything is trained."""
MAX_PROCESSES = 2**20
"""Most processes of a run, above those of the largest clusters. Layouts are lists of ranks."""
MAX_LOCAL = 2**12
"""Processes, workers or devices of a machine, each of which is started, or looked for."""
MAX_NODES = 2**16
"""Most nodes of a job, and most jobs of an array: SLURM can be built for so many."""
MAX_BYTES = 2**40
"""Most bytes that are held in memory at once; no machine has so many for one process."""
MAX_SAMPLES = 2**26
"""Windows of a step or of a validation, each of which has an entry in lists of the sampler."""

_DURATION = re.compile(r"^(.+?)\s*(steps?|tokens?|epochs?)$")


def parse_steps(value: Any) -> Any:
    """`1000`, `1K`, `1000 steps` -> int: a duration in steps, whose unit may be left out."""
    found = _DURATION.match(value.strip()) if isinstance(value, str) else None
    if found is not None and not found[2].startswith("step"):
        raise ValueError("must be a number of steps, like 1000 or '1000 steps'")
    return parse_count(found[1] if found else value)


Steps = Annotated[int, BeforeValidator(parse_steps, json_schema_input_type=int | float | str)]


class Value(Section):
    """A section that is written as one value."""


class Duration(Value):
    """A length of training: `2000 steps`, `10B tokens` or `3 epochs`."""

    count: Count
    unit: Literal["steps", "tokens", "epochs"]

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        if isinstance(value, (dict, Duration)):
            return value
        found = _DURATION.match(value.strip()) if isinstance(value, str) else None
        if found is None:
            raise ValueError("must be a number and a unit, like '2000 steps', '10B tokens' or '3 epochs'")
        return {"count": found[1], "unit": found[2].rstrip("s") + "s"}

    @model_validator(mode="after")
    def _positive(self) -> Duration:
        if self.count < 0:
            raise ValueError("must not be negative")
        return self

    @model_serializer
    def _text(self) -> str:
        return f"{self.count} {self.unit}"

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {
            "type": "string",
            "pattern": r"^.+\s*(steps?|tokens?|epochs?)$",
            "examples": ["2000 steps", "10B tokens", "3 epochs"],
        }


def _without_epochs(duration: Duration) -> Duration:
    if duration.unit == "epochs":
        raise ValueError(
            "must be in steps or tokens, like '2000 steps' or '10B tokens': only train.duration has epochs"
        )
    return duration


StepsOrTokens = Annotated[Duration, AfterValidator(_without_epochs)]
"""A part of a training, `2000 steps` or `10B tokens`."""


_DOCUMENTS = re.compile(r"^(.+?)\s*documents?$")


class Share(Value):
    """Size of a split: a share like `0.01`, or a number like `500 documents`."""

    may_be_all: ClassVar[bool] = False

    share: float = Field(default=0.0, ge=0, le=1)
    documents: int | None = Field(default=None, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        if isinstance(value, (dict, Share)):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if not 0 <= value <= 1 or (value == 1 and not cls.may_be_all):
                most = "at most" if cls.may_be_all else "less than"
                raise ValueError(f"must be a share of at least 0 and {most} 1, or a number like '500 documents'")
            return {"share": value}
        found = _DOCUMENTS.match(value.strip()) if isinstance(value, str) else None
        if found is None:
            raise ValueError("must be a share like 0.01, or a number like '500 documents'")
        return {"documents": parse_count(found[1])}

    @model_serializer
    def _text(self) -> float | str:
        return self.share if self.documents is None else f"{self.documents} documents"

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {
            "anyOf": [
                {"type": "number", "minimum": 0, "maximum" if cls.may_be_all else "exclusiveMaximum": 1},
                {"type": "string", "pattern": r"^.+\s*documents?$", "examples": ["500 documents"]},
            ]
        }

    def __str__(self) -> str:
        return str(self._text())
