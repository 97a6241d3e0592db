"""Packs read one by one, and as their objectives arrange them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import UserError
from pipeline.data.loading.objectives.base import Arranged, Objective, PackObjective, PackRow
from pipeline.data.order.packs import PackChunks, PackInstances
from pipeline.data.order.permutation import IntArray
from pipeline.data.order.windows import Instances


def arranged_pack(
    objective: Objective,
    instances: Instances,
    epoch: int,
    position: int,
    *,
    length: int,
    end_of_document: int,
    key: int,
) -> Arranged:
    """A pack as the model gets it, but for skips.

    Args:
        objective: Of its source.
        instances: The same.
        epoch: Of the pack.
        position: The same.
        length: L.
        end_of_document: Token id before the first token of a document.
        key: The sample's `sample_key`.
    """
    assert isinstance(instances, PackInstances)
    chunks = instances.chunks(instances.places(np.array([epoch]), np.array([position])))
    targets, offsets = np.zeros(length, instances.dtype), chunks.offsets(1)
    leads = read_chunks(instances, chunks, offsets, targets, end_of_document)
    pack = PackRow(
        targets.astype(np.int64),
        offsets,
        leads,
        chunks.first > 0,
        instances.end_documents(chunks),
        int(chunks.tokens.sum()),
    )
    return cast(PackObjective, objective).arrange_pack(pack, key)


def read_chunks(
    instances: Instances, chunks: PackChunks, firsts: IntArray, flat: npt.NDArray[Any], end_of_document: int
) -> IntArray:
    """Read the tokens of chunks of a source.

    Args:
        instances: Of the source.
        chunks: Of its packs.
        firsts: Place in `flat` of the first token of each.
        flat: Where they are written.
        end_of_document: Token id before the first token of a document.

    Returns:
        [chunks] token id before the first one of each.
    """
    assert isinstance(instances, PackInstances)
    pieces, part_view = instances.pieces(chunks), instances.part_view
    columns = firsts[pieces.row] + pieces.column
    places = (pieces.part, pieces.start, pieces.length, columns)
    for part, start, length, first in zip(*(each.tolist() for each in places), strict=True):
        flat[first : first + length] = part_view(part, start, start + length)
    leads = np.full(len(firsts), end_of_document, np.int64)
    continued = np.flatnonzero(chunks.first > 0)
    before = instances.pieces(PackChunks(*(each[continued] for each in chunks)), before=1)
    for row, part, start in zip(*(each.tolist() for each in (before.row, before.part, before.start)), strict=True):
        leads[continued[row]] = part_view(part, start, start + 1)[0]
    return leads


def outside_of_vocabulary(name: str, document: int, instances: Instances, token: int, vocab_size: int) -> UserError:
    """The error about a token id that the model does not know.

    Args:
        name: Of the source.
        document: That has it.
        instances: Of the source.
        token: The id.
        vocab_size: Of the model.
    """
    return UserError(
        f"source {name!r}: document {document} of {instances.folder} has token id {token}, but the model's vocabulary "
        f"has only {vocab_size} ids: the dataset is damaged or was made with another tokenizer; check it with "
        "`pipeline data verify`, and make it again"
    )
