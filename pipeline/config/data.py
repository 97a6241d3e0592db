"""`data:`: the sources, how they become tokens, and how they are blended."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.base import AbsGlob, AbsPath, Bytes, Section


class SourceConfig(Section):
    """One source of documents: files to preprocess (`type`, `paths`), or a dataset made before (`dataset`)."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)
    """Name of the source. The order of its samples is keyed by this name, never by its place in the list."""
    type: Literal["text", "jsonl"] = "text"
    """`text`: one document a file (text or code). `jsonl`: one JSON object a line."""
    paths: list[AbsGlob] = Field(default_factory=list)
    """Files to read; globs with `**` are understood."""
    exclude: list[str] = Field(default_factory=list)
    """Globs of files to leave out."""
    text_key: str = "text"
    """Key of the document's text in a JSONL record."""
    id_key: str = "id"
    """Key of the document's id in a JSONL record; a record without it gets `FILE@BYTE`, where its line begins."""
    dataset: AbsPath | None = None
    """A dataset folder that `pipeline preprocess` wrote for another run, instead of `paths`."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the blend, relative to the other sources. Without any weight, shares are proportional to tokens."""

    @field_validator("name")
    @classmethod
    def _free(cls, name: str) -> str:
        if name.lower() == "tokenizer":
            raise ValueError("that folder of data.dir is the tokenizer's; choose another name")
        return name

    @model_validator(mode="after")
    def _one_way(self) -> SourceConfig:
        if bool(self.paths) == (self.dataset is not None):
            raise ValueError("give exactly one of paths (files to preprocess) and dataset (a dataset folder)")
        return self


class PreprocessConfig(Section):
    """How documents become tokens."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the order of documents on disk and of the tokenizer's sample; runs with different `run.seed` can share a
    data folder."""
    workers: int | None = Field(default=None, ge=1)
    """Worker processes; by default one a core."""
    unit_bytes: Bytes = Field(default=2**30, ge=1)
    """Work is cut into units of at most this much text, a small source into 64; a unit is redone after a crash."""
    on_error: Literal["skip", "fail"] = "skip"
    """A bad record is counted and passed over, or ends the stage."""
    max_error_rate: float = Field(default=0.01, ge=0, le=1)
    """With `on_error: skip`, the stage fails if a larger share of a source's records is bad; empty ones are not bad."""


class DataConfig(Section):
    """Sources, preprocessing and the held-out split."""

    dir: AbsPath | None = None
    """Where datasets are written; by default `data` in the run folder."""
    sources: list[SourceConfig] = Field(min_length=1)
    """What to read."""
    heldout: float = Field(default=0.01, ge=0, lt=1)
    """Share of documents held out for validation and evaluation, chosen by a keyed hash of the document's text."""
    preprocess: PreprocessConfig = PreprocessConfig()
    """How documents become tokens."""

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        names = [source.name for source in self.sources]
        if len(set(names)) != len(names):
            raise ValueError(f"sources need different names, got {names}")
        weighted = [source.name for source in self.sources if source.weight is not None]
        if weighted and len(weighted) != len(names):
            without = [name for name in names if name not in weighted]
            raise ValueError(f"either all sources have a weight or none; without: {without}")
        return self
