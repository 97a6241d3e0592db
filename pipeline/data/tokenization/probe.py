"""Probe of a tokenizer that may grow or take long: it encodes hard texts in a child process with limits, once.

What bounds prove needs no probe: most tokenizers have a byte-level BPE and a regex that is well known. Others are
probed when they are first opened, which takes some tenths of a second; that they passed is kept.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from typing import Any

import numpy as np
import tokenizers
import xxhash
from tokenizers import Regex, pre_tokenizers

from pipeline.common.errors import MachineError, UserError
from pipeline.common.hashing import mix
from pipeline.common.imports import source_hash
from pipeline.common.limited_child import ChildLimits, run_limited
from pipeline.common.paths import StrPath, check_once
from pipeline.data.sources.records import printable
from pipeline.data.tokenization import definition as bounds
from pipeline.data.tokenization.definition import (
    KNOWN_PATTERNS,
    Definition,
    check_definition,
    is_panic,
    load_definition,
)

LIMITS = ChildLimits(cpu_s=20, wall_s=300.0, memory=2**31)
"""The texts take a good tokenizer some hundredths of a second and some megabytes."""
MAX_GROWTH = 32.0
"""Bytes that are handed to the model, and ids, per byte of a text. NFKC and a byte-level alphabet reach 22."""
_REGEX_SIZES = (256, 2048, 16384)
_REGEX_S = 1.0
"""Characters of a text for one regex, and processor time. A regex that is linear takes some milliseconds for the
longest; one that is quadratic takes seconds, and an exponential one fails for the shortest."""
_TEXT_SIZE = 4096
_TEXT_S = 4.0
"""The same for the whole tokenizer."""


def probe(definition: Definition, file: StrPath) -> None:
    """Probe a tokenizer, if its bounds do not prove that it is harmless, and if it has not been probed before.

    Args:
        definition: within its bounds.
        file: for messages.

    Raises:
        UserError: it took too long or too much memory, grew a text too much, or panicked.
        MachineError: no process could be started.
    """
    if is_proved(definition):
        return
    data = definition.bytes
    about = f"{xxhash.xxh3_128_hexdigest(data)}-{tokenizers.__version__}-{_code()}"
    check_once("tokenizers", about, partial(_in_child, data, definition.patterns, file), file=str(file))


def is_proved(definition: Definition) -> bool:
    """Tell whether bounds alone prove that a tokenizer takes little for any text."""
    regexes = set(definition.patterns.values())
    return definition.growth <= MAX_GROWTH and regexes <= KNOWN_PATTERNS and not definition.doubts


@lru_cache(maxsize=1)
def _code() -> str:
    """Hash of the code of probe and bounds."""
    return "".join(f"{source_hash(each):016x}"[:8] for each in (sys.modules[__name__], bounds))


def failing_regex(definition: str, texts: Iterable[str]) -> str:
    """The regex of a tokenizer.json that panics on one of some texts, with its place; "it" if none does alone."""
    for place, regex in check_definition(definition.encode(), "it").patterns.items():
        split = pre_tokenizers.Split(Regex(regex), "isolated")
        try:
            for text in texts:
                split.pre_tokenize_str(text)
        except BaseException as error:
            if is_panic(error):
                return _named(place, regex)
            raise
    return "it"


def _in_child(data: bytes, patterns: dict[str, str], file: StrPath) -> None:
    end = run_limited(__name__, _find_problem.__name__, {"definition": data.decode(), "patterns": patterns}, LIMITS)
    if end.how == "not started":
        raise MachineError(f"{file}: the probe of the tokenizer {end.detail}; try again")
    problem = str(end.value) if end.how == "result" else f"the process {end.detail}"
    if not problem:
        return
    regexes = "; ".join(_named(place, regex) for place, regex in list(patterns.items())[:4])
    about = f" (its regexes: {regexes})" if regexes and end.how != "result" else ""
    raise UserError(
        f"{file} was probed with hard texts: {problem}{about}; use another tokenizer.json, or change this part of it"
    )


def _named(place: str, regex: str) -> str:
    return f"{place} = '{printable(regex)[:200]}'"


def _find_problem(job: dict[str, Any]) -> str:
    """In the child: what is wrong with a tokenizer; empty for nothing."""
    alphabet = _alphabet(job["patterns"].values())
    for place, regex in job["patterns"].items():
        # Known ones, too: a text that this costs more than the others names the regex and not the tokenizer.
        if problem := _of_regex(regex, alphabet):
            return f"{_named(place, regex)} {problem}"
    return _of_tokenizer(job["definition"], alphabet)


def _of_regex(regex: str, alphabet: str) -> str:
    try:
        split = pre_tokenizers.Split(Regex(regex), "isolated")
        for size in _REGEX_SIZES:
            for text in _hard_texts(alphabet, size):
                begin = time.process_time()
                split.pre_tokenize_str(text)
                if (took := time.process_time() - begin) > _REGEX_S:
                    return f"takes {took:.1f} s for {size:,} characters ({_start(text)})"
    except BaseException as error:
        if is_panic(error):
            return f"fails on {_start(text)}: {error}"
        if isinstance(error, Exception) and not isinstance(error, MemoryError):
            return f"cannot be read: {error}"
        raise
    return ""


def _of_tokenizer(definition: str, alphabet: str) -> str:
    done = ""
    try:
        engine = load_definition(definition.encode(), "it")
        for text in _hard_texts(alphabet, _TEXT_SIZE):
            done = f"encoding {_start(text)}"
            begin = time.process_time()
            if problem := _grown(engine, text):
                return problem
            if (took := time.process_time() - begin) > _TEXT_S:
                return f"{done} takes {took:.1f} s for {_TEXT_SIZE:,} characters"
    except UserError as error:
        return str(error)
    except BaseException as error:
        if is_panic(error):
            return f"{done} fails: {error}"
        raise
    return ""


def _grown(engine: tokenizers.Tokenizer, text: str) -> str:
    size = len(text.encode())
    normal = text if engine.normalizer is None else engine.normalizer.normalize_str(text)
    pieces = [normal] if engine.pre_tokenizer is None else [p for p, _ in engine.pre_tokenizer.pre_tokenize_str(normal)]
    counts = {
        "its normalizers make": len(normal.encode()),
        "its pre-tokenizers make": sum(len(piece.encode()) for piece in pieces),
    }
    with contextlib.suppress(Exception):  # a model without ids for every text is told of when it is used
        ids = engine.encode(text, add_special_tokens=False).ids
        counts["its model makes"] = len(ids)
        engine.decode(ids, skip_special_tokens=False)
    for what, count in counts.items():
        if count > MAX_GROWTH * size:
            return f"{what} {count:,} of {size:,} bytes, {count / size:.0f} times as many ({_start(text)})"
    return ""


def _alphabet(regexes: Iterable[str]) -> str:
    """Characters that mean something to the regexes, and one of each kind."""
    own = [c for regex in regexes for c in regex if c.isalnum() or c in " _-'"]
    return "".join(dict.fromkeys(["a", " ", "1", "\n", ".", "é", "漢", "\ufdfa", *own]))[:24]


def _hard_texts(alphabet: str, size: int) -> Iterator[str]:
    """Runs of one character that end with it or with others, and mixtures."""
    for one in alphabet:
        yield one * size
        yield one * (size - 1) + ("\0" if one != "\0" else "b")
    numbers = mix(np.arange(size, dtype=np.uint64), size).tolist()
    yield "".join(alphabet[number % len(alphabet)] for number in numbers)
    yield "".join((alphabet[0] + alphabet[number % len(alphabet)]) for number in numbers[: size // 2])


def _start(text: str) -> str:
    return f"'{printable(text[:8])}'..."
