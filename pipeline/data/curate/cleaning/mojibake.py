"""Repair of text that was decoded by the wrong encoding, with ftfy.

Of what ftfy can do only the repair of encodings is used: sequences like `â€™` are damage that nobody wrote. HTML
entities, curly quotes, ligatures, wide characters and control characters may be meant, in code or in other scripts, so
they stay.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

from pipeline.common.errors import UserError, install_extra
from pipeline.data.sources.foreign_parser import parsing

_VERSION = 1
_SEGMENT = 10**6
"""Characters of a line that are repaired together: the effort grows faster than the length."""


def mojibake_settings() -> dict[str, Any]:
    """Settings that the repaired text depends on, as JSON.

    Raises:
        UserError: ftfy is missing.
    """
    try:
        return {"version": _VERSION, "ftfy": metadata.version("ftfy")}
    except metadata.PackageNotFoundError:
        raise UserError(f"data.curate.clean.mojibake needs ftfy: {install_extra('curate')}") from None


def open_mojibake() -> Callable[[str], str]:
    """The function that repairs a text. Texts and lines of ASCII alone are left as they are, without asking ftfy.

    Raises:
        UserError: ftfy is missing.
    """
    mojibake_settings()
    import ftfy

    config = ftfy.TextFixerConfig(
        unescape_html=False,
        remove_terminal_escapes=False,
        fix_latin_ligatures=False,
        fix_character_width=False,
        uncurl_quotes=False,
        fix_line_breaks=False,
        fix_surrogates=False,
        remove_control_chars=False,
        normalization=None,
        explain=False,
    )

    def repair(line: str) -> str:
        # Each line is repaired alone: another one, in good order, would hide what is wrong with it.
        if line.isascii():
            return line
        pieces = [line[start : start + _SEGMENT] for start in range(0, len(line), _SEGMENT)]
        fixed = "".join([ftfy.fix_encoding(piece, config) for piece in pieces])
        return fixed if _is_text(fixed) else line

    def repair_text(text: str) -> str:
        if text.isascii():
            return text
        with parsing("ftfy"):
            return "\n".join([repair(line) for line in text.split("\n")])

    return repair_text


def _is_text(line: str) -> bool:
    """Tell whether it is one line that UTF-8 has: bytes of CESU-8 may be halves of characters."""
    try:
        line.encode()
    except UnicodeEncodeError:
        return False
    return "\n" not in line
