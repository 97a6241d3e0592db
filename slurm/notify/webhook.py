"""Sender of one message to a webhook: `python -m slurm.notify.webhook VARIABLE` posts its standard input.

A process of its own, since neither a slow name server nor a server that answers in drops has another end. The address
is a secret: it is read from the variable, and what is printed comes from a short list, never from an exception's text.
"""

from __future__ import annotations

import os
import sys
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

_SECONDS = 600.0
"""For each wait on the network; who started this process ends it earlier."""


class _NoRedirect(HTTPRedirectHandler):
    """A redirected POST would become a GET, and the message would be lost without an error."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def post(address: str, body: bytes) -> str:
    """Send a message; returns what went wrong, "" for nothing. Never the address, nor a part of it."""
    try:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            return "the variable does not hold an address (https://...)"
        headers = {"Content-Type": "application/json", "User-Agent": "pretraining-pipeline"}
        request = Request(address, data=body, headers=headers, method="POST")
        with build_opener(_NoRedirect).open(request, timeout=_SECONDS):
            return ""
    except HTTPError as error:
        return f"the server answered with HTTP status {int(error.code)}"
    except URLError as error:
        return f"the server cannot be reached ({_cause(error.reason)})"
    except Exception as error:  # the text of some names the address
        return f"it could not be sent ({_cause(error)})"


def _cause(error: object) -> str:
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number is not None and number > 0 else type(error).__name__


def main() -> None:
    """Read the message, send it, and print what went wrong."""
    if problem := post(os.environ.get(sys.argv[1], "").strip(), sys.stdin.buffer.read()):
        sys.stdout.write(problem)
        sys.exit(1)


if __name__ == "__main__":
    main()
