"""Proof that an engine gives the ids of `tokenizers`, on hard texts.

The long set is run once for every engine, version, tokenizer and CPU, in a process of its own: a library that crashes
there has failed and takes nothing with it. The result is kept. Later runs repeat the quick set.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson
import tokenizers

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import value_hash
from pipeline.common.imports import source_hash
from pipeline.common.limited_child import ChildLimits, run_limited
from pipeline.data.tokenization import engines, hard_texts
from pipeline.data.tokenization.definition import load_definition
from pipeline.data.tokenization.engines import Encoded, Engine, EngineDiffers, EngineName, first_difference, open_engine
from pipeline.data.tokenization.tokenizer import Tokenizer

LIMITS = ChildLimits(cpu_s=120, wall_s=120.0)
"""An engine that takes longer for the long set, which is a matter of seconds, hangs."""
_BATCH_CHARACTERS = 2**18


class Proof(NamedTuple):
    """Result of a check of an engine."""

    texts: int
    """Hard texts in the long set, or those until the first failure."""
    failure: str
    """Fault of the engine, to follow its name; empty if it did nothing wrong."""


def prove(engine: Engine, which: EngineName, tokenizer: Tokenizer, cache_folder: Path) -> Proof:
    """Prove an engine, by the cached result of the long set and the quick set, or by the long set.

    Args:
        engine: it, open.
        which: what it was opened as.
        tokenizer: what defines the ids.
        cache_folder: where results of the long set are kept; if it cannot be written, they are not.
    """
    about = _about(engine.name, tokenizer)
    file = cache_folder / f"{which}-{value_hash(about)[:16]}.json"
    cached = _read(file, about)
    if cached is not None:
        if cached.failure:
            return cached
        with _no_more_threads():
            return cached._replace(failure=compare(engine, tokenizer, long=False).failure)
    proof, lasting = _in_child(which, tokenizer)
    if lasting:
        with contextlib.suppress(OSError):
            cache_folder.mkdir(parents=True, exist_ok=True)
            storage.put_json(file, {"about": about, **proof._asdict()})
    return proof


@contextlib.contextmanager
def _no_more_threads() -> Iterator[None]:
    """`tokenizers` starts no threads inside, which would stay: a process of one thread can fork its workers."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def compare(engine: Engine, tokenizer: Tokenizer, long: bool) -> Proof:
    """Run a set of hard texts through an engine and through `tokenizers`, in batches."""
    texts = hard_texts.hard_texts(tokenizer, long)
    begin = 0
    while begin < len(texts):
        end, size = begin, 0
        while end < len(texts) and (size < _BATCH_CHARACTERS or end == begin):
            size += len(texts[end])
            end += 1
        batch = texts[begin:end]
        try:
            expected = Encoded(*tokenizer.encode_flat(batch))
        except UserError as error:
            return Proof(begin, f"cannot be compared: {error}")
        try:
            found = engine.encode(batch)
        except EngineDiffers as error:
            return Proof(end, error.detail)
        if failure := _difference(batch, expected, found):
            return Proof(end, failure)
        begin = end
    return Proof(len(texts), "")


def _difference(texts: list[str], expected: Encoded, found: Encoded) -> str:
    at = then = 0
    for text, length, other in zip(texts, expected.lengths.tolist(), found.lengths.tolist(), strict=True):
        difference = first_difference(text, expected.ids[at : at + length], found.ids[then : then + other])
        if difference is not None:
            return difference[1]
        at, then = at + length, then + other
    return ""


def _in_child(which: EngineName, tokenizer: Tokenizer) -> tuple[Proof, bool]:
    """The long set in a child process; and whether the result is worth keeping, or the machine may be to blame."""
    job = {
        "which": which,
        "definition": tokenizer.definition,
        "end_of_document": tokenizer.end_of_document_token,
        "special_tokens": list(tokenizer.special_tokens),
        "allow_special": tokenizer.allow_special,
    }
    end = run_limited(__name__, _prove_in_child.__name__, job, LIMITS)
    if end.how == "result":
        with contextlib.suppress(TypeError):
            return Proof(**end.value), True
    if end.how in ("signal", "code"):
        return Proof(0, f"did not survive the hard texts: the process {end.detail}"), False
    return Proof(0, f"{end.detail} for the hard texts"), False


def _prove_in_child(job: dict[str, Any]) -> dict[str, Any]:
    tokenizer = Tokenizer(
        load_definition(job["definition"].encode(), "it"),
        job["end_of_document"],
        job["special_tokens"],
        job["allow_special"],
    )
    return compare(open_engine(tokenizer, cast(EngineName, job["which"])), tokenizer, long=True)._asdict()


def _about(name: str, tokenizer: Tokenizer) -> dict[str, str]:
    """All that a result depends on."""
    code = "".join(f"{source_hash(module):016x}" for module in (engines, hard_texts, sys.modules[__name__]))
    return {
        "engine": name,
        "tokenizers": tokenizers.__version__,
        "tokenizer": tokenizer.fingerprint,
        "cpu": _cpu(),
        "unicode": unicodedata.unidata_version,
        "code": code,
    }


def _cpu() -> str:
    """Model of the processor and hash of its features: libraries choose their code by them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    kinds = ("cpu family", "model", "stepping", "flags", "features", "cpu implementer", "cpu part", "cpu variant")
    features = value_hash([fields.get(name) for name in kinds])[:16]
    return f"{platform.machine()} {fields.get('model name', '')} {features}"


def _read(file: Path, about: dict[str, str]) -> Proof | None:
    """A kept result; None if there is none that can be read."""
    try:
        kept = orjson.loads(file.read_bytes())
        if kept["about"] == about:
            return Proof(int(kept["texts"]), str(kept["failure"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None
