"""The process that writes one checkpoint in Hugging Face's format beside a training, see `exporter` beside it.

    python -m pipeline.train.export.process CHECKPOINT FOLDER WEIGHTS DTYPE PARENT

Its last line on the standard output says what was written, or why nothing was.
"""

from __future__ import annotations

import os
import sys

from pipeline.common.console import Console, say
from pipeline.common.errors import EXIT_OK, MachineError, UserError
from pipeline.train.distributed.rank import end_with

_LOWEST = 19
"""The lowest priority: the training comes first, also where the two share cores."""


def main() -> int:
    """Write the folder; returns the exit code."""
    checkpoint, to, weights, dtype, parent = sys.argv[1:]
    end_with(int(parent))
    os.nice(_LOWEST)
    from pipeline.train.huggingface.convert import to_hf

    try:
        # Its files were hashed as they were written, and reading the moments again would only load the disk.
        done = to_hf(
            checkpoint,
            to,
            weights=weights,  # type: ignore[arg-type]
            dtype=dtype or None,  # type: ignore[arg-type]
            full=False,
            console=Console(quiet=True),
        )
    except UserError as error:
        say(Console(), str(error))
        return error.exit_code
    except OSError as error:
        say(Console(), f"{error.filename}: {error.strerror}")
        return MachineError.exit_code
    say(Console(), done)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
