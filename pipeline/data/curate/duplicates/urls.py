"""Addresses as `duplicates.url` compares them."""

from __future__ import annotations

import re

URL_VERSION = 1
_PARTS = re.compile(
    r"(?:([a-z][a-z0-9+.-]*):)?(?://)?([^/?#]*)([^?#]*)(?:\?([^#]*))?", re.ASCII | re.DOTALL | re.IGNORECASE
)
_PERCENT = re.compile(r"%([0-9a-fA-F]{2})")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_TRACKING = re.compile(r"(utm_\w+|gclid|fbclid|msclkid|dclid|yclid|mc_[ce]id|igshid|_ga)(=|$)", re.ASCII)
_PORTS = {"http": ":80", "https": ":443"}


def normalize_url(url: str) -> str:
    """Address without what mostly does not change the page.

    Without scheme, `www.`, usual port, user, fragment, tracking parameters and a slash at the end; the host in lower
    case, needless percent encodings decoded, parameters in their order. Empty if there is no host.
    """
    match = _PARTS.match(url.strip())
    if match is None:
        return ""
    scheme, host, path, query = (part or "" for part in match.groups())
    host = host.rpartition("@")[2].lower().rstrip(".")
    port = _PORTS.get(scheme.lower(), "")
    if port and host.endswith(port):
        host = host[: -len(port)]
    host = host.removeprefix("www.").rstrip(".")
    if not host:
        return ""
    kept = [each for each in query.split("&") if each and not _TRACKING.match(each)]
    address = host + _plain(path).rstrip("/")
    return f"{address}?{_plain('&'.join(kept))}" if kept else address


def _plain(text: str) -> str:
    return _PERCENT.sub(_decoded, text)


def _decoded(match: re.Match[str]) -> str:
    character = chr(int(match[1], 16))
    return character if character in _UNRESERVED else match[0].upper()
