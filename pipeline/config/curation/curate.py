"""`data.curate`: which documents are kept, by rules, models, duplicates and contamination."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.base import MAX_BYTES, Bytes, DataGlob, DataPath, KeyMark, Section, Text
from pipeline.config.curation.rules import RulesConfig
from pipeline.config.parsing.task_files import files_of_tasks


class PiiConfig(Section):
    """Personal data. A mask is a keyed hash of the replaced text, like `<email:7f3a>`, so it is the same everywhere."""

    email: Literal["keep", "mask"] = "keep"
    """E-mail addresses."""
    ip: Literal["keep", "mask"] = "keep"
    """Public IPv4 and IPv6 addresses."""
    phone: Literal["keep", "mask"] = "keep"
    """Telephone numbers with a country code or in a usual form."""
    secret: Literal["keep", "mask"] = "keep"
    """Keys and tokens of well-known services, and private keys."""


class CleanConfig(Section):
    """Edits of the text before it is measured. `pipeline preprocess` makes the same edits."""

    mojibake: bool = False
    """Repair text that was decoded wrongly, with `ftfy`; pure ASCII text is not changed."""
    pii: PiiConfig = PiiConfig()
    """Personal data that is masked."""
    lines: list[Literal["c4", "refinedweb"]] = Field(default_factory=list)
    """Remove lines by the rules of C4 or RefinedWeb; a document with none left is removed."""


class LanguageConfig(Section):
    """Language of a document, by a fastText model."""

    model: DataPath
    """Model file, like `lid.176.ftz`, `lid.176.bin` or GlotLID's."""
    keep: list[Text] = Field(default_factory=list)
    """Labels to keep, without `__label__`, like `en`. By default the language is only measured."""
    min_score: float = Field(default=0.65, ge=0, le=1)
    """Lowest score of the label."""
    characters: int | None = Field(default=1000, ge=1)
    """Characters of the text that the model reads; null for all: three times slower."""


class ClassifierConfig(Section):
    """A fastText classifier, for example of quality."""

    name: Text = Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=40)
    """Name of the score."""
    model: DataPath
    """Model file."""
    label: Text = Field(min_length=1)
    """Label whose score is taken, like `__label__hq`."""
    min_score: float | None = Field(default=None, ge=0, le=1)
    """Smallest score of a document that is kept."""
    max_score: float | None = Field(default=None, ge=0, le=1)
    """Largest score of a document that is kept."""
    characters: int | None = Field(default=None, ge=1)
    """Characters of the text that the model reads; null for all."""

    @model_validator(mode="after")
    def _bounds(self) -> ClassifierConfig:
        if self.min_score is not None and self.max_score is not None and self.min_score > self.max_score:
            raise ValueError(f"min_score {self.min_score} is above max_score {self.max_score}, so nothing is kept")
        return self


class LinesConfig(Section):
    """Lines that occur in many documents, which are removed from them."""

    min_bytes: int = Field(default=20, ge=1)
    """Shorter lines stay, measured without whitespace at both ends."""
    min_count: int = Field(default=6, ge=2)
    """Fewest occurrences in documents of the scope that the rules keep."""
    keep: Literal["first", "none"] = "first"
    """Occurrence that stays."""


class ParagraphsConfig(Section):
    """Paragraphs that occur in many documents: lines up to a blank one. All are compared exactly, by 64-bit hashes."""

    min_bytes: int = Field(default=100, ge=1)
    """Shorter paragraphs stay, measured without whitespace at both ends of their lines."""
    min_words: int = Field(default=0, ge=0)
    """Paragraphs of fewer words stay; words are separated by whitespace."""
    min_count: int = Field(default=2, ge=2)
    """Fewest occurrences in documents of the scope that the rules keep."""
    keep: Literal["first", "none"] = "first"
    """Occurrence that stays."""
    edit: bool = True
    """Remove the other occurrences from the documents that stay."""
    max_share: float | None = Field(default=None, gt=0, le=1)
    """A document is removed if a larger share of its bytes is in paragraphs that another document keeps. By default it
    is removed only when nothing is left of it."""

    @model_validator(mode="after")
    def _does_something(self) -> ParagraphsConfig:
        if not self.edit and self.max_share is None:
            raise ValueError("edit: false without max_share removes nothing; set max_share, or leave edit out")
        return self


class NearConfig(Section):
    """Near duplicates by MinHash."""

    words: int = Field(default=5, ge=1, le=32)
    """Words of a shingle."""
    bands: int = Field(default=14, ge=1, le=256)
    """Bands: two documents are compared if all values of one band are equal."""
    rows: int = Field(default=8, ge=1, le=64)
    """Values of a band."""
    min_similarity: float = Field(default=0.7, ge=0, le=1)
    """Lowest Jaccard similarity to a kept document, counted on the sets of shingles, at which a document is removed."""


class DuplicatesConfig(Section):
    """Duplicates. Each removed document names the kept one."""

    exact: Literal["text", "normalized"] | None = None
    """Equal texts: byte by byte, or as words without case and punctuation."""
    url: Text | None = None
    """Key of `metadata` with an address; documents with equal addresses are duplicates."""
    near: NearConfig | None = None
    """Near duplicates."""
    lines: LinesConfig | None = None
    """Lines that occur in many documents."""
    paragraphs: ParagraphsConfig | None = None
    """Paragraphs that occur in many documents."""
    keep: list[Text] = Field(default_factory=lambda: ["source", "longest"])
    """Order of preference among duplicates; each entry decides where the one before ties. `source`: the first in the
    scope's list. `longest`, `shortest`. `newest:KEY`, `oldest:KEY`: by a date in `metadata`. Then a keyed hash."""

    @field_validator("keep")
    @classmethod
    def _orders(cls, keep: list[str]) -> list[str]:
        for each in keep:
            order, colon, key = each.partition(":")
            if not (key if order in ("newest", "oldest") else order in ("source", "longest", "shortest") and not colon):
                raise ValueError(f"{each!r} is not source, longest, shortest, newest:KEY or oldest:KEY")
        return keep


class UrlListsConfig(Section):
    """Lists of addresses whose documents are removed. The rule is reported by the name of the list."""

    lists: list[DataPath] = Field(min_length=1)
    """Folders with a folder per category that has files `domains` and `urls`, as UT1's, and files with a domain or the
    beginning of an address per line. They may be compressed (`.gz`). A domain stands for those below it, too."""
    categories: list[Text] = Field(default_factory=list)
    """Categories of the folders, like `adult`; by default all."""
    key: Text = "url"
    """Key of `metadata` with the address."""
    sources: list[Text] = Field(default_factory=list)
    """Sources whose addresses are checked; by default all."""


class DecontaminateConfig(Section):
    """Documents that contain items of evaluations."""

    tasks: Annotated[list[str], KeyMark("code", files_of_tasks)] = Field(default_factory=list)
    """Tasks of `eval`, whose own files are read: `wikitext`, `lambada`, or tasks of lm-eval."""
    files: list[DataGlob] = Field(default_factory=list)
    """Files with an item per line (.txt), or JSON Lines of which every text is an item."""
    words: int = Field(default=13, ge=5, le=32)
    """Words of an n-gram. Items that are shorter count as a whole, from 8 words on."""
    action: Literal["remove", "report"] = "remove"
    """Whether documents with such n-grams are removed."""
    max_ngrams: int = Field(default=0, ge=0)
    """Most n-grams of items that a document may have and be kept."""
    max_documents: int = Field(default=1000, ge=1)
    """An n-gram that occurs in more documents is common text (for example a licence): it is reported, and removes
    nothing."""

    @model_validator(mode="after")
    def _has_items(self) -> DecontaminateConfig:
        if not self.tasks and not self.files:
            raise ValueError("name tasks or files: without items there is nothing to look for")
        return self


class CurateConfig(Section):
    """Curation: which documents are kept. `pipeline curate` writes decisions; `pipeline preprocess` follows them."""

    mode: Literal["observe", "apply"] = "observe"
    """`observe`: measure and report, remove nothing. `apply`: preprocess leaves out the removed documents."""
    scopes: dict[str, list[Text]] = Field(default_factory=dict)
    """Sources that are compared with each other, by the name of the scope. Every source that is not listed is a scope
    of its own."""
    against: list[DataPath] = Field(default_factory=list)
    """Folders of finished curations (`DATA_DIR/SOURCE/curate`) whose kept documents always win over equal ones here."""
    clean: CleanConfig = CleanConfig()
    """Edits of the text."""
    url_lists: UrlListsConfig | None = None
    """Lists of addresses whose documents are removed."""
    language: LanguageConfig | None = None
    """Language of a document."""
    rules: RulesConfig = RulesConfig()
    """Rules of documents."""
    by_source: dict[str, RulesConfig] = Field(default_factory=dict)
    """Rules of one source, in place of `rules`."""
    classifiers: list[ClassifierConfig] = Field(default_factory=list)
    """Classifiers of documents."""
    duplicates: DuplicatesConfig = DuplicatesConfig()
    """Duplicates."""
    decontaminate: DecontaminateConfig | None = None
    """Contamination by evaluations."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of masks, of the choice among equals and of the examples in the report."""
    engine: Literal["auto", "numba", "python"] = "auto"
    """Engine of the measures. `auto` takes numba if it is installed and agrees with plain Python on hard texts."""
    bucket_bytes: Bytes = Field(default=512 * 2**20, ge=2**16, le=MAX_BYTES)
    """Bytes that a job of the comparison sorts in memory."""

    @model_validator(mode="after")
    def _names(self) -> CurateConfig:
        seen: dict[str, str] = {}
        for scope, sources in self.scopes.items():
            for source in sources:
                if source in seen:
                    raise ValueError(f"scopes: {source!r} is in {seen[source]} and in {scope}; a source has one scope")
                seen[source] = scope
        names = [one.name for one in self.classifiers]
        if len(set(names)) != len(names):
            raise ValueError(f"classifiers need different names, got {names}")
        return self
