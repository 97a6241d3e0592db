"""Secrets by their names, and addresses without the secrets in them.

One list for all that keeps or shows values: run files, the kept environment of a job, reports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PARTS = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|KEY_?FILE|NETRC|COOKIE|WEBHOOK"
)
"""Stand for a secret wherever they are in a name."""
_WORDS = frozenset({"KEY", "KEYS", "PASS", "PWD", "AUTH", "AUTHORIZATION", "PAT", "JWT", "BEARER", "SIGNATURE", "DSN"})
"""Stand for one as a word of a name: MONKEY and AUTHOR are none."""
_ENDS = ("PASS", "TOKENS")
_FOLDERS = frozenset({"PWD", "OLDPWD"})
"""The shell's working folders."""
_LAST_WORD = re.compile(r"(token|secret|password|api_?key)$", re.IGNORECASE)

_USER = re.compile(r"""://(?:[^\s/?#"<>]*@|[^\s/?#:@"<>]*:(?!\d*(?:[/?#\s"]|$))[^\s@"<>]*@)""")
"""User and password of an address; with a slash in it, too, which should be escaped there and often is not."""
_QUERY = re.compile(r"""(\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s?"<>]*)\?[^\s"<>]+""")
_CHANNEL = re.compile(r"""(://[^\s?#"<>]*?/t/)[^\s/?#"<>]+""")
"""conda has the token of a channel in its path: https://HOST/t/TOKEN/CHANNEL."""
_ADDRESS = re.compile(r"https?:/|hooks\.slack\.com", re.IGNORECASE)


def is_secret_variable(name: str) -> bool:
    """Tell whether a variable of the environment holds a secret, to judge by its name. In doubt it does."""
    name = name.upper()
    words = re.split(r"[^A-Z0-9]+", name)
    return name not in _FOLDERS and (
        _PARTS.search(name) is not None or any(word in _WORDS or word.endswith(_ENDS) for word in words)
    )


def is_secret_key(key: str) -> bool:
    """Tell whether the value of a key, which may be dotted, is secret."""
    return _LAST_WORD.search(key.rpartition(".")[2]) is not None


def masked(text: str) -> str:
    """Text whose addresses have lost what may be secret: `https://***@host/t/***/path?***`."""
    return _QUERY.sub(r"\1?***", _CHANNEL.sub(r"\1***", _USER.sub("://***@", text)))


def has_address(text: str) -> bool:
    """Tell whether an address of the web is in a text."""
    return _ADDRESS.search(text) is not None


def without_secrets(value: Any, key: str = "") -> Any:
    """A JSON value without what may be secret in it.

    Args:
        value: nested.
        key: its name; the value of a key that is named like a secret becomes `***`.
    """
    if is_secret_key(key) and value is not None:
        return "***"
    if isinstance(value, Mapping):
        return {str(name): without_secrets(below, str(name)) for name, below in value.items()}
    if isinstance(value, list):
        return [without_secrets(below) for below in value]
    return masked(value) if isinstance(value, str) else value
