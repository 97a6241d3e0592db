"""A link with a key in it, for the user who has started a server and for nobody else."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from pipeline.common.console import is_screen


class PrivateLink:
    """Shows a link once: on a terminal as it is, and where the output may be kept, in a file of mode 600.

    Args:
        console: where the server prints.
    """

    def __init__(self, console: Console) -> None:
        self._on_screen = is_screen(console)
        self._file: Path | None = None

    def lines(self, what: str, url: str, link: str) -> list[str]:
        """Lines to print.

        Args:
            what: is served.
            url: address without the key.
            link: address with the key.
        """
        if self._on_screen:
            return [f"{what} on {link}"]
        descriptor, name = tempfile.mkstemp(prefix="pipeline-link-")
        self._file = Path(name)
        with open(descriptor, "w", encoding="utf-8") as out:
            out.write(f"{link}\n")
        return [
            f"{what} on {url}",
            f"the link with its key is in {os.path.abspath(name)}, which only you can read, until the server ends",
        ]

    def remove(self) -> None:
        """Remove the file, if there is one."""
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink()
