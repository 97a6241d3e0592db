"""`pipeline` in a process that an item starts: the same command line, and a list of what it imported.

python benchmarks/evidence/child.py train run.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from evidence.imported import record_at_exit  # noqa: E402

if __name__ == "__main__":
    record_at_exit()
    from pipeline.cli import main

    main()
