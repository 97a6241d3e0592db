"""A vocabulary of another format as the content of a `tokenizer.json`, and the program that defines its ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.common.errors import UserError, install_extra
from pipeline.data.sources.foreign_parser import parsing

EXTRA = "convert"


class Reference(Protocol):
    """The original program for a format, with one vocabulary."""

    name: str
    """Package and version."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without special tokens."""


@dataclass
class Converted:
    """A converted vocabulary.

    Attributes:
        format: name of the format it came from.
        state: content of the `tokenizer.json`.
        reference: opens the original program; ImportError if its package is not installed.
        package: name of that package.
        end: token that ends a document, if the format names one.
        pieces: texts of the entries of the vocabulary.
        hard: texts that are hard for this format.
        doubts: reasons why some text may get other ids.
        notes: what a user has to know.
    """

    format: str
    state: dict[str, Any]
    reference: Callable[[], Reference]
    package: str
    end: str | None = None
    pieces: list[str] = field(default_factory=list)
    hard: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Largest id + 1."""
        model = self.state["model"]
        return len(model["vocab"]) if isinstance(model["vocab"], list) else max(model["vocab"].values()) + 1

    def open_reference(self) -> Reference:
        """Open the original program.

        Raises:
            UserError: its package is not installed, or it refuses the vocabulary.
        """
        try:
            with parsing(self.package):
                return self.reference()
        except ImportError:
            raise UserError(
                f"the ids are compared with those of {self.package}, which is not installed: {install_extra(EXTRA)}, "
                "or write the file without this proof with --unproven"
            ) from None
        except (ValueError, RuntimeError, OSError) as error:
            raise UserError(f"{self.package} cannot open the vocabulary itself: {error}") from None


def added_token(content: str, number: int, *, special: bool) -> dict[str, Any]:
    """An entry of `added_tokens`; one that is not special is found in every text, after the normalizer."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": not special, "special": special}
    return {"id": number, "content": content, **flags}


def tokenizer_state(model: dict[str, Any], added: Iterable[dict[str, Any]], **sections: Any) -> dict[str, Any]:
    """Content of a `tokenizer.json`; sections that are not given are null."""
    rest = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    tokens = sorted(added, key=lambda entry: entry["id"])
    return {"version": "1.0", "added_tokens": tokens, **rest, **sections, "model": model}


def run_texts(runs: dict[str, int], limit: int = 64) -> list[str]:
    """Runs of words of all lengths up to thrice the longest piece and more, alone, between letters and in lines."""
    texts = []
    for word, most in runs.items():
        for count in range(1, 3 * min(most, limit) + 4):
            run = word * count
            texts += [run, f"x{run}y{run}\n{run}z", f"{run} {run}1{run}."]
    return texts
