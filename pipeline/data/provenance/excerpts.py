"""Beginnings of documents with their places, read from the source files, for the reports of curation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.common.errors import UserError
from pipeline.data.curate.report.build import CHARACTERS, Excerpt, Key
from pipeline.data.provenance.source_location import Origins


def read_excerpts(curation: Path, keys: Sequence[Key]) -> Mapping[Key, Excerpt]:
    """Excerpts of documents as they are in the source files; of none whose file has changed or is gone.

    Args:
        curation: folder of the source's curation.
        keys: (unit, row) of the documents.
    """
    origins = Origins(curation)
    try:
        places = origins.places(keys)
        documents = origins.read(keys)
    except (UserError, OSError):
        return {}
    return {
        key: Excerpt(str(places[key]), document.text[:CHARACTERS], document.id) for key, document in documents.items()
    }
