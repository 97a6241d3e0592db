"""Made texts: words of a large vocabulary, so that no phrase of 8 words occurs twice by chance."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.data.curate.decontamination.index import INDEX_FILE, ITEMS_FILE, NgramIndex, build_index, open_index
from pipeline.data.curate.decontamination.items import EvalItem, write_items

_SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "wo", "xu", "za")


def made_text(rng: np.random.Generator, words: int) -> str:
    """Words of three syllables in sentences."""
    parts = rng.integers(len(_SYLLABLES), size=(words, 3))
    found = ["".join([_SYLLABLES[part] for part in row]) for row in parts.tolist()]
    for place in range(7, words, 8):
        found[place] += "."
    return " ".join(found)


def made_items(rng: np.random.Generator, lengths: list[int], task: str = "quiz") -> list[EvalItem]:
    return [EvalItem(task, str(number), made_text(rng, length)) for number, length in enumerate(lengths)]


def make_index(folder: Path, items: list[EvalItem], words: int = 13) -> NgramIndex:
    write_items(folder / ITEMS_FILE, items)
    build_index(folder / ITEMS_FILE, words, folder / INDEX_FILE)
    return open_index(folder / INDEX_FILE)


def disguised(text: str, way: int) -> str:
    """The text in another case, with other punctuation, wrapped in another way, or decomposed."""
    words = text.split(" ")
    if way == 0:
        return text.upper()
    if way == 1:
        return ", ".join(words).title()
    if way == 2:
        return "\n> ".join(" ".join(words[start : start + 5]) for start in range(0, len(words), 5))
    if way == 3:
        return "  ".join(f"“{word}”" for word in words).replace("e", "e\u0301")
    return "\u00ad".join(" ".join(words).replace("a", "À"))
