"""A run that is watched in Chromium while it trains, with the command that a user types."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from pipeline.common.errors import EXIT_STOPPED
from tests.browser import Chromium, browser  # noqa: F401
from tests.tiny import command, pipeline, write_run

pytestmark = pytest.mark.guard


@pytest.mark.slow
def test_a_run_is_watched_from_before_its_start_to_its_end(
    browser: Chromium,  # noqa: F811
    tmp_path: Path,
) -> None:
    file = write_run(tmp_path, {"train.duration": "1000000 steps", "run.dir": str(tmp_path / "run")})
    assert pipeline("preprocess", file).returncode == 0
    watching = subprocess.Popen(command("report", "--live", file), stdout=subprocess.PIPE, text=True)
    assert watching.stdout is not None
    training = None
    try:
        watching.stdout.readline()
        file_of_link = re.search(r"is in (\S+),", watching.stdout.readline())
        assert file_of_link is not None
        with browser.open(Path(file_of_link[1]).read_text().strip()) as opened:
            page = opened.page
            shown = page.frame_locator("iframe:not(.hidden)")
            runs, rows = page.locator("#runs"), page.locator("#rows tbody tr")
            runs.get_by_text("not begun", exact=True).wait_for()
            page.locator("#rows summary").click()
            training = subprocess.Popen(command("train", file), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            rows.nth(1).wait_for()
            shown.locator("header .state", has_text="running").wait_for()
            shown.locator("details").first.evaluate("each => { each.open = true; }")
            (tmp_path / "run/stop").touch()
            assert training.wait(120) == EXIT_STOPPED
            runs.get_by_text("stopped", exact=True).wait_for()
            # The report in the frame follows, and keeps what was opened in it.
            shown.locator("header .state", has_text="stopped").wait_for()
            assert shown.locator("details").first.evaluate("each => each.open")
            page.get_by_text("The run has ended").wait_for()
            steps = [int(each) for each in rows.locator("td:first-child").all_inner_texts()]
            assert steps == sorted(steps, reverse=True) and steps[0] > 1
            opened.check_readable()
            opened.check_quiet()
        assert not (tmp_path / "run/report.html").exists()
    finally:
        if training is not None and training.poll() is None:
            training.kill()
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 0
