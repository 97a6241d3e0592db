"""A real SLURM on one Debian or Ubuntu machine in less than a minute: `python -m slurm.devcluster up`."""

from slurm.devcluster.cluster import DevCluster
from slurm.devcluster.machine import missing_programs
from slurm.devcluster.settings import can_split_hosts

__all__ = ["DevCluster", "can_split_hosts", "missing_programs"]
