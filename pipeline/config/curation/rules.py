"""`data.curate.rules`: presets of published rules. Every bound is a key; null switches that rule off."""

from __future__ import annotations

from pydantic import Field

from pipeline.config.base import Section


class GopherQualityConfig(Section):
    """Quality rules of Gopher (Rae et al. 2021, A1.1). Words are separated by whitespace; blank lines do not count."""

    min_words: int | None = Field(default=50, ge=0)
    """Fewest words with a letter or a number in them."""
    max_words: int | None = Field(default=100_000, ge=0)
    """Most words with a letter or a number in them."""
    min_word_length: float | None = Field(default=3, ge=0)
    """Smallest mean length of such a word, in characters; null for languages without spaces."""
    max_word_length: float | None = Field(default=10, ge=0)
    """Largest mean length of such a word, in characters."""
    max_hashes: float | None = Field(default=0.1, ge=0)
    """Most `#` per word."""
    max_ellipses: float | None = Field(default=0.1, ge=0)
    """Most ellipses (`...` or `…`) per word."""
    max_bullet_lines: float | None = Field(default=0.9, ge=0, le=1)
    """Largest share of lines that begin with `•` or `-`."""
    max_ellipsis_lines: float | None = Field(default=0.3, ge=0, le=1)
    """Largest share of lines that end with an ellipsis."""
    min_alpha_words: float | None = Field(default=0.8, ge=0, le=1)
    """Smallest share of words with a letter in them."""
    min_stop_words: int | None = Field(default=2, ge=0, le=8)
    """Fewest different ones of the words the, be, to, of, and, that, have, with."""


class GopherRepetitionConfig(Section):
    """Repetition rules of Gopher (Rae et al. 2021, table A1): largest shares."""

    max_duplicate_lines: float | None = Field(default=0.3, ge=0, le=1)
    """Share of lines that occurred before."""
    max_duplicate_paragraphs: float | None = Field(default=0.3, ge=0, le=1)
    """Share of paragraphs that occurred before."""
    max_duplicate_line_characters: float | None = Field(default=0.2, ge=0, le=1)
    """Share of characters in such lines."""
    max_duplicate_paragraph_characters: float | None = Field(default=0.2, ge=0, le=1)
    """Share of characters in such paragraphs."""
    max_top_2_grams: float | None = Field(default=0.20, ge=0, le=1)
    """Share of characters in the most frequent 2-gram of words."""
    max_top_3_grams: float | None = Field(default=0.18, ge=0, le=1)
    """Share of characters in the most frequent 3-gram of words."""
    max_top_4_grams: float | None = Field(default=0.16, ge=0, le=1)
    """Share of characters in the most frequent 4-gram of words."""
    max_duplicate_5_grams: float | None = Field(default=0.15, ge=0, le=1)
    """Share of characters in 5-grams of words that occurred before."""
    max_duplicate_6_grams: float | None = Field(default=0.14, ge=0, le=1)
    """Share of characters in 6-grams of words that occurred before."""
    max_duplicate_7_grams: float | None = Field(default=0.13, ge=0, le=1)
    """Share of characters in 7-grams of words that occurred before."""
    max_duplicate_8_grams: float | None = Field(default=0.12, ge=0, le=1)
    """Share of characters in 8-grams of words that occurred before."""
    max_duplicate_9_grams: float | None = Field(default=0.11, ge=0, le=1)
    """Share of characters in 9-grams of words that occurred before."""
    max_duplicate_10_grams: float | None = Field(default=0.10, ge=0, le=1)
    """Share of characters in 10-grams of words that occurred before."""


class C4Config(Section):
    """Document rules of C4 (Raffel et al. 2020, 2.2). Its rules for lines are `data.curate.clean.lines: [c4]`."""

    min_sentences: int | None = Field(default=5, ge=0)
    """Fewest sentences of a document."""
    max_curly_brackets: int | None = Field(default=0, ge=0)
    """Most curly brackets: text with them is likely code."""
    max_lorem_ipsum: int | None = Field(default=0, ge=0)
    """Most occurrences of `lorem ipsum`."""


class FineWebConfig(Section):
    """Rules that FineWeb adds (Penedo et al. 2024, 3.6)."""

    min_punctuated_lines: float | None = Field(default=0.12, ge=0, le=1)
    """Smallest share of lines that end with a mark that ends a sentence."""
    max_short_lines: float | None = Field(default=0.67, ge=0, le=1)
    """Largest share of lines of at most 30 characters."""
    max_duplicate_line_characters: float | None = Field(default=0.01, ge=0, le=1)
    """Largest share of characters in lines that occurred before."""
    max_newlines_per_word: float | None = Field(default=0.3, ge=0)
    """Most line ends per word."""


class RulesConfig(Section):
    """Rules of documents. A preset is on if its section exists, even if empty: `gopher_quality: {}`."""

    gopher_quality: GopherQualityConfig | None = None
    """Quality rules of Gopher."""
    gopher_repetition: GopherRepetitionConfig | None = None
    """Repetition rules of Gopher."""
    c4: C4Config | None = None
    """Document rules of C4."""
    fineweb: FineWebConfig | None = None
    """Rules that FineWeb adds."""
