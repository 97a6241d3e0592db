"""`python -m tests.eval.dying eval RUN.yaml ...`: the command line, but rank 1 of an evaluation is killed in it."""

from __future__ import annotations

import os
import signal
from typing import Any


def die(*_: Any, **__: Any) -> Any:
    """In place of the loss: rank 1 is killed, and the others wait for it."""
    from pipeline.train.distributed.process_group import barrier

    if os.environ["RANK"] == "1":
        print("the last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    barrier()
    raise AssertionError("rank 1 is gone")


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        import pipeline.eval.engine

        pipeline.eval.engine.heldout_loss = die
    else:
        import slurm.local.launcher

        slurm.local.launcher.RANK_MODULE = ("tests.eval.dying",)
    from pipeline.cli.main import main

    main()
