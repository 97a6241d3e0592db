"""With this folder in PYTHONPATH, a process is hit when it opens or renames a certain file: see `tests.formats.make`.

`INTERRUPT` has the rules, a list in JSON. Each says what happens (`how`) at which use (`count`) of a path that a
regular expression matches, in which rank (`rank`, or any process) and, with a file that marks it (`once`), only the
first time.
"""

import json
import os
import re
import signal
import sys


def _hit(rule):
    if rule.get("once"):
        try:
            os.close(os.open(rule["once"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
    if rule["how"] == "error":
        raise RuntimeError("hit by a test")
    if rule["how"] == "kill all":
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.Signals[rule["how"]])


def _watch(rules):
    def hook(event, arguments):
        if event not in ("open", "os.rename"):
            return
        path = arguments[1] if event == "os.rename" else arguments[0]
        if not isinstance(path, (str, os.PathLike)):
            return
        for rule in rules:
            if rule["event"] == event and re.search(rule["path"], os.fspath(path)):
                rule["count"] -= 1
                if rule["count"] == 0:
                    _hit(rule)

    sys.addaudithook(hook)


if os.environ.get("INTERRUPT"):
    _watch([rule for rule in json.loads(os.environ["INTERRUPT"]) if rule.get("rank") in (None, os.environ.get("RANK"))])
