"""Lines of a job's script around its batch process: before it the run folder is looked for, after it a kill is met.

bash is all that is left of a job whose batch process was killed (the kernel ends it where memory runs out), and all
that runs where the code of the job is on the disk that is not there.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from pipeline.common.errors import EXIT_INTERRUPTED, EXIT_OTHER
from pipeline.common.run_files import RunFiles
from slurm.jobs import LOGS
from slurm.record.planned_job import Chain

FOLDER_SECONDS = 300
"""For which a job waits for its run folder: a disk that was not mounted comes back, or an administrator sees to it."""
_LOOK_EVERY = 5
_ASK = 60
"""Times that a controller which is away is asked whether the job still runs, every `_LOOK_EVERY` seconds."""

FOLDER_LINES, SETUP_LINES = "# The run folder must be there.", "# Modules and settings of the profile."
"""Headings in the script."""
_BEFORE = f"""\
pipeline_here() {{ [ "$(cat -- "$pipeline_run/{RunFiles.folder_id}" 2>/dev/null)" = "$pipeline_id" ]; }}
pipeline_job=${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}
pipeline_own() {{
  for pipeline_path in "$@"; do
    if [ -L "$pipeline_path" ]; then
      case $(stat -c %u -- "$pipeline_path") in
        0|"$EUID"|"$(stat -L -c %u -- "$pipeline_run")") ;;
        *) return 1 ;;
      esac
    fi
  done
  [ ! -e "$1" ] || [ -f "$1" ]
}}
trap pipeline_terminated=1 TERM"""
"""bash outlives a TERM, so that it is known when the batch process has ended. What a member of the run's group has put
in the place of a file, a link or a pipe, is not written to. In the run folder of somebody else its owner decides.
"""
_WAIT = f"""\
until pipeline_here; do
  if [ "$SECONDS" -ge {FOLDER_SECONDS} ]; then
    printf 'error: run.dir %s is not there, or is another folder, after {FOLDER_SECONDS} s\\n' "$pipeline_run" >&2
    exit {EXIT_OTHER}
  fi
  sleep {_LOOK_EVERY}
done"""
_LOG = f"""\
pipeline_log="$pipeline_run/{RunFiles.slurm}/{LOGS}/${{pipeline_job}}_0_log.out"
pipeline_folder="$pipeline_run/{RunFiles.slurm}"
if pipeline_here && pipeline_own "$pipeline_log" "${{pipeline_log%/*}}" "$pipeline_folder" && : >> "$pipeline_log"; then
  exec >> "$pipeline_log" 2>&1
fi"""
_AFTER = f"""\
pipeline_exit=$?
pipeline_note() {{
  printf '\\n{{"event":"batch killed","job":"%s","restarts":%d,"time":%d,"signal":%d,"node":"%s","next":"%s"}}\\n' \\
    "$pipeline_job" "${{SLURM_RESTART_COUNT:-0}}" "$(date +%s)" "$((pipeline_exit - 128))" "$SLURMD_NODENAME" "$1" \\
    >> "$pipeline_run/{RunFiles.ledger}"
}}
pipeline_runs() {{
  for pipeline_try in {{1..{_ASK}}}; do
    pipeline_state=$(scontrol --oneliner show job "$pipeline_job") && break
    [ -z "${{pipeline_terminated:-}}" ] || return 1
    sleep {_LOOK_EVERY}
  done
  [[ " $pipeline_state " = *" JobState=RUNNING "* ]]
}}
if [ "$pipeline_exit" -gt 128 ] && [ "$pipeline_exit" -ne {EXIT_INTERRUPTED} ]; then
  printf 'the batch process was killed by signal %d\\n' "$((pipeline_exit - 128))"
  if pipeline_here && pipeline_own "$pipeline_run/{RunFiles.ledger}" && [ -z "${{pipeline_terminated:-}}" ] &&
    pipeline_runs; then
    # Kills since a launch has ended otherwise.
    pipeline_kills=$(tac "$pipeline_run/{RunFiles.ledger}" | sed '/"event":"launch end"/q' |
      grep -c '"batch killed","job":"'"$pipeline_job"'"')
    if [ "$pipeline_next" = requeue ] && [ "$pipeline_kills" -ge "$pipeline_restarts" ]; then
      printf 'killed %d times without another end (slurm.max_restarts=%d); the job ends\\n' \\
        "$((pipeline_kills + 1))" "$pipeline_restarts"
      pipeline_next=end
    fi
    # Nothing bounds the starts of a job whose ledger cannot be written to.
    if pipeline_note "$pipeline_next" && [ "$pipeline_next" = requeue ]; then
      scontrol requeue "$pipeline_job" || {{ pipeline_note end; pipeline_next=end; }}
    fi
    # What follows otherwise tells of it. The words are those of the batch process.
    [ "$pipeline_next" != end ] || eval "$pipeline_tell"' "$@"'
  fi
fi
exit "$pipeline_exit"
"""
_NEXT: dict[Chain, str] = {"requeue": "requeue", "singleton": "next link", "afterany": "next link", "none": "end"}
"""What follows on a killed batch process: dependencies of chain jobs do not ask how the job before ended."""


def lines_before(folders: Sequence[tuple[Path, str]], *, private: bool) -> list[str]:
    """Lines of bash before all others: which run folder it is, and what is done where it is not there.

    Args:
        folders: path and id of the run folder, of each task of an array if their runs differ.
        private: code and submission are elsewhere, as is the log that SLURM opens: the batch process itself waits, and
            tells of it. Otherwise nothing can be run without the folder, and the script waits.
    """
    names = [f"pipeline_run={shlex.quote(str(run))} pipeline_id={folder_id}" for run, folder_id in folders]
    if len(names) > 1:
        cases = [f"{task}) {each} ;;" for task, each in enumerate(names)]
        names = ['case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac"]
    wait = _LOG if private else _WAIT
    return [FOLDER_LINES, *names, *_BEFORE.splitlines(), *wait.splitlines(), SETUP_LINES]


def lines_after(chain: Chain, max_restarts: int, tell: str) -> list[str]:
    """Lines of bash after the batch process: they note that it was killed, and requeue the job where the chain does.

    Not where the scheduler ends the job: that brings a cancelled job back.

    Args:
        chain: how the job continues.
        max_restarts: kills in a row that are followed by another start.
        tell: shell that is called, with the words of the batch process, where no other start follows.
    """
    # `$?` is that of the batch process: nothing may be done before it is read.
    first, *rest = _AFTER.splitlines()
    known = f"pipeline_next='{_NEXT[chain]}' pipeline_restarts={max_restarts} pipeline_tell={shlex.quote(tell)}"
    return [first, known, *rest]
