"""Process groups that earlier tests left behind in this process."""

from __future__ import annotations

import torch.distributed as dist


def leave_group() -> None:
    """End the group that a training in this process has made; what plans a run refuses to be a rank of one."""
    if dist.is_initialized():
        dist.destroy_process_group()
