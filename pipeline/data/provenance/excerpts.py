"""Beginnings of documents for the report of a curation, read from the source files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.common.errors import UserError
from pipeline.config.curation.curate import CleanConfig, CurateConfig
from pipeline.data.curate.cleaning.clean import Cleaner
from pipeline.data.curate.report.build import Excerpt, Key
from pipeline.data.provenance.source_location import Origins

_CHUNKS = 128
"""Most chunks that are read. Examples are taken from fewer, unless a rule removes documents nowhere else."""
_CLEANED = 20_000
"""Characters of a document that are cleaned."""


@dataclass(frozen=True)
class ExcerptReader:
    """A reader of beginnings, by the folder of a source's curation; edited, so that masks hide what they should.

    Attributes:
        config: `data.curate` of the run file.
    """

    config: CurateConfig | None

    def __call__(self, folder: Path, keys: Sequence[Key]) -> Mapping[Key, Excerpt]:
        config = self.config
        cleaner = Cleaner(CleanConfig(), 0) if config is None else Cleaner(config.clean, config.seed)
        return read_excerpts(folder, keys, cleaner.clean)


def read_excerpts(folder: Path, keys: Sequence[Key], clean: Callable[[str], str]) -> dict[Key, Excerpt]:
    """Beginnings of documents; those in files that cannot be read any more are left out.

    Args:
        folder: of the curation of a source.
        keys: of the documents.
        clean: edits of the text.
    """
    origins = Origins(folder)
    chunks: dict[tuple[int, int], list[Key]] = {}
    for key in sorted(set(keys)):
        if (chunk := origins.chunk_of(key)) is not None:
            chunks.setdefault((key[0], chunk[0]), []).append(key)
    most = Counter({chunk: len(found) for chunk, found in sorted(chunks.items())})
    found: dict[Key, Excerpt] = {}
    for chunk, _ in most.most_common(_CHUNKS):
        try:
            documents = origins.read(chunks[chunk])
        except (UserError, OSError):
            continue
        places = origins.places(documents)
        for key, document in documents.items():
            found[key] = Excerpt(str(places[key]), clean(document.text[:_CLEANED]), document.id)
    return found
