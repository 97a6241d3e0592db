"""The page that `pipeline serve` shows to a browser, and the headers that keep it to itself."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files


@cache
def page() -> tuple[str, dict[str, str]]:
    """The page and the headers to send it with.

    The content security policy allows the page's own script and style by their hashes, and requests to this server;
    nothing else runs or is fetched. `trusted-types 'none'` forbids what would read text as HTML: the page shows what a
    model writes, and a model can write `<script>`.

    Returns:
        HTML without references to anything outside of it, and headers by name.
    """
    # Hashed and sent are the same line ends, whatever a checkout made of them.
    html = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return html, sealing(html)


def sealing(html: str, *more: str) -> dict[str, str]:
    """Headers to send a page with that has its own script and style inside.

    Args:
        html: the page.
        more: further directives of the policy.
    """
    policy = (
        "default-src 'none'",
        f"script-src {_sources(html, 'script')}",
        f"style-src {_sources(html, 'style')}",
        "img-src data:",  # the empty icon, which saves a request for /favicon.ico
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
        *more,
    )
    return {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",  # a server of another version may be next on this port
    }


def _sources(html: str, element: str) -> str:
    """Sources of the policy for the inline elements of a kind: the SHA-256 of each."""
    inside = re.findall(rf"<{element}>(.*?)</{element}>", html, flags=re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in inside)
