"""`data:`: the sources, how they become tokens, and how they are blended."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.base import (
    DATA,
    MAX_BYTES,
    MAX_LOCAL,
    Bytes,
    FolderOrUrl,
    GlobOrUrl,
    Section,
    Share,
    Text,
)
from pipeline.config.blend import LossWeight, Packing, Slice
from pipeline.config.chat import ChatConfig, MessagesConfig, template_parts
from pipeline.config.curation.curate import CleanConfig, CurateConfig
from pipeline.config.plugins import NamedPlugin, SourceOptions, find_plugin, is_plugin
from pipeline.config.remote import RemoteConfig

HELD_OUT = "heldout"
"""Split of sources that are never trained on."""


class HubConfig(Section):
    """A dataset of the Hugging Face hub, or a local folder that `datasets.load_dataset` can stream."""

    path: Text = Field(min_length=1)
    """Id of the dataset, like `allenai/c4`, a local folder, or the name of a builder, like `json`."""
    name: Text | None = None
    """Its configuration, like `en`."""
    split: Text = "train"
    """Its split."""
    revision: Text | None = None
    """Commit, tag or branch, recorded as a commit in the source plan; by default the newest commit when the plan is
    made."""
    data_files: list[Text] = Field(default_factory=list)
    """Files of the dataset, in the form of `load_dataset`; by default those of the split."""


def _likely_type(path: str) -> str | None:
    """The type of files that are named like this, if it is not `text`."""
    stem, suffix = os.path.splitext(path)
    if suffix in (".gz", ".zst", ".bz2", ".xz"):
        suffix = os.path.splitext(stem)[1]
    return {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}.get(suffix)


class CsvConfig(Section):
    """Dialect of the files of a source with `type: csv` or `tsv`."""

    delimiter: Text | None = None
    """Character between fields; by default a comma, and a tab with `type: tsv`."""
    quoting: bool = True
    """Fields may stand in double quotes; quotes in them are doubled, and line ends belong to the field. `false`: a
    quote is an ordinary character and each line is a record, so that large plain files can be cut into units."""
    columns: list[Text] = Field(default_factory=list)
    """Names of the columns of files without a header; by default the first record of each file has them."""

    @field_validator("delimiter")
    @classmethod
    def _one_character(cls, delimiter: str | None) -> str | None:
        if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n'):
            raise ValueError("must be one ASCII character, and no double quote or line end")
        return delimiter

    @field_validator("columns")
    @classmethod
    def _different(cls, columns: list[str]) -> list[str]:
        if len(set(columns)) != len(columns):
            raise ValueError("columns need different names")
        return columns


class WarcConfig(Section):
    """Pages of the WARC files of a source with `type: warc`. The limits (`max_...`) hold for `type: html` too."""

    html: Literal["trafilatura", "skip"] | None = None
    """Library that extracts the main text of HTML pages (`pip install 'pretraining-pipeline[html]'`), or `skip` to read
    only plain text. Required if a file has an HTML page; files of text (WET) do not need it."""
    max_tags: int = Field(default=50_000, ge=1)
    """A page of HTML with more start tags is rejected: trafilatura takes 0.1 to 0.3 ms for each."""
    max_attributes: int = Field(default=1000, ge=1)
    """A page with more attributes in one start tag is rejected: the parser compares each with all others."""
    max_paragraph_work: int = Field(default=500_000_000, ge=1)
    """A page is rejected if its paragraphs take more work. The work of a paragraph is its inline elements (links, bold
    words) times the sum of its characters and 20 per inline element. The default takes about 3 s: one paragraph with
    5,000 links."""


class InputConfig(Section):
    """Documents by name: `paths` of files, a `hub` dataset, or a `dataset` made before."""

    name: Text = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)
    """Name of the source. The order of its samples is keyed by this name, never by its place in the list."""
    type: Annotated[
        Literal["text", "html", "jsonl", "csv", "tsv", "warc", "parquet", "arrow", "hub"] | str,
        NamedPlugin("sources"),
        DATA,
    ] = "text"
    """`text`: one document per file (text or code). `html`: the main text of one HTML page per file (`pip install
    'pretraining-pipeline[html]'`). `jsonl`: one JSON object per line. `csv`, `tsv`: one document per record. `warc`:
    pages of a crawl (WARC) or their texts (WET). All these may be compressed (`.gz`, `.zst`, `.bz2`, `.xz`).
    `parquet`: one document per row. `arrow`: Arrow files, like those of `Dataset.save_to_disk`. `hub`: what `hub`
    names, through `datasets` streaming. A name with a dot: an installed plug-in, see `docs/plugins.md`."""
    options: SourceOptions = None
    """Options of the plug-in that `type` names."""
    paths: list[GlobOrUrl] = Field(default_factory=list)
    """Files to read; globs may have `**`. Also objects: `s3://BUCKET/KEY`, `gs://`, `az://`, `hf://`,
    `https://` (`docs/object-storage.md`); in a run file that another user may have written, URLs are refused."""
    exclude: list[Text] = Field(default_factory=list)
    """Globs of files to leave out."""
    hub: HubConfig | None = None
    """Dataset to stream, with `type: hub`."""
    text_key: Text = "text"
    """Key or column of the document's text."""
    text_template: Text | None = None
    """Text of a document from several keys or columns, as in `"{title}\\n\\n{text}"`, in place of `text_key`. If a
    record has no title, `{title?}` is left out with the text between it and the next key."""
    messages: MessagesConfig | None = None
    """Older spelling of `chat` with `roles`."""
    chat: ChatConfig | None = None
    """Documents are conversations: a chat template makes their text, and parts of it are trained on."""
    csv: CsvConfig = CsvConfig()
    """Dialect of `csv` and `tsv` files."""
    warc: WarcConfig = WarcConfig()
    """Pages of `warc` files; the limits of a page hold for `html` files too."""
    id_key: Text = "id"
    """Key or column of the document's id; a record without it gets `FILE@BYTE` (the beginning of its line) or
    `FILE#ROW`."""
    metadata: list[Text] = Field(default_factory=list)
    """Keys or columns that are kept beside the tokens, like `url`; `pipeline data inspect` shows them."""
    skip_records: list[Text] = Field(default_factory=list)
    """Records to leave out, as errors name them: `FILE@BYTE` (lines), `FILE#ROW` (tables, crawls) or `FILE` (text); for
    example one that crashes a parser. After a change, the source is tokenized again."""
    dataset: FolderOrUrl | None = None
    """A dataset folder that `pipeline preprocess` wrote for another run, instead of `paths`. Also the URL of one that
    `pipeline data push` wrote to a bucket (`docs/object-storage.md`), refused like those of `paths`."""

    without_keys: ClassVar[tuple[str, ...]] = ("text", "html", "warc")
    """Types of ours whose records have no keys."""

    @property
    def has_keys(self) -> bool:
        """True if the records have keys."""
        if is_plugin(self.type):
            return bool(getattr(find_plugin("sources", self.type).load(), "has_keys", True))
        return self.type not in self.without_keys

    @field_validator("text_template")
    @classmethod
    def _has_a_key(cls, template: str | None) -> str | None:
        if template is not None and all(key is None for _, key in template_parts(template)):
            raise ValueError("names no key; write one in braces, as in {text}")
        return template

    @model_validator(mode="after")
    def _fits_its_type(self) -> InputConfig:
        # A run folder has every key, so that of a default is none.
        ways = [key for key in ("text_key", "text_template", "messages", "chat") if not self._is_default(key)]
        given = [key for key in ("text_template", "messages", "chat") if getattr(self, key) is not None]
        if given and not self.has_keys:
            raise ValueError(f"{given[0]} needs records with keys; those of type: {self.type} have none")
        if self.chat is not None and self.dataset is not None:
            raise ValueError("chat makes a dataset of files, and `dataset` is made already; remove chat")
        lists = "messages" if self.messages is not None else "chat"
        if (self.messages is not None or self.chat is not None) and self.type in ("csv", "tsv"):
            raise ValueError(f"{lists} needs lists of messages, and fields of type: {self.type} are text alone")
        if given and len(ways) > 1:
            raise ValueError(f"give one of {' and '.join(ways)}")
        for key, types in (("csv", ("csv", "tsv")), ("warc", ("warc", "html"))):
            if not self._is_default(key) and self.type not in types:
                raise ValueError(f"{key} needs type: {' or '.join(types)}")
        if self.type == "html" and self.warc.html is not None:
            raise ValueError("warc.html is for type: warc; with type: html, trafilatura reads every file")
        return self

    def _is_default(self, key: str) -> bool:
        return bool(getattr(self, key) == type(self).model_fields[key].default)

    @field_validator("name")
    @classmethod
    def _free(cls, name: str) -> str:
        if name.lower() == "tokenizer":
            raise ValueError("the folder `tokenizer` of data.dir is for the tokenizer; choose another name")
        return name

    @model_validator(mode="after")
    def _one_way(self) -> InputConfig:
        if [bool(self.paths), self.hub is not None, self.dataset is not None].count(True) != 1:
            raise ValueError("give exactly one of paths (files to preprocess), hub and dataset (a dataset folder)")
        kinds = {kind for path in self.paths if (kind := _likely_type(path)) is not None}
        if "type" not in self.model_fields_set and kinds:
            kind = min(kinds)
            raise ValueError(f"type is not set, and without it each {kind} file is one document: write type: {kind}")
        if (self.type == "hub") != (self.hub is not None):
            raise ValueError("type: hub needs the key hub, and hub needs type: hub")
        return self


class SourceConfig(InputConfig):
    """One source of documents: `paths` of files, a `hub` dataset, or a `dataset` of another run."""

    weight: float | None = Field(default=None, gt=0)
    """Share of the blend, relative to the other sources. Without any weight, shares are proportional to tokens."""
    loss_weight: LossWeight = 1.0
    """Weight of its tokens in the training loss, relative to the other sources; times the weights of `weight_key`. It
    moves no sample. `docs/blend.md` has the formula."""
    weight_key: Text | None = None
    """Key or column of a number from 0.000001 to 1,000,000: the weight of the document's tokens in the training loss.
    Kept with the tokens; a record without it, or with another value, is rejected. With a `dataset`: the key that its
    weights were read from."""
    slice: Slice | None = None
    """Train only on the documents from the first place up to the second, like `[0, 0.9]` or `[0, 500 documents]`."""
    max_epochs: float | None = Field(default=None, gt=0)
    """Train on the source's tokens at most N times; fractions are allowed."""
    on_exhausted: Literal["renormalize", "stop", "repeat"] = "renormalize"
    """At `max_epochs`: the other sources take its share (`renormalize`), the run ends (`stop`), or the source repeats
    with a warning (`repeat`)."""

    @model_validator(mode="after")
    def _limited(self) -> SourceConfig:
        if self.weight_key is not None and not self.has_keys and self.dataset is None:
            raise ValueError(
                f"weight_key needs records with keys: those of type: {self.type} have none; remove weight_key"
            )
        if self.on_exhausted != "renormalize" and self.max_epochs is None:
            raise ValueError(
                f"on_exhausted: {self.on_exhausted} needs max_epochs: set max_epochs, or remove on_exhausted"
            )
        return self


class HeldOutSourceConfig(InputConfig):
    """One source that is never trained on; sets of `heldout_sets` name it."""

    split: Text = "heldout"
    """Split of `dataset`, a folder in it. All documents of files go to the split `heldout`."""

    @model_validator(mode="after")
    def _one_split(self) -> HeldOutSourceConfig:
        if self.dataset is None and self.split != HELD_OUT:
            raise ValueError(
                f"split: {self.split!r} is for a `dataset`; all documents of files are in one split: remove it"
            )
        return self


class PreprocessConfig(Section):
    """Preprocessing: from documents to tokens."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the order of documents on disk and of the tokenizer's sample; runs with different `run.seed` can share a
    data folder."""
    workers: int | None = Field(default=None, ge=1, le=MAX_LOCAL)
    """Worker processes, with one thread each; by default one per core that this process may use. Set fewer where
    other programs use the cores."""
    unit_bytes: Bytes = Field(default=2**30, ge=1)
    """Largest amount of text of a unit of work. A source smaller than 64 such units is cut into up to 64 units of at
    least about 16 MiB. After a crash, a unit or a chunk of one is redone."""
    engine: Literal["auto", "tokenizers", "gigatoken", "fastokens"] = "auto"
    """Library that computes the token ids, which must equal those of `tokenizers`. `auto` takes the fastest installed
    one whose ids are the same on hard texts and on a sample of every unit."""
    verify_rate: float = Field(default=0.002, ge=0, le=1)
    """Share of a unit's documents, and at least 64 of them, whose ids are compared with those of `tokenizers`."""
    max_document_bytes: Bytes = Field(default=2 * 2**20, ge=1024, le=MAX_BYTES)
    """Text of a longer document is encoded in pieces, cut at a line end or space; it stays one document."""
    on_long_document: Literal["split", "reject"] = "split"
    """Treatment of documents longer than `max_document_bytes`."""
    shuffle: Literal["unit", "global"] = "unit"
    """`unit`: documents are permuted within their unit, and units as a whole. `global`: a second pass permutes all
    documents of a source."""
    on_error: Literal["skip", "fail"] = "skip"
    """A bad record is counted and skipped, or ends the stage."""
    on_damaged_file: Literal["fail", "keep", "salvage", "drop"] = "fail"
    """Treatment of a source with a file that cannot be read to its end, because it is truncated or a checksum is wrong.
    `fail`: the stage fails after all other work, and names these files. `keep`: the text before the damage stays, as
    far as checksums are right. `salvage`: the text of a truncated compressed member stays, too, which no checksum
    covers. `drop`: these files are left out."""
    max_zstd_window: Bytes = Field(default=2**27, ge=2**10, le=2**31)
    """Largest window of a `.zst` file (`zstd --long`, `--ultra`), a power of 2. A worker takes this much memory while
    it reads such a file; a file with a larger window counts as damaged."""
    max_record_bytes: Bytes = Field(default=32 * 2**20, ge=2**10, le=2**30)
    """A longer record (a text file, a line, a value of a table) is rejected. A worker takes about five times as much
    memory as the longest record has bytes."""
    max_expansion: int = Field(default=200, ge=1)
    """Largest expansion of a Parquet or Arrow file, in bytes of text per byte of file. A file that expands more, and to
    more than 64 MiB, is refused: some hundred bytes can encode billions of rows."""
    max_error_rate: float = Field(default=0.01, ge=0, le=1)
    """With `on_error: skip`, the stage fails if a larger share of a source's records is bad; empty ones are not bad."""
    max_unknown: float = Field(default=0.01, ge=0, le=1)
    """The stage fails if the tokenizer has no token for a larger share of a source's text: the share of unknown tokens,
    or the share of characters in a sample without a known token, whichever is larger."""

    @property
    def bad_share(self) -> float:
        """Share of a source's records that may be bad."""
        return self.max_error_rate if self.on_error == "skip" else 0.0


_SPLIT_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]*$")


class LoaderConfig(Section):
    """Reading of the datasets in training."""

    read: Literal["mmap", "pread"] = "mmap"
    """`pread` for file systems on which mapping files is slow or fails: errors can be retried there."""
    prefetch: int = Field(default=2, ge=1, le=1000)
    """Steps that are read ahead; more if steps are small."""
    packing: Packing = "windows"
    """How documents become training samples. `windows`: each source is one text that is cut every sequence_length
    tokens, across documents. `best_fit`: samples of whole documents, packed with little padding; only documents longer
    than sequence_length are cut. `pipeline preprocess` makes the packs."""


class DataConfig(Section):
    """Sources, curation, preprocessing and splits."""

    dir: FolderOrUrl | None = None
    """Folder of the datasets; by default `data` in the run folder. Training also reads datasets at a URL, written by
    `pipeline data push` (`docs/object-storage.md`); it is refused like those of `paths`."""
    sources: list[SourceConfig] = Field(min_length=1)
    """Sources to read: a list, or sections by name, as in the included files of corpora. Sections are merged across
    files; a name with the value null leaves its source out."""
    heldout_sources: list[HeldOutSourceConfig] = Field(default_factory=list)
    """Sources that are never trained on, and not curated: other texts to evaluate on, by `heldout_sets`. They are
    tokenized like the others."""
    splits: dict[str, Share] = Field(default_factory=lambda: {"heldout": Share(share=0.01)})
    """Documents kept from training, by the name of the split: a share of them, or a number per source. A keyed hash
    chooses them, so added documents do not change the choice. Append new splits at the end: a split moves those behind
    it. `{}` keeps no document from training, like `{heldout: 0}`."""
    split_by: Literal["content", "id"] = "content"
    """Property that decides a document's split: its text (equal texts are then in the same split everywhere), or its
    id."""
    curate: CurateConfig | None = None
    """Curation: which documents are kept; by default all."""
    preprocess: PreprocessConfig = PreprocessConfig()
    """Preprocessing: from documents to tokens."""
    loader: LoaderConfig = LoaderConfig()
    """Reading of the datasets in training."""
    remote: RemoteConfig = RemoteConfig()
    """Reading of sources and datasets in object storage."""

    @field_validator("splits", mode="before")
    @classmethod
    def _nothing_held_out(cls, splits: Any) -> Any:
        # The split that evaluation and validation name by default is there, and empty.
        return {"heldout": 0} if splits == {} else splits

    @property
    def inputs(self) -> dict[str, InputConfig]:
        """All sources by key: those that are trained on first, then those that never are."""
        return {
            **{f"data.sources.{number}": source for number, source in enumerate(self.sources)},
            **{f"data.heldout_sources.{number}": source for number, source in enumerate(self.heldout_sources)},
        }

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        names = [source.name for source in self.sources]
        if len(set(names)) != len(names):
            raise ValueError(f"sources need different names, got {names}")
        held_out = [source.name for source in self.heldout_sources]
        if twice := [name for number, name in enumerate(held_out) if name in (*names, *held_out[:number])]:
            raise ValueError(f"heldout_sources: {twice[0]!r} is the name of another source, too; choose another name")
        if bad := [name for name in self.splits if name == "train" or not _SPLIT_NAME.match(name)]:
            raise ValueError(
                f"splits: {bad[0]!r} is not a valid name of a split; use letters, digits, - and _, but not 'train'"
            )
        if sum(split.share for split in self.splits.values()) >= 1:
            raise ValueError(
                f"splits: {', '.join(f'{k}: {v}' for k, v in self.splits.items())} leave nothing to train on"
            )
        weighted = [source.name for source in self.sources if source.weight is not None]
        if weighted and len(weighted) != len(names):
            without = [name for name in names if name not in weighted]
            raise ValueError(f"either all sources must have a weight or none; without a weight: {without}")
        return self

    @model_validator(mode="after")
    def _conversations_stay(self) -> DataConfig:
        edits = self.curate is not None and (
            self.curate.clean != CleanConfig() or self.curate.duplicates.lines is not None
        )
        for number, source in enumerate(self.sources):
            if edits and source.chat is not None and source.chat.roles is None:
                raise ValueError(
                    f"sources.{number}.chat: curate edits texts (clean, duplicates.lines), and the trained spans of a "
                    "conversation would be elsewhere then; remove these edits, or make the source's dataset in a run "
                    "of its own"
                )
        return self

    @model_validator(mode="after")
    def _curated(self) -> DataConfig:
        if self.curate is None:
            return self
        if reserved := [
            name for name in (*(each.name for each in self.inputs.values()), *self.splits) if name == "curate"
        ]:
            raise ValueError(f"{reserved[0]!r} is the name of the folder of the curation; choose another name")
        names = [source.name for source in self.sources if source.dataset is None]
        named = {f"scopes.{scope}": name for scope, each in self.curate.scopes.items() for name in each}
        named |= {f"by_source.{name}": name for name in self.curate.by_source}
        named |= {f"url_lists.sources: {name}": name for name in getattr(self.curate.url_lists, "sources", ())}
        for key, name in named.items():
            if name not in names:
                raise ValueError(f"curate.{key}: {name!r} is not a source with files ({', '.join(names)})")
        return self
