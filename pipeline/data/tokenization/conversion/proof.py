"""Proof that a converted tokenizer gives the ids of the original program, on hard texts and on a text of the user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pipeline.common.console import byte_progress, progress
from pipeline.common.errors import UserError
from pipeline.common.storage import open_regular
from pipeline.data.tokenization.conversion.converted import Converted, Reference
from pipeline.data.tokenization.conversion.piece_file import shown
from pipeline.data.tokenization.definition import is_panic
from pipeline.data.tokenization.hard_texts import hard_texts
from pipeline.data.tokenization.tokenizer import Tokenizer

_BATCH = 256
_LINE_BYTES = 2**16
"""A longer line is cut: of a text without an end, each part is compared for itself."""
_LINES_BYTES = 2**18
"""Lines that are also compared as one text."""


@dataclass
class ComparedTexts:
    """Texts that were compared.

    Attributes:
        texts: all of them.
        differing: those with other ids.
    """

    texts: int = 0
    differing: int = 0


@dataclass
class ConversionProof:
    """Result of a comparison.

    Attributes:
        reference: name of the original program.
        hard: hard texts and entries of the vocabulary.
        lines: lines of the user's text, and groups of them that differ as one text only.
        size: bytes of the user's text.
        first: the first text that differs, in words.
    """

    reference: str
    hard: ComparedTexts
    lines: ComparedTexts
    size: int = 0
    first: str = ""

    @property
    def differing(self) -> int:
        """Number of texts that differ."""
        return self.hard.differing + self.lines.differing

    @property
    def counts(self) -> str:
        """Beginning of a sentence about the texts that differ."""
        text = f"{self.hard.differing:,} of {self.hard.texts:,} hard texts"
        if self.lines.texts:
            text += f" and {self.lines.differing:,} of {self.lines.texts:,} lines ({self.size / 1e6:,.1f} MB)"
        return text


def prove(
    converted: Converted, reference: Reference, tokenizer: Tokenizer, text: Path | None, console: Console
) -> ConversionProof:
    """Compare a converted tokenizer with the original program.

    Args:
        converted: what was converted.
        reference: the original program.
        tokenizer: it, opened as runs open it.
        text: file of text in UTF-8 to compare line by line, and as blocks of lines.
        console: for the progress bar.

    Raises:
        UserError: the original program fails, or the file cannot be read.
    """
    proof = ConversionProof(reference.name, ComparedTexts(), ComparedTexts())
    pieces = [form for piece in converted.pieces for form in (piece, f"a {piece}{piece}")]
    own = list(dict.fromkeys([*hard_texts(tokenizer, long=True), *converted.hard, *pieces]))
    with progress(console, "comparing hard texts", len(own)) as advance:
        for first in range(0, len(own), _BATCH):
            batch = own[first : first + _BATCH]
            _compare(reference, tokenizer, batch, proof, proof.hard)
            advance(len(batch))
    if text is not None:
        with (
            open_regular(text) as file,
            byte_progress(console, f"comparing {text.name}", text.stat().st_size) as advance,
        ):
            for lines, size in _line_groups(iter(lambda: file.readline(_LINE_BYTES), b""), text):
                # A group of lines that differs as one text, but in no line, counts once.
                if not _compare(reference, tokenizer, lines, proof, proof.lines):
                    _compare(reference, tokenizer, ["".join(lines)], proof, proof.lines)
                proof.size += size
                advance(size)
    return proof


def _line_groups(lines: Iterable[bytes], file: Path) -> Iterator[tuple[list[str], int]]:
    group: list[str] = []
    size = at = 0
    kept = b""
    for read in lines:
        line = kept + read
        end = len(line) if line.endswith(b"\n") else _whole_characters(line)
        kept = line[end:]
        try:
            group.append(line[:end].decode())
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8 at byte {at + error.start:,}; give --text another file") from None
        size, at = size + end, at + end
        if size >= _LINES_BYTES:
            yield group, size
            group, size = [], 0
    if kept:
        raise UserError(f"{file} ends in the middle of a character; give --text another file")
    if group:
        yield group, size


def _whole_characters(line: bytes) -> int:
    """Bytes of a line that was cut, up to its last whole character."""
    for back in range(1, min(4, len(line)) + 1):
        byte = line[-back]
        if byte < 0x80:
            return len(line)
        if byte >= 0xC0:
            needs = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(line) if back >= needs else len(line) - back
    return len(line)


def _compare(
    reference: Reference, tokenizer: Tokenizer, texts: list[str], proof: ConversionProof, counts: ComparedTexts
) -> int:
    """Compare some texts; returns how many differ."""
    try:
        expected = reference.encode(texts)
    except BaseException as error:
        if is_panic(error) or isinstance(error, ValueError | RuntimeError):
            raise UserError(
                f"{reference.name} fails on a hard text: {error}; use --unproven to go without it"
            ) from None
        raise
    differing = 0
    for text, ids, found in zip(texts, expected, tokenizer.encode_batch(texts), strict=True):
        counts.texts += 1
        if ids != (own := found.tolist()):
            differing += 1
            proof.first = proof.first or _difference(text, ids, own, tokenizer)
    counts.differing += differing
    return differing


def _difference(text: str, expected: list[int], found: list[int], tokenizer: Tokenizer) -> str:
    at = next((i for i, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]), -1)
    at = min(len(expected), len(found)) if at < 0 else at
    before = tokenizer.decode(found[:at])
    near = text[max(0, len(before) - 20) : len(before) + 20]
    return f"in {shown(near)} token {at} is {expected[at : at + 4]} there and {found[at : at + 4]} here"
