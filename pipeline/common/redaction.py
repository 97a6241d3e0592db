"""Secrets, by their names and by their values: the one place that judges what may be kept and shown.

`masked` is for texts on their way into logs, reports, records and notices. Where a secret may lie, the text loses
more than needed: each query of an address. `secret_in` is for refusals, and names only what is a secret without much
doubt. Both take time linear in the text, also in one that was made to be slow.
"""

from __future__ import annotations

import io
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

_PARTS = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|PASS_?FILE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIV(?:ATE)?_?KEY|ACCOUNT_?KEY"
    r"|KEY_?FILE|NETRC|COOKIE|WEBHOOK|CONNECTION_?STR|SESSION_?ID"
)
"""Stand for a secret wherever they are in the name of a variable."""
_WORDS = frozenset(
    {"KEY", "KEYS", "PASS", "PWD", "AUTH", "AUTHORIZATION", "PAT", "JWT", "BEARER", "SIGNATURE", "SIG", "SAS", "DSN"}
)
"""Stand for one as a word of a name: MONKEY and AUTHOR are none."""
_ENDS = ("PASS", "TOKENS")
_FOLDERS = frozenset({"PWD", "OLDPWD"})
"""The shell's working folders."""

_STRONG = re.compile(
    r"PASSW|PASSPHRASE|SECRET|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIV(?:ATE)?_?KEY|ACCOUNT_?KEY|WEBHOOK|CONNECTION_?STR"
    r"|COOKIE|SESSION_?(?:ID|KEY)|(?:ACCESS|AUTH|REFRESH|SECURITY|BEARER|API|ID|HF|WRITE|READ)_?TOKEN"
    r"|SIGNATURE|AUTHORIZATION|(?:^|_)(?:PWD|PASS)$"
)
"""Parts of the name of a key whose value is secret, however it looks."""
_WEAK = re.compile(r"TOKEN$|(?:^|_)(?:KEYS?|AUTH|SIG|SAS|PAT|JWT|BEARER|DSN|CODE|SESSION|STATE)$")
"""Ends of names of keys whose value is secret if it looks random."""
_SPECIAL = re.compile(r"(?:MASK|START|END|STOP|EOS|BOS|EOD|PAD|UNK|SEP|CLS|SPECIAL|SENTINEL|FIRST|LAST|NEXT)_TOKEN$")
"""Tokens of tokenizers."""
_LAST_WORD = re.compile(
    r"(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|(?:API|ACCESS|PRIVATE|ACCOUNT)_?KEY|CREDENTIALS?|WEBHOOK|CONNECTION_STRING"
    r"|COOKIE|SESSION_ID|AUTHORIZATION)$"
)
_PLAIN = frozenset({"mask", "keep", "none", "null", "true", "false", "set", "unset", "missing", "***"})
"""Values of keys like `secret` that hide nothing."""

SERVICE_TOKENS = (
    ("AKIA", r"AKIA[A-Z0-9]{16}"),
    ("ASIA", r"ASIA[A-Z0-9]{16}"),
    *((f"gh{kind}_", rf"gh{kind}_[A-Za-z0-9]{{36,255}}") for kind in "pousr"),
    ("github_pat_", r"github_pat_[A-Za-z0-9_]{36,255}"),
    ("glpat-", r"glpat-[A-Za-z0-9_\-]{20,255}"),
    ("xox", r"xox[abeoprs]-[A-Za-z0-9\-]{10,255}"),
    ("xapp-", r"xapp-[A-Za-z0-9\-]{20,255}"),
    ("hooks.slack.com/", r"hooks\.slack\.com/services/T[A-Z0-9]{6,16}/B[A-Z0-9]{6,16}/[A-Za-z0-9]{16,40}"),
    ("sk_", r"sk_(?:live|test)_[A-Za-z0-9]{16,255}"),
    ("rk_", r"rk_(?:live|test)_[A-Za-z0-9]{16,255}"),
    ("whsec_", r"whsec_[A-Za-z0-9]{24,255}"),
    ("AIza", r"AIza[A-Za-z0-9_\-]{35}"),
    ("sk-", r"sk-[A-Za-z0-9_\-]{32,255}"),
    ("hf_", r"hf_[A-Za-z0-9]{30,64}"),
    ("eyJ", r"eyJ[A-Za-z0-9_\-]{10,4096}\.eyJ[A-Za-z0-9_\-]{10,8192}\.[A-Za-z0-9_\-]{10,2048}"),
)  # fmt: skip
"""Tokens of well-known services: how each begins, and its pattern. They decide what the curation of documents masks
(`clean.pii.secret`), whose version rises with them."""

_MORE_TOKENS = (
    ("sk-", r"sk-(?:ant|proj|svcacct|or)-[A-Za-z0-9_\-]{16,255}"),
    ("gl", r"gl(?:rt|dt|ptt|cbt|ft|oas|soat|imt|agent)-[A-Za-z0-9_\-]{16,255}"),
    ("api_org_", r"api_org_[A-Za-z0-9]{30,64}"),
    ("npm_", r"npm_[A-Za-z0-9]{30,64}"),
    ("pypi-", r"pypi-AgE[A-Za-z0-9_\-]{16,255}"),
    ("dckr_", r"dckr_[a-z]{3,4}_[A-Za-z0-9_\-]{16,255}"),
    ("do", r"do[opr]_v1_[a-f0-9]{32,64}"),
    ("dapi", r"dapi[a-f0-9]{32}(?:-[0-9])?"),
    ("SG.", r"SG\.[A-Za-z0-9_\-]{16,64}\.[A-Za-z0-9_\-]{16,64}"),
    ("shp", r"shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}"),
    ("ya29.", r"ya29\.[A-Za-z0-9_\-]{20,512}"),
    ("GOCSPX-", r"GOCSPX-[A-Za-z0-9_\-]{20,64}"),
    ("hv", r"hv[sbr]\.[A-Za-z0-9_\-]{20,255}"),
    ("AGE-SECRET-KEY-", r"AGE-SECRET-KEY-1[A-Z0-9]{40,64}"),
    ("gsk_", r"gsk_[A-Za-z0-9]{40,64}"),
    ("r8_", r"r8_[A-Za-z0-9]{30,64}"),
    ("nvapi-", r"nvapi-[A-Za-z0-9_\-]{40,128}"),
    ("xai-", r"xai-[A-Za-z0-9]{40,128}"),
    ("pplx-", r"pplx-[A-Za-z0-9]{40,64}"),
    ("lin_api_", r"lin_api_[A-Za-z0-9]{32,64}"),
    ("wandb_v1_", r"wandb_v1_[A-Za-z0-9_]{32,128}"),
    ("tskey-", r"tskey-[a-z]{2,10}-[A-Za-z0-9\-]{16,128}"),
    ("ATATT3", r"ATATT3[A-Za-z0-9_\-=]{40,255}"),
    ("NRAK-", r"NRAK-[A-Z0-9]{27}"),
    ("figd_", r"figd_[A-Za-z0-9_\-]{32,64}"),
    ("PMAK-", r"PMAK-[a-f0-9]{24}-[a-f0-9]{34}"),
    (":AA", r"[0-9]{8,10}:AA[A-Za-z0-9_\-]{32,34}"),
)  # fmt: skip
"""Further ones, which `masked` knows."""
_MIXED = [re.compile(pattern) for pattern in ("[a-z]", "[A-Z]", "[0-9]")]

_USER = re.compile(r"""://(?:[^\s/?#"<>]{0,2048}@|[^\s/?#:@"<>]{0,256}:(?!\d{0,9}(?:[/?#\s"]|$))[^\s@"<>]{0,2048}@)""")
"""User and password of an address; with a slash in it, too, which should be escaped there and often is not."""
_PASSWORD = re.compile(
    r"""://(?:[^\s/?#:@"<>]{0,256}:(?!\*\*\*@)(?!\d{0,9}(?:[/?#\s"]|$))[^\s@"<>]{1,2048}|[A-Za-z0-9_\-]{20,255})@"""
)
"""A user with a password, or a token in the place of the user."""
_DRIVER = re.compile(r"(\b\w{1,64}:)[^\s@/\"']{1,255}(?=@(?:tcp|udp|unix)\()")
"""Password of the data source of a driver: `user:password@tcp(host:3306)/name`."""
_QUERY = re.compile(r"""(\b[a-zA-Z][a-zA-Z0-9+.-]{0,31}://[^\s?"<>]{0,1024})\?[^\s"<>]+""")
_CHANNEL = re.compile(r"""(://[^\s?#"<>]{0,256}?/t/)[^\s/?#"<>]+""")
"""conda has the token of a channel in its path: https://HOST/t/TOKEN/CHANNEL."""
_WEBHOOK = re.compile(
    r"""(hooks\.slack\.com/(?:services|workflows|triggers)/|/webhook(?:s|b2)?/|api\.telegram\.org/bot)[^\s?#"'<>]+""",
    re.IGNORECASE,
)
"""Paths of webhooks: whoever has one may send."""
_PRIVATE_KEY = re.compile(
    r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----.*?"
    r"(?:-----END (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)
_SCHEME = re.compile(
    r"\b((?:Bearer|Basic|Digest)\s{1,3})(?=[A-Za-z._~+/\-]*[0-9=])[A-Za-z0-9._~+/=\-]{8,}", re.IGNORECASE
)
_HEADER = re.compile(
    r"""(\b(?:(?:Proxy-)?Authorization|(?:Set-)?Cookie)["']?\s{0,2}:\s{0,2}["']?)(?!\*\*\*)[^\s"'][^"'\r\n]*""",
    re.IGNORECASE,
)
_OPTION = re.compile(
    r"(--[A-Za-z\-]{0,32}(?:password|passwd|token|secret|api-key|access-key)\s{1,2})(?![-<$*\[])[^\s\"']{4,}",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"(\blogin\s{1,4}\S{1,255}\s{1,4}password\s{1,4})\S+")
"""A line of `.netrc`."""
_ADDRESS = re.compile(r"https?:/|hooks\.slack\.com", re.IGNORECASE)

_SEPARATOR = re.compile("[=:]")
_NAME = re.compile(r"""([A-Za-z][A-Za-z0-9_.\-]*)(?:\\?["'])?\]?\s{0,2}\Z""")
_NAME_CHARACTERS = 64
_VALUE = re.compile(r"""\s{0,2}(?:\\?"([^"\\\n]{1,256})|'([^'\n]{1,256})|([^\s"'&;,<>(){}\[\]\\]{1,64}))""")
_REST = [re.compile(pattern) for pattern in (r"""[^"\\\n]*""", r"""[^'\n]*""", r"""[^\s"'&;,<>(){}\[\]\\]*""")]
"""The rest of a longer value. Its beginning decides what it is: no text is read again for each name in it."""
_NOTHING = ("$", "%(", "{", "/", "./", "~/", "***")
"""Beginnings of values that are variables, templates and paths."""
_VALUE_ENDS = re.compile(r"""\s*(?:[",;'}\]\\]|$)""", re.MULTILINE)
_RANDOM_RUN = re.compile(r"(?=[A-Za-z]{0,15}[0-9])(?=[0-9]{0,15}[A-Za-z])[A-Za-z0-9]{16}")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\Z")
_RANDOM_CHARACTERS, _RANDOM_BITS = 20, 4.0
"""Fewest characters, and bits per character, of a text that is random though it has other signs in it."""


def is_secret_variable(name: str) -> bool:
    """Tell whether a variable of the environment holds a secret, to judge by its name. In doubt it does."""
    name = name.upper()
    words = re.split(r"[^A-Z0-9]+", name)
    return name not in _FOLDERS and (
        _PARTS.search(name) is not None or any(word in _WORDS or word.endswith(_ENDS) for word in words)
    )


def is_secret_key(key: str) -> bool:
    """Tell whether the value of a key, which may be dotted, is secret. Tokens of a tokenizer (`mask_token`) are not."""
    name = key.rpartition(".")[2].replace("-", "_").upper()
    return _LAST_WORD.search(name) is not None and _SPECIAL.search(name) is None


def _masked_tokens(text: str) -> str:
    for needle, pattern in (*SERVICE_TOKENS, *_MORE_TOKENS):
        if needle in text:  # few texts have one: a pattern is compiled when it is needed, and kept by `re`
            text = re.sub(rf"(?<![A-Za-z0-9])(?:{pattern})(?![A-Za-z0-9_\-])", _masked_token, text)
    return text


def _masked_token(found: re.Match[str]) -> str:
    token = found[0]
    # Names of packages and models begin with sk-, too.
    plain = token.startswith("sk-") and not (
        all(each.search(token) for each in _MIXED) or re.match(r"sk-(?:ant|proj|svcacct|or)-", token)
    )
    return token if plain else "***"


def _masked_values(text: str, *, sure: bool = False) -> str:
    """Text without the values of names like `password=`, `"api_key": "..."` or `&sig=`.

    Args:
        text: any.
        sure: only values that look random.
    """
    pieces, done = [], 0
    for found in _SEPARATOR.finditer(text):
        at = found.start()
        if at < done or (name := _NAME.search(text, max(done, at - _NAME_CHARACTERS), at)) is None:
            continue
        value = _VALUE.match(text, found.end())
        if value is None or not _is_secret_value(name[1], value, found[0], sure):
            continue
        pieces += [text[done : value.start(value.lastindex or 0)], "***"]
        rest = _REST[(value.lastindex or 1) - 1].match(text, value.end())
        done = rest.end() if rest is not None else value.end()
    return "".join([*pieces, text[done:]]) if pieces else text


def _is_secret_value(name: str, found: re.Match[str], separator: str, sure: bool) -> bool:
    name, value = name.rpartition(".")[2].replace("-", "_").upper(), found[found.lastindex or 0]
    if _SPECIAL.search(name) or value.startswith(_NOTHING) or value.lower() in _PLAIN:
        return False
    strong = _STRONG.search(name) is not None
    if not strong and not _WEAK.search(name):
        return False
    if _is_random(value):
        return True
    if not strong or sure or len(value) < 4:
        return False
    # `password: hunter2` is a setting, "password: set it in the shell" a sentence.
    return separator == "=" or found.lastindex != 3 or _VALUE_ENDS.match(found.string, found.end()) is not None


def _is_random(value: str) -> bool:
    """Tell whether a value looks like one that a machine has drawn: hashes do as well."""
    if "://" in value:
        return False
    if _RANDOM_RUN.search(value) or _UUID.match(value):
        return True
    if len(value) < _RANDOM_CHARACTERS or not all(each.search(value) for each in _MIXED) or " " in value:
        return False
    counts = Counter(value).values()
    return -sum(n / len(value) * math.log2(n / len(value)) for n in counts) >= _RANDOM_BITS


_SURE: dict[str, tuple[tuple[str, ...], Callable[[str], str]]] = {
    "a private key": (("private key",), partial(_PRIVATE_KEY.sub, "***")),
    "the path of a webhook": (("webhook", "hooks.slack.com", "telegram"), partial(_WEBHOOK.sub, r"\1***")),
    "a token of a service": (("",), _masked_tokens),
    "a password in an address": (("://",), partial(_PASSWORD.sub, "://***@")),
    "a password in a data source": (("@tcp(", "@udp(", "@unix("), partial(_DRIVER.sub, r"\1***")),
}
"""Kinds of secret: texts of which one is in a text that has the secret, in small letters, and what masks the secret."""
_IN_DOUBT: tuple[tuple[tuple[str, ...], Callable[[str], str]], ...] = (
    (("://",), partial(_USER.sub, "://***@")),
    (("://",), partial(_CHANNEL.sub, r"\1***")),
    (("://",), partial(_QUERY.sub, r"\1?***")),
    (("--",), partial(_OPTION.sub, r"\1***")),
    (("login",), partial(_LOGIN.sub, r"\1***")),
    (("authorization", "cookie"), partial(_HEADER.sub, r"\1***")),
    (("bearer", "basic", "digest"), partial(_SCHEME.sub, r"\1***")),
    (("=", ":"), _masked_values),
)
"""As `_SURE`, for texts that may be harmless as well."""


def masked(text: str) -> str:
    """Text without what may be secret: `https://***@host/t/***/path?***`, `password=***`, `***` for a known token."""
    small = text.lower()
    for needles, mask in (*_SURE.values(), *_IN_DOUBT):
        if any(needle in small for needle in needles):
            text = mask(text)
    return text


def secret_in(text: str) -> str | None:
    """The kind of secret that a text has without much doubt, in words: `a token of a service`; None without one."""
    for what, (_, mask) in _SURE.items():
        if mask(text) != text:
            return what
    return "the value of a key or password" if _masked_values(text, sure=True) != text else None


def has_address(text: str) -> bool:
    """Tell whether an address of the web is in a text."""
    return _ADDRESS.search(text) is not None


def without_secrets(value: Any, key: str = "") -> Any:
    """A JSON value without what may be secret in it.

    Args:
        value: nested.
        key: its name; the value of a key that is named like a secret becomes `***`.
    """
    if is_secret_key(key) and value is not None and not (isinstance(value, str) and value in _PLAIN):
        return "***"
    if isinstance(value, Mapping):
        return {str(name): without_secrets(below, str(name)) for name, below in value.items()}
    if isinstance(value, list):
        return [without_secrets(below) for below in value]
    return masked(value) if isinstance(value, str) else value


class _MaskedStream(io.TextIOWrapper):
    """Standard output or error output whose texts are `masked`, those of other libraries and of tracebacks too."""

    def write(self, text: str) -> int:
        super().write(masked(text))
        return len(text)


def mask_streams(*names: str) -> None:
    """Let standard streams, `stdout` and `stderr`, mask what Python writes to them from now on."""
    for name in names:
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            stream.flush()
            masking = _MaskedStream(
                stream.buffer,
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, masking)
