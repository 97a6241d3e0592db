"""Checks of the files of sources, by footers and first bytes, that curation and preprocessing share."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.common.problems import Problems
from pipeline.config.root import Config
from pipeline.data.sources.damage import damaged_error, find_damaged_ends
from pipeline.data.work.units import SourceFiles, reading


def check_files(config: Config, sources: Iterable[tuple[SourceFiles, bool]], found: Problems) -> None:
    """Check the columns of tables; of new sources also first and last bytes, where damage is to end the stage.

    Args:
        config: the run.
        sources: each with True if it is new: then all of its files are looked at, else one.
        found: gets the problems of each source.
    """
    refuses = config.data.preprocess.on_damaged_file == "fail"
    for source, is_new in sources:
        with found.collecting(), reading(config, [source]):
            source.reader.check_columns(source.files, every=is_new)
            if refuses and is_new and (damaged := find_damaged_ends(source.files, source.reader)):
                raise damaged_error(source.source.name, damaged, source.bytes)
