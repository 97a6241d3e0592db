"""Hints for jobs that the scheduler refuses, by its words."""

from __future__ import annotations

NO_SLURM = "Run this on a login node of the cluster, or with --local, which uses this machine"

_QUEUE = (
    "There are as many jobs in the queue as your account or QOS allows: lower slurm.links or slurm.array.tasks, or "
    "wait until some have ended (`squeue --me`)"
)
_TIME = "Lower time, or name a partition that allows it: `sinfo --format '%P %l'`"
_SIZE = (
    "No nodes, or too few, have all of that at once: look at slurm.nodes, cpus_per_task, mem_gb, gpus_per_node and "
    "constraint beside `sinfo --format '%P %D %c %m %G %f'`"
)
_HINTS = {
    "invalid partition": "Set partition (in slurm.train and so on, or the profile) to one that `sinfo` shows",
    "invalid account": "Set account to one of yours, in a partition that it may use: `sacctmgr show assoc user=$USER "
    "format=account,partition,qos`",
    "invalid qos": "Set qos to one of yours: `sacctmgr show assoc user=$USER format=account,qos`",
    "invalid wckey": "Set wckey in the profile to one of yours: `sacctmgr show wckey`",
    "invalid job array": "Lower slurm.array.tasks, or the runs of a sweep, below MaxArraySize: `scontrol show config`",
    "maxsubmitjob": _QUEUE,
    "temporarily unable to accept job": "The queue of the cluster is full: wait, or lower slurm.links",
    "maxwall": _TIME,
    "time limit is invalid": _TIME,
    "accounting/qos policy": "Your account or QOS allows less than that: `sacctmgr show qos`, `sacctmgr show assoc "
    "user=$USER`",
    "node configuration is not available": _SIZE,
    "processors requested": _SIZE,
    "node count specification": _SIZE,
    "generic resource": "gpus_per_node, gpu_type or gpus_by of the profile do not fit: `sinfo --format '%P %G'`",
    "invalid feature": "Set constraint to features that `sinfo --format '%P %f'` shows",
    "invalid node name": "exclude, or nodelist of options, has a node that `sinfo --Node` does not show",
    "reservation is invalid": "options has a reservation that `scontrol show reservation` does not show",
    "unrecognized option": "options has an option that this SLURM does not know: `sbatch --help`",
}
"""By words of sbatch, in lower case; the first of these that it says counts."""


def hint(output: str) -> str:
    """A sentence for what the scheduler said, or ""."""
    text = output.lower()
    return next((hint for words, hint in _HINTS.items() if words in text), "")
