"""Files that say any size and take no room on the disk: none of it is read, mapped or allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.common.errors import UserError
from pipeline.data.datasets.foreign import open_foreign
from pipeline.data.datasets.indexed import HEADER, MAGIC, IndexedPart, PreadPart
from tests.bounded import refused

HUGE = 1_400_000_000_000
INT32 = 4


def sparse(prefix: Path, sequences: int, bounds: int, size: int, tokens: int = 0, magic: bytes = MAGIC) -> Path:
    """A pair of files whose index has this size, and its last entries as they must be."""
    prefix.with_suffix(".bin").touch()
    with prefix.with_suffix(".bin").open("r+b") as file:
        file.truncate(tokens * 4)
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(HEADER.pack(magic, 1, INT32, sequences, bounds))
        file.truncate(size)
        file.seek(size - 8)
        file.write(sequences.to_bytes(8, "little"))
    return prefix


SEQUENCES = HUGE // 20
BOUNDS = HUGE // 8


@pytest.mark.parametrize("opened", [IndexedPart, PreadPart, open_foreign])
@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((1, 2, HUGE), r"1400000000000 bytes, but its header needs 62"),
        ((SEQUENCES, SEQUENCES + 1, HEADER.size + 20 * SEQUENCES + 8), "70,000,000,000 sequences .* of 0 tokens"),
        ((0, BOUNDS, HEADER.size + 8 * BOUNDS), "174,999,999,999 documents of 0 tokens"),
        ((2**62, 2**62, HUGE), "but its header needs"),
        ((1, 2, HUGE, 9, b"\0" * 9), "is not an .idx file"),
    ],
)
def test_nothing_is_opened(tmp_path: Path, opened: type[IndexedPart], numbers: tuple[Any, ...], message: str) -> None:
    prefix = sparse(tmp_path / "part", *numbers)
    with pytest.raises(UserError, match=rf"part\.idx.*{message}"):
        opened(prefix)


@pytest.mark.parametrize("part", ["IndexedPart", "PreadPart"])
def test_an_index_that_tokens_explain_does_not_fit_into_memory(tmp_path: Path, part: str) -> None:
    """Then both are sparse; the system refuses, and the message names the file."""
    sparse(tmp_path / "part", SEQUENCES, SEQUENCES + 1, HEADER.size + 20 * SEQUENCES + 8, SEQUENCES)
    imports = f"from pathlib import Path\nfrom pipeline.data.datasets.indexed import {part}"
    body = f"""
    try:
        {part}(Path(sys.argv[1]))
    except OSError as error:
        raise UserError(str(error))
"""
    assert "part." in refused(body, imports, tmp_path / "part")
