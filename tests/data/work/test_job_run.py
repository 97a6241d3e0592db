"""What a command says that waits for units of others. Time is that of the test."""

import io

from rich.console import Console

from pipeline.data.work.job_run import JobRun


def test_for_whom_and_how_long():
    now, text = 0.0, io.StringIO()
    run = JobRun(Console(file=text, width=500), None, 1, "making", clock=lambda: now)

    def said(at, *units):
        nonlocal now
        now = at
        text.seek(text.truncate(0))
        run._say_waiting([(f"unit {unit} of s", "process 7 on node1") for unit in units])
        return text.getvalue().splitlines()

    waits, how = said(0.0, 3)
    assert waits == "waiting for unit 3 of s, which is held by process 7 on node1"
    assert how.startswith("it is taken over when its process has ended, or after 120 s without a sign of life")
    assert said(59.0, 3) == []
    assert said(60.0, 3)[0] == "waiting for 60 s for unit 3 of s, which is held by process 7 on node1"
    assert said(119.0, 3) == []
    assert said(120.0, 3)[0].startswith("waiting for 120 s for unit 3")
    assert said(200.0, 3) == []
    assert said(200.0, 3, 4)[0] == "waiting for unit 4 of s, which is held by process 7 on node1"
    assert said(201.0) == []
    assert len(said(202.0, *range(5, 105))) == 6
    assert text.getvalue().splitlines()[-1].startswith("and for 95 more units; each is taken over")
