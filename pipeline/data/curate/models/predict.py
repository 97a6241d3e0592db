"""Labels and scores of texts by fastText, which `fasttext-predict` runs: it predicts, and trains nothing."""

from __future__ import annotations

import math
import sys
from functools import partial
from importlib import metadata
from typing import Any

from pipeline.common.errors import MachineError, UserError, install_extra
from pipeline.common.imports import source_hash
from pipeline.common.limited_child import ChildLimits, run_limited
from pipeline.common.paths import check_once
from pipeline.data.curate.models.fasttext_file import ModelFile
from pipeline.data.sources.foreign_parser import parsing

DISTRIBUTION = "fasttext-predict"
OTHERS = ("fasttext", "fasttext-wheel", "fasttext-numpy2", "fasttext-numpy2-wheel", "fasttext-langdetect-wheel")
"""Distributions that have the same module, and write over each other's files."""
ONE = 2**16 - 1
"""Score 1 as it is stored."""
HARD_TEXTS = (
    "\n",
    "a\n",
    "The committee will meet on Thursday. Комитет соберётся в четверг. 委员会将于星期四开会。\n",
    "\u0301\u200d\U0001f600\U0010ffff \x00\x01\x7f __label__ __label__a __label__en\n",
    "x" * 4096 + "\n",
    "漢é " * 1024 + "\n",
    " ".join(f"w{number}" for number in range(2048)) + "\n",
)
"""Lines that reach what a model has: words, n-grams of each length, and tokens that read like labels."""
_END = "</s>"
"""fastText's word for the end of a line: it reads nothing behind it."""


def fasttext_version() -> str:
    """The installed version of `fasttext-predict`.

    Raises:
        UserError: it is missing, or another distribution with the same module is there.
    """
    found = [name for name in OTHERS if _version(name) is not None]
    if found:
        raise UserError(
            f"{' and '.join(found)} is installed, which has the same module `fasttext` as {DISTRIBUTION} and gives "
            f"other results or fails with NumPy 2: pip uninstall {' '.join([*found, DISTRIBUTION])}, then "
            f"{install_extra('curate')}"
        )
    version = _version(DISTRIBUTION)
    if version is None:
        raise UserError(f"models of data.curate need {DISTRIBUTION}: {install_extra('curate')}")
    return version


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def stored(score: float) -> int:
    """A score as it is stored: 0 to 65535. fastText adds 0.00001 to each, so the largest ones are above 1."""
    return min(max(round(score * ONE), 0), ONE)


def try_model(model: ModelFile, key: str) -> None:
    """Load a model and predict some texts in a child process with limits, once for a file: the library is C++.

    Args:
        model: within the bounds of its format.
        key: of the run file that names it.

    Raises:
        UserError: the library crashed, took too long or too much memory; MachineError if no process could be started.
    """
    about = f"{model.hash}-{fasttext_version()}-{source_hash(sys.modules[__name__]):016x}"
    check_once("fasttext", about, partial(_predict_in_child, model, key), file=str(model.path))


def _predict_in_child(model: ModelFile, key: str) -> None:
    size = model.path.stat().st_size
    limits = ChildLimits(cpu_s=60 + size // 2**25, wall_s=600.0 + size / 2**23, memory=2**30 + 4 * size)
    job = {"path": str(model.path.resolve()), "labels": len(model.labels)}
    end = run_limited(__name__, _predict_hard_texts.__name__, job, limits)
    if end.how == "not started":
        raise MachineError(f"{key}: a prediction with {model.path} {end.detail}; try again")
    if problem := end.value if end.how == "result" else f"the process {end.detail}":
        raise UserError(
            f"{key}: fastText cannot use {model.path}: {problem}; copy or download it again, and use no model "
            "whose author you do not trust"
        )


def _predict_hard_texts(job: dict[str, Any]) -> str:
    """In the child: what the library says of a model; empty if it predicts."""
    import fasttext

    try:
        loaded = fasttext.load_model(job["path"]).f
        for text in HARD_TEXTS:
            loaded.predict(text, job["labels"], 0.0, "strict")
    except (ValueError, RuntimeError) as error:
        return str(error) or type(error).__name__
    return ""


class Predictor:
    """A loaded model. A worker process loads it once.

    Args:
        model: the file.
        key: of the run file that names it.
        characters: of a text that are read; None for all.

    Raises:
        UserError: the library is missing, or refuses the file.
    """

    def __init__(self, model: ModelFile, key: str, characters: int | None) -> None:
        try_model(model, key)
        import fasttext

        try:
            loaded: Any = fasttext.load_model(str(model.path))
        except (ValueError, RuntimeError, MemoryError) as error:
            raise UserError(f"{key}: fastText cannot load {model.path}: {error}") from error
        # Of the class, `predict` gives the same in another form, and copies each text once more.
        self._model = loaded.f
        self._where = f"{key}: {model.path}"
        self._characters = characters
        self._labels = len(model.labels)

    def best(self, text: str) -> tuple[str, int]:
        """The most probable label and its stored score; an empty label where the model knows nothing of the text."""
        found = self._predict(text, 1)
        return (found[0][1], self._stored(found[0][0])) if found else ("", 0)

    def score(self, text: str, label: str) -> int:
        """The stored score of one label. fastText leaves out scores below 0.00001, which are 0 here."""
        for score, name in self._predict(text, self._labels):
            if name == label:
                return self._stored(score)
        return 0

    def _stored(self, score: float) -> int:
        if not math.isfinite(score):
            raise UserError(f"{self._where} is damaged: it gives the score {score}; copy or download it again")
        return stored(score)

    def _predict(self, text: str, count: int) -> list[tuple[float, str]]:
        """The `count` most probable labels with their scores."""
        try:
            with parsing("fasttext"):
                found: list[tuple[float, str]] = self._model.predict(self._line(text), count, 0.0, "strict")
        except RuntimeError as error:
            raise UserError(f"{self._where} is damaged: fastText says {error}; copy or download it again") from error
        return found

    def _line(self, text: str) -> str:
        """The text as one line: fastText reads one, and line ends are spaces between words."""
        line = text[: self._characters].replace("\n", " ")
        if _END in line:
            line = line.replace(_END, " ")
        return line + "\n"
