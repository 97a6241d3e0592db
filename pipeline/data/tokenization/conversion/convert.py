"""`pipeline convert tokenizer`: a `tokenizer.json` of the tokenizer of another library, with the same ids."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
from rich.console import Console

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.tokenization.conversion.converted import Converted
from pipeline.data.tokenization.conversion.from_bytes import (
    from_gpt2,
    from_tekken,
    from_tiktoken,
    is_tiktoken,
    read_json,
)
from pipeline.data.tokenization.conversion.from_pieces import from_pieces
from pipeline.data.tokenization.conversion.proof import ConversionProof, prove
from pipeline.data.tokenization.definition import MAX_FILE_BYTES
from pipeline.data.tokenization.tokenizer import TOKENIZER_FILE, Tokenizer

_MERGES = "merges.txt"


def convert_tokenizer(
    source: Path,
    to: Path,
    *,
    merges: Path | None = None,
    pattern: str | None = None,
    special: Mapping[str, int] | None = None,
    end_of_document: str | None = None,
    text: Path | None = None,
    allow: int = 0,
    unproven: bool = False,
    console: Console,
) -> str:
    """Convert a tokenizer, and compare its ids with those of the original program; says what it wrote.

    Args:
        source: `.model`, `.tiktoken`, `tekken.json` or `vocab.json`.
        to: the `tokenizer.json` that is made, or a folder that gets one.
        merges: of a `vocab.json`; by default the merges.txt beside it.
        pattern: regex of a tiktoken vocabulary, or a name of one.
        special: special tokens of a tiktoken vocabulary, with their ids.
        end_of_document: token; by default the one that the format names.
        text: file of text to compare, too.
        allow: number of texts whose ids may differ.
        unproven: write it without a comparison.
        console: for the progress bar.

    Raises:
        UserError: it cannot be converted, some ids differ, or the original program is not installed.
        MachineError: `to` cannot be written.
    """
    to = to / TOKENIZER_FILE if to.is_dir() else to
    if to.exists():
        raise UserError(f"{to} exists; give another name, or remove it first")
    if not to.parent.is_dir():
        raise UserError(f"the folder {to.parent} does not exist; make it first")
    if text is not None and unproven:
        raise UserError(
            "--text is compared with the original program, and --unproven leaves that out; give one of them"
        )
    converted = _read(source, merges, pattern, special or {})
    # What is missing is said before anything takes time.
    reference = None if unproven else converted.open_reference()
    if text is not None:
        storage.open_regular(text).close()
    token = _end(converted, source, end_of_document)
    data = orjson.dumps(converted.state, option=orjson.OPT_INDENT_2)
    with TemporaryDirectory() as folder:
        file = Path(folder) / TOKENIZER_FILE
        file.write_bytes(data)
        try:
            tokenizer = Tokenizer.load(file, TokenizerConfig(path=file, end_of_document=token))
        except UserError as error:
            raise UserError(f"{source} is not converted: {str(error).replace(str(file), str(to))}") from None
    proof = None if reference is None else prove(converted, reference, tokenizer, text, console)
    if proof is not None:
        _check(converted, proof, allow, source)
    storage.put(to, data)
    return _report(converted, tokenizer, proof, to)


def _read(source: Path, merges: Path | None, pattern: str | None, special: Mapping[str, int]) -> Converted:
    if source.is_dir():
        raise UserError(f"{source} is a folder; give the file of the tokenizer in it")
    data = storage.read_bytes(source, MAX_FILE_BYTES)
    is_json = data[:100].lstrip()[:1] == b"{"
    ranked = not is_json and is_tiktoken(data)
    for name, value in {"--pattern": pattern, "--special": special}.items():
        if value and not ranked:
            raise UserError(f"{name} is for files of tiktoken's ranks; {source} is another kind, which says it itself")
    if ranked:
        return from_tiktoken(data, source, pattern, special)
    value = read_json(data, source) if is_json else {}
    is_tekken = isinstance(value.get("config"), dict)
    if merges is not None and (not value or is_tekken):
        raise UserError(f"--merges goes with a vocab.json; {source} is of another kind")
    if not is_json:
        return from_pieces(data, source)
    if isinstance(value.get("model"), dict):
        raise UserError(f"{source} is a tokenizer.json already: name it as tokenizer.path of the run file")
    if is_tekken:
        return from_tekken(value, source)
    merges = merges or source.with_name(_MERGES)
    if not merges.is_file():
        raise UserError(f"{source} needs its merges, and {merges} does not exist; give --merges")
    return from_gpt2(value, source, storage.read_bytes(merges, MAX_FILE_BYTES), merges)


def _end(converted: Converted, source: Path, given: str | None) -> str:
    special = [each["content"] for each in converted.state["added_tokens"] if each["special"]]
    token = given or converted.end
    if token is None or token not in special:
        near = difflib.get_close_matches(token or "", special, n=3) or special[:5]
        about = f"has no special token {token!r}" if token else "names no token that ends a document"
        raise UserError(
            f"{source} {about}; give --end-of-document" + (f", like {' or '.join(map(repr, near))}" if near else "")
        )
    return token


def _check(converted: Converted, proof: ConversionProof, allow: int, source: Path) -> None:
    reasons = "".join(f"; {doubt}" for doubt in converted.doubts)
    if proof.differing > allow:
        raise UserError(
            f"{source} is not converted: {proof.counts} get other ids than by {proof.reference}; {proof.first}{reasons}"
            f"; --allow {proof.differing} takes them as they are"
        )
    if converted.doubts and not allow:
        raise UserError(
            f"{source} is not converted: {proof.counts} differ, but others may{reasons}; --allow 1 takes that as it is"
        )


def _report(converted: Converted, tokenizer: Tokenizer, proof: ConversionProof | None, to: Path) -> str:
    lines = [
        f"wrote {to}: {converted.format}, {tokenizer.vocab_size:,} ids, {len(tokenizer.added_tokens):,} added tokens, "
        f"end of document {tokenizer.end_of_document_token} ({tokenizer.end_of_document})"
    ]
    if proof is None:
        lines.append("Nothing was compared: that the ids are the same is not proven.")
    else:
        lines.append(f"Compared with {proof.reference}: {proof.counts} differ.")
        if proof.differing:
            lines.append(f"The first that differs: {proof.first}.")
    lines += [f"Not exact: {doubt}." for doubt in converted.doubts] + [f"Note: {note}." for note in converted.notes]
    token = orjson.dumps(tokenizer.end_of_document_token).decode()
    return "\n".join([*lines, "For the run file:", f"tokenizer: {{path: {to}, end_of_document: {token}}}"])
