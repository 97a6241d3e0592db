"""Chat templates and the tokens that they name, as the files of a tokenizer have them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from pipeline.common import storage
from pipeline.common.errors import UserError

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
MOST_BYTES = 2**20
"""Bytes of a template, or of `tokenizer_config.json`."""
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Variables of templates that are texts of tokens."""
_MOST_TOKENIZER = 2**28


def read_template(path: Path, key: str) -> str:
    """The text of a template.

    Args:
        path: of the file.
        key: of the run file that names it, for messages.

    Raises:
        UserError: it is missing, too large, or not UTF-8.
    """
    try:
        return storage.read_bytes(path, MOST_BYTES).decode()
    except FileNotFoundError:
        raise UserError(f"{key}: {path} does not exist; give a file with a chat template, or `tokenizer`") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {path} cannot be read as a chat template: {error}") from None


def has_template(folder: Path) -> bool:
    """True if the files of a tokenizer have a chat template."""
    return (folder / TEMPLATE_FILE).is_file() or bool(_tokenizer_config(folder).get("chat_template"))


def template_of_tokenizer(folder: Path, key: str) -> str:
    """The template in the folder of a tokenizer.

    Raises:
        UserError: there is none, or several without a default.
    """
    if (folder / TEMPLATE_FILE).is_file():
        return read_template(folder / TEMPLATE_FILE, key)
    found = _tokenizer_config(folder).get("chat_template")
    if isinstance(found, list):  # several, with names
        named = [each.get("template") for each in found if isinstance(each, dict) and each.get("name") == "default"]
        found = named[0] if named else None
    if not isinstance(found, str):
        raise UserError(
            f"{key}: {folder} has no chat template, neither {TEMPLATE_FILE} nor chat_template in {TOKENIZER_CONFIG}; "
            "give a file"
        )
    return found


def tokens_of_tokenizer(folder: Path) -> dict[str, str]:
    """Texts of tokens that templates name, by `tokenizer_config.json`; none without that file."""
    config = _tokenizer_config(folder)
    found = {}
    for name in TOKEN_NAMES:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


def added_tokens_of(file: Path) -> dict[str, bool]:
    """Texts of the added tokens of a `tokenizer.json`, and whether they are special; none where it cannot be read."""
    try:
        status = file.stat()
        return _added_tokens(file, status.st_size, status.st_mtime_ns)
    except OSError:
        return {}


def turn_marks(template: str, added: Mapping[str, bool]) -> frozenset[str]:
    """Added tokens that a template names though they are not special, such as the marks of turns of some tokenizers.

    A user who writes one forges a turn. Answers may have them: a thought begins and ends with some.
    """
    return frozenset(token for token, special in added.items() if not special and token.strip() and token in template)


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Pattern that finds each of some texts, of several at a place the longest."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


@lru_cache(maxsize=4)
def _added_tokens(file: Path, size: int, mtime_ns: int) -> dict[str, bool]:
    try:
        value = orjson.loads(storage.read_bytes(file, _MOST_TOKENIZER))
        return {each["content"]: bool(each.get("special")) for each in value["added_tokens"] if each["content"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # whoever opens the tokenizer says what is wrong


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / TOKENIZER_CONFIG
    try:
        value = orjson.loads(storage.read_bytes(path, MOST_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return value if isinstance(value, dict) else {}
