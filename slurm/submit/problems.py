"""Problems that speak against sending a run, collected so that the user sees all of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.common.errors import MachineError, UserError


class PreflightReport:
    """Problems, each of which would end the run, and warnings."""

    def __init__(self) -> None:
        self._problems: dict[str, UserError] = {}
        self._warnings: dict[str, None] = {}

    @property
    def warnings(self) -> list[str]:
        """Each once, in the order in which they were found."""
        return list(self._warnings)

    @property
    def problems(self) -> list[str]:
        """Each problem once, in the order in which they were found."""
        return list(self._problems)

    def problem(self, text: str) -> None:
        """Add a problem that has to be fixed first."""
        self._problems.setdefault(text, UserError(text))

    def warn(self, *texts: str) -> None:
        """Add warnings: what is allowed and probably not meant."""
        self._warnings |= dict.fromkeys(texts)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """A `UserError` inside is a problem, and ends only what is inside."""
        try:
            yield
        except UserError as error:
            self._problems.setdefault(str(error), error)
        except OSError as error:
            text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            self._problems.setdefault(text, MachineError(text))

    def raise_problems(self) -> None:
        """Raise all problems as one error, if there are any.

        Raises:
            UserError: there are some; the message lists all.
            MachineError: all of them are the machine's.
        """
        if not self._problems:
            return
        errors = self._problems.values()
        kind = MachineError if all(isinstance(error, MachineError) for error in errors) else UserError
        if len(errors) == 1:
            raise kind(f"nothing was sent: {next(iter(self._problems))}")
        lines = "".join(f"\n- {text.replace(chr(10), chr(10) + '  ')}" for text in self._problems)
        raise kind(f"nothing was sent: there are {len(errors)} problems:{lines}")
