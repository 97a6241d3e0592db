"""Perplexity of WikiText (Merity et al. 2016) a word, which models with different tokenizers share.

The model reads the text as people write it (`detokenized`), and all its nats are divided by the words of the file as it
is. Articles, words and bytes are those of lm-evaluation-harness's task `wikitext`, so the figures are its figures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import orjson

from pipeline.common.errors import UserError
from pipeline.config.eval import TaskConfig
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.eval.scoring import Request, Scored, rolling

_PATTERNS = [
    (re.compile(r"/' [0-9]/"), r"/'[0-9]/"),  # as it is published: it matches nothing that a text has
    (re.compile(r"\(\s*([^\)]*?)\s*\)"), r"(\1)"),
    (re.compile(r"\[\s*([^\]]*?)\s*\]"), r"[\1]"),
    (re.compile(r"{\s*([^}]*?)\s*}"), r"{\1}"),
    (re.compile(r"\"\s*([^\"]*?)\s*\""), r'"\1"'),
    (re.compile(r"'\s*([^']*?)\s*'"), r"'\1'"),
]
_BEFORE = [(" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")] + [(f" {mark} ", f"{mark} ") for mark in ":;.!?,"]
_AFTER = [
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
]


def detokenized(text: str) -> str:
    """A text of WikiText without the spaces and marks of its tokenization.

    The replacements and their order are those of Megatron-LM's `wikitext_detokenizer`, which lm-evaluation-harness has
    too: with better ones the figures would be others.
    """
    text = text.replace("s '", "s'")
    contractions, *brackets = _PATTERNS
    text = contractions[0].sub(contractions[1], text)
    for old, new in _BEFORE:
        text = text.replace(old, new)
    for pattern, replacement in brackets:
        text = pattern.sub(replacement, text)
    for old, new in _AFTER:
        text = text.replace(old, new)
    return text


def articles(text: str) -> list[str]:
    """A file of WikiText cut before each title, as EleutherAI's `wikitext_document_level` has it."""
    found: list[str] = []
    lines: list[str] = []
    for line in text.split("\n"):
        title = line.replace("= = =", "===").replace("= =", "==").strip()
        if title.startswith("= ") and title.endswith(" ="):
            found.append("\n".join(lines))
            lines = []
        lines.append(line)
    found.append("\n".join(lines))
    return [article for article in found if article.strip()]


def read_pages(path: Path, *, documents: bool) -> list[str]:
    """The articles of a text file, or of one with a JSON object a line; all of it as one if not by `documents`.

    Raises:
        UserError: there is no such file, or it has no text.
    """
    text = read_text(path)
    if path.suffix == ".jsonl":
        found = [record_text(path, number, line, ("page", "text")) for number, line in numbered_lines(text)]
        pages = found if documents else ["\n".join(found)]
    else:
        pages = articles(text) if documents else [text]
    if not any(page.strip() for page in pages):
        raise UserError(f"{path} has no text")
    return pages


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
        UserError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise UserError(f"eval.tasks: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"eval.tasks: {path} is not UTF-8 text: {error}") from error


def numbered_lines(text: str) -> list[tuple[int, str]]:
    """Lines that have something on them, with their numbers from 1."""
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def record_text(path: Path, number: int, line: str, keys: Sequence[str]) -> str:
    """The text of a JSON object on a line, under the first of `keys` that it has.

    Raises:
        UserError: it has none.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path}:{number} is not JSON: {error}") from None
    for key in keys:
        if isinstance(record, dict) and isinstance(record.get(key), str):
            return str(record[key])
    raise UserError(f"{path}:{number} is not a JSON object with a text under {' or '.join(map(repr, keys))}")


def words_and_bytes(pages: Sequence[str], *, documents: bool) -> tuple[int, int]:
    """Words and bytes that the nats are divided by.

    Args:
        pages: of the file, before they are detokenized.
        documents: the words are what lies between white space, by page, as the harness counts them (a page that begins
            or ends with white space has an empty word there). Otherwise each line end is a word too, as the corpus' own
            counts have it (217,646 in its validation split), and so the word-level figures in papers.
    """
    size = sum(len(page.encode()) for page in pages)
    if documents:
        return sum(len(re.split(r"\s+", page)) for page in pages), size
    return sum(len(page.split()) + page.count("\n") for page in pages), size


def wikitext_requests(tokenizer: Tokenizer, task: TaskConfig, pages: Sequence[str], max_length: int) -> list[Request]:
    """Requests that score each token of each page once, the first after an end-of-document token.

    Args:
        tokenizer: of the model.
        task: its stride, and whether the text is detokenized.
        pages: of the file.
        max_length: of a window.

    Raises:
        UserError: the stride is longer than a window.
    """
    if task.stride is not None and task.stride > max_length:
        raise UserError(
            f"eval.tasks: {task.title} has stride {task.stride}, but a window has {max_length} tokens "
            "(eval.max_length, by default train.sequence_length); lower the stride"
        )
    requests: list[Request] = []
    for page in pages:
        tokens = tokenizer.encode(detokenized(page) if task.detokenize else page)
        requests += rolling(tokens, tokenizer.end_of_document, max_length, task.stride)
    return requests


def wikitext_figures(
    task: TaskConfig, pages: Sequence[str], requests: Sequence[Request], scored: Sequence[Scored]
) -> dict[str, float]:
    """Figures that people compare, from the scored requests of the pages of a file."""
    words, size = words_and_bytes(pages, documents=task.documents)
    nats = sum(each.nats for each in scored)
    return {
        "word_perplexity": _exp(nats / words),
        "byte_perplexity": _exp(nats / size),
        "bits_per_byte": nats / size / math.log(2),
        "nats": nats,
        "tokens": sum(request.scored for request in requests),
        "words": words,
        "bytes": size,
        "documents": len(pages),
    }


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # beyond it a float has no more to say
