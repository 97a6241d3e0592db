"""Problems of a run, collected so that the user sees all of them at once.

A preview and the start of a stage look at the same checks: what the one finds, the other finds in the same words.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console

from pipeline.common import storage
from pipeline.common.console import confirmed
from pipeline.common.errors import MachineError, UserError

Scope = TypeVar("Scope")


@dataclass(frozen=True)
class StartCheck(Generic[Scope]):
    """A look at one thing that may end a stage at its start.

    Attributes:
        name: what is looked at, for messages.
        look: adds problems and warnings; a `UserError` that it raises is a problem, too.
        waits_for: reason why it cannot be looked at yet; empty if it can.
        is_first: nothing behind it can be looked at where it finds a problem.
    """

    name: str
    look: Callable[[Scope, Problems], None]
    waits_for: Callable[[Scope], str] = lambda scope: ""
    is_first: bool = False


@dataclass(frozen=True)
class Agreement:
    """A person's agreement with a change of a run; the same change is agreed to once.

    Attributes:
        file: JSON Lines, `RunFiles.agreements`.
        about: what was asked, in a word.
        change: values before and after, as JSON.
    """

    file: Path
    about: str
    change: Mapping[str, Any]

    def exists(self) -> bool:
        """True if somebody has agreed."""
        lines = storage.json_lines(self.file)
        return any(line.get("about") == self.about and line.get("change") == self.change for line in lines)

    def note(self) -> None:
        """Write it down."""
        storage.add_json_line(self.file, {"time": time.time(), "about": self.about, "change": self.change})


@dataclass(frozen=True)
class Question:
    """A problem that is none if a person says so."""

    text: str
    agreement: Agreement


class Problems:
    """Problems, each of which would end the run, warnings, and what was not looked at."""

    def __init__(self) -> None:
        self._problems: dict[str, UserError] = {}
        self._warnings: dict[str, None] = {}
        self._left_out: dict[str, dict[str, None]] = {}
        """Things that were not looked at, by the reason."""
        self._questions: dict[str, Question] = {}
        """Problems of which a person may say that they are none."""

    def __reduce__(self) -> tuple[object, ...]:
        """To another process go messages, and whether each is the machine's: errors may hold more than can be sent."""
        errors = [(text, isinstance(error, MachineError)) for text, error in self._problems.items()]
        return _received, (errors, self.warnings, self._left_out, self._questions)

    @property
    def warnings(self) -> list[str]:
        """Each once, in the order in which they were found."""
        return list(self._warnings)

    @property
    def problems(self) -> list[str]:
        """Each problem once, in the order in which they were found."""
        return list(self._problems)

    @property
    def left_out(self) -> list[str]:
        """Things that were not looked at, a line for each reason."""
        return [f"{', '.join(things)}: {reason}" for reason, things in self._left_out.items()]

    def problem(self, text: str) -> None:
        """Add a problem that has to be fixed first."""
        self._problems.setdefault(text, UserError(text))

    def question(self, text: str, agreement: Agreement, otherwise: str) -> None:
        """Add a problem that is none where it is meant.

        Args:
            text: in words.
            agreement: written down if a person says that it is meant.
            otherwise: how to say so where nobody can be asked.
        """
        if not agreement.exists():
            problem = f"{text}; {otherwise}"
            self.problem(problem)
            self._questions[problem] = Question(text, agreement)

    def ask(self, console: Console) -> None:
        """Ask the questions, where a person can answer; one that is answered with yes is noted, and not a problem.

        Nothing is asked where other problems refuse the start anyway.
        """
        if self._problems.keys() != self._questions.keys():
            return
        for problem, question in list(self._questions.items()):
            if confirmed(console, question.text):
                question.agreement.note()
                del self._problems[problem], self._questions[problem]

    def warn(self, *texts: str) -> None:
        """Add warnings: what is allowed and probably not meant."""
        self._warnings |= dict.fromkeys(texts)

    def leave_out(self, what: str, reason: str) -> None:
        """Note something that was not looked at."""
        self._left_out.setdefault(reason, {})[what] = None

    def look(self, checks: Iterable[StartCheck[Scope]], scope: Scope) -> bool:
        """Look at each thing, but for those that wait for something; a problem of one does not hide the others'.

        Returns:
            False if a check that comes first has found a problem.
        """
        for check in checks:
            if reason := check.waits_for(scope):
                self.leave_out(check.name, reason)
                continue
            before = len(self._problems)
            with self.collecting():
                check.look(scope, self)
            if check.is_first and len(self._problems) > before:
                return False
        return True

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

    def raise_problems(self, what: str = "") -> None:
        """Raise all problems as one error, if there are any; one alone is raised as it was found.

        Args:
            what: what does not happen because of them, for the beginning of the message: `nothing was sent`.

        Raises:
            UserError: there are some; the message lists all.
            MachineError: all of them are the machine's.
        """
        if not self._problems:
            return
        errors, texts = list(self._problems.values()), self.problems
        if len(errors) == 1 and not what:
            raise errors[0]
        kind = MachineError if all(isinstance(error, MachineError) for error in errors) else UserError
        lines = "".join(f"\n- {text.replace(chr(10), chr(10) + '  ')}" for text in texts)
        message = texts[0] if len(texts) == 1 else f"there are {len(texts)} problems:{lines}"
        raise kind(f"{what}: {message}" if what else message)


def _received(
    errors: list[tuple[str, bool]],
    warnings: list[str],
    left_out: dict[str, dict[str, None]],
    questions: dict[str, Question],
) -> Problems:
    found = Problems()
    found._questions = questions
    found._problems = {text: MachineError(text) if machines else UserError(text) for text, machines in errors}
    found._warnings, found._left_out = dict.fromkeys(warnings), left_out
    return found
