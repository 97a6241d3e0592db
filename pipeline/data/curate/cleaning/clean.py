"""Edits of a text before it is measured. `pipeline preprocess` makes the same ones, by the same function."""

from __future__ import annotations

from typing import Any

from pipeline.config.curation.curate import CleanConfig
from pipeline.data.curate.cleaning.mojibake import mojibake_settings, open_mojibake
from pipeline.data.curate.cleaning.pii import MaskedSpan, apply_masks, find_masked, masked_kinds, pii_settings


class Cleaner:
    """Cleans texts: encodings are repaired, then personal data is masked, then lines are removed.

    Repair comes first, because a damaged text hides what it says; lines last, so their rules see what is kept.

    Args:
        config: of the run file.
        seed: of the masks (`data.curate.seed`).

    Raises:
        UserError: a library is missing.
    """

    def __init__(self, config: CleanConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._kinds = masked_kinds(config.pii)
        self._repair = open_mojibake() if config.mojibake else None
        self.changes_nothing = self._repair is None and not self._kinds and not config.lines
        """All texts stay as they are."""

    def clean(self, text: str) -> str:
        """The cleaned text: a function of text, configuration and seed alone."""
        if self.changes_nothing:
            return text
        text = self.repaired(text)
        if self._kinds and (found := find_masked(text, self._kinds, self._seed)):
            text = apply_masks(text, found)
        if self._config.lines:
            from pipeline.data.curate.cleaning.lines import clean_lines

            text = clean_lines(text, self._config.lines)
        return text

    def repaired(self, text: str) -> str:
        """The text after the first step, in which `spans` has its places."""
        return text if self._repair is None else self._repair(text)

    def spans(self, text: str) -> list[MaskedSpan]:
        """Places in `repaired(text)` that are masked, ascending; for reports of one document."""
        return find_masked(self.repaired(text), self._kinds, self._seed)

    def settings(self) -> dict[str, Any]:
        """Settings that cleaned text depends on, with versions, as JSON; empty if nothing is cleaned."""
        found: dict[str, Any] = {}
        if self._config.mojibake:
            found["mojibake"] = mojibake_settings()
        if self._kinds:
            found["pii"] = pii_settings(self._config.pii, self._seed)
        if self._config.lines:
            from pipeline.data.curate.cleaning.lines import line_settings

            found["lines"] = line_settings(self._config.lines)
        return found
