"""The stages of a run on this machine, around what they do."""

import signal

import pytest

from pipeline.common.errors import EXIT_STOPPED, Stopped
from slurm.local import stages


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP])
@pytest.mark.usefixtures("hangup")
def test_a_scheduler_that_ends_a_stage_gets_the_code_of_a_stop(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=f"received {number.name}") as stopped, stages._terminate_stops():
        signal.raise_signal(number)
    assert stopped.value.exit_code == EXIT_STOPPED
    assert signal.getsignal(number) == before
