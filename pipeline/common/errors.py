"""Errors that a user can act on, and the exit codes that schedulers and scripts read.

Source of the codes: `docs/troubleshooting.md`, "Exit codes".
"""

from __future__ import annotations

from pipeline import DISTRIBUTION
from pipeline.common.redaction import masked

EXIT_OK = 0
EXIT_OTHER = 1
EXIT_REFUSED = 2
EXIT_STOPPED = 75
EXIT_HANG = 76
EXIT_NUMERICAL = 77
EXIT_UNHEALTHY = 78
EXIT_UNSAVED = 79
EXIT_SUPERSEDED = 80
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
AGREED_CODES = (EXIT_OK, EXIT_STOPPED, EXIT_NUMERICAL, EXIT_UNSAVED)
"""Exit codes of ends that all ranks come to after the same step."""


def install_extra(name: str) -> str:
    """The command that installs one of our extras, for messages."""
    return f"pip install '{DISTRIBUTION}[{name}]'"


def exit_code(error: BaseException) -> int:
    """The code that the command line leaves with after `error`."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return int(getattr(error, "exit_code", EXIT_OTHER))


def end_reason(error: BaseException) -> str:
    """The reason for the end of a run, in words and without secrets."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by Ctrl-C"
    return masked(str(error)) or type(error).__name__


class UserError(ValueError):
    """A mistake in the config, the data or the machine that the user can fix.

    The message names the key or file, the value, what is allowed and what to do next; the command line prints it
    without a traceback and leaves with `exit_code`.
    """

    exit_code = EXIT_REFUSED


class NumericalError(UserError):
    """Training produced a loss or gradient that is not finite and the policy is to stop."""

    exit_code = EXIT_NUMERICAL


class Stopped(Exception):
    """A stop was asked for (signal, `stop` file), and what is needed to go on is there.

    Args:
        message: why, where, and how to go on.
        agreed: all ranks have stopped at the same step, and saved it. Otherwise it is this process that was told to
            end, perhaps by who ends all ranks because another one has failed.
    """

    exit_code = EXIT_STOPPED

    def __init__(self, message: str = "", *, agreed: bool = False) -> None:
        super().__init__(message)
        self.agreed = agreed


class MachineError(UserError):
    """The machine has or allows too little: disk, memory, permissions. Nothing that was committed is lost."""

    exit_code = EXIT_OTHER


class UnsavedError(MachineError):
    """No checkpoint could be written for longer than `train.checkpoint.max_unsaved_minutes`; all ranks end together."""

    exit_code = EXIT_UNSAVED


class SupersededError(MachineError):
    """A later attempt has taken the run over: this one writes nothing more, and nothing starts it again."""

    exit_code = EXIT_SUPERSEDED


class HangError(MachineError):
    """A process has not got on for longer than `launch.time_limits` allows."""

    exit_code = EXIT_HANG


class NodeUnhealthy(MachineError):
    """A node is unfit for training: `pipeline doctor` names what is wrong with it."""

    exit_code = EXIT_UNHEALTHY


class RankFailed(Exception):
    """Another process of the run has failed, and this one ends with its exit code.

    Args:
        message: What happened there, as the command line should show it.
        code: Exit code.
        shown: Whether the message has been shown to the user already.
    """

    def __init__(self, message: str, code: int, *, shown: bool = False) -> None:
        super().__init__(message)
        self.exit_code = code
        self.shown = shown
