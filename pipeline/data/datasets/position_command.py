"""`pipeline data position`: documents that a run of Megatron-LM has read become lists that `data adopt` leaves out."""

from __future__ import annotations

import io
import shlex
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.common import storage
from pipeline.common.console import echo
from pipeline.common.errors import UserError
from pipeline.common.format import counted, distinct_names
from pipeline.data.datasets.megatron_position import read_positions


def write_position(cache: Path, consumed: int, to: Path, *, of: str | None = None, keep_cut: bool = False) -> None:
    """Write the numbers of documents that training should not read again, a file for each file of the blend and split.

    Args:
        cache: folder of the indices.
        consumed: samples that the run has read.
        to: folder for the lists, which is made.
        of: beginning of the name of the description to use.
        keep_cut: whether documents that were read in part are read again.

    Raises:
        UserError: the indices cannot be read, or the folder is there already.
    """
    if to.exists():
        raise UserError(f"{to} is there already; choose another folder, or remove it")
    found = read_positions(cache, consumed, of)
    names = distinct_names(each.prefix.name for each in found)
    to.mkdir()
    adopt, sources = [], []
    for name, each in zip(names, found, strict=True):
        for split, (first, end) in each.splits.items():
            if first < end:
                path = to / f"{name}.{split}.npy"
                left_out = each.left_out(split, keep_cut=keep_cut)
                _save(path, left_out)
                kind = "" if split == "train" else f" --split {'heldout' if split == 'valid' else split}"
                source, leave_out = shlex.quote(str(each.prefix)), shlex.quote(str(path))
                adopt.append(
                    f"pipeline data adopt {source} --to DATA/{name}{kind} --leave-out {leave_out} --tokenizer TOKENIZER"
                )
        first, end = each.splits["train"]
        left = end - first - len(each.whole if keep_cut else each.touched)
        cut = len(each.touched) - len(each.whole)
        what = f"{each.repeated:,} tokens are read again" if keep_cut else f"{each.lost:,} tokens are never read"
        whole = counted(len(each.whole), "document")
        echo(
            f"{each.prefix}: {each.tokens:,} tokens were read, {whole} whole and {cut:,} in part; {left:,} of "
            f"{end - first:,} are left, {what}"
        )
        sources.append(f"    - {{name: {name}, dataset: DATA/{name}, weight: {each.weight:.6g}}}")
    echo("\nNow adopt the files without these documents:\n")
    echo("\n".join(adopt))
    echo("\nand name them in the run file:\n\ndata:\n  sources:")
    echo("\n".join(sources))


def _save(path: Path, numbers: npt.NDArray[np.int64]) -> None:
    data = io.BytesIO()
    np.save(data, numbers, allow_pickle=False)
    storage.put(path, data.getvalue())
