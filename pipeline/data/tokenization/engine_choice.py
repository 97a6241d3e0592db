"""Engine choice: the fastest engine that is installed and has proved itself, or the one that the run file names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

from pipeline.common.errors import UserError
from pipeline.data.tokenization.engine_check import prove
from pipeline.data.tokenization.engines import ADVICE, KEY, Engine, EngineName, installed, open_engine
from pipeline.data.tokenization.tokenizer import Tokenizer

FAST: tuple[EngineName, ...] = ("gigatoken", "fastokens")
"""Engines that `auto` tries, in this order, before it takes `tokenizers`."""


class EngineChoice(NamedTuple):
    """The engine of a run."""

    which: EngineName
    name: str
    """Its name, with the version."""
    why: str
    """One sentence."""


def choose_engine(
    setting: str,
    tokenizer: Tokenizer,
    cache_folder: Path,
    rejected_engines: set[str],
    opened: Callable[[EngineName], Engine] | None = None,
) -> EngineChoice:
    """The engine of a run, after it has proved itself on hard texts.

    Args:
        setting: `auto`, or the name of a library.
        tokenizer: what defines the ids.
        cache_folder: keeps what is proved once for library, tokenizer and CPU; made if need be, and not needed.
        rejected_engines: names of engines that gave a wrong id for a document. With one that is still installed, only
            `tokenizers` is trusted.
        opened: gives the engines of the tokenizer; by default each is opened for this alone.

    Raises:
        UserError: an engine was asked for by its name and is not installed, or is not like `tokenizers`.
    """
    opened = opened or partial(open_engine, tokenizer)
    reference = opened("tokenizers")
    if setting == "tokenizers":
        return EngineChoice("tokenizers", reference.name, "as asked for")
    if guilty := rejected_engines & {installed(which) for which in FAST}:
        return EngineChoice("tokenizers", reference.name, f"because {min(guilty)} gave other ids")
    reasons = []
    for which in FAST if setting == "auto" else (cast(EngineName, setting),):
        try:
            return _proved(which, opened(which), reference.name, tokenizer, cache_folder)
        except UserError as error:
            if setting != "auto":
                raise
            reasons.append(str(error).removeprefix(KEY).removesuffix(ADVICE))
    return EngineChoice("tokenizers", reference.name, f"because {' and '.join(reasons)}")


def _proved(
    which: EngineName, engine: Engine, reference: str, tokenizer: Tokenizer, cache_folder: Path
) -> EngineChoice:
    """An engine that proves itself; a `UserError` otherwise."""
    proof = prove(engine, which, tokenizer, cache_folder)
    if proof.failure:
        raise UserError(f"{KEY}{engine.name} {proof.failure}{ADVICE}")
    return EngineChoice(which, engine.name, f"its ids of {proof.texts:,} hard texts are those of {reference}")
