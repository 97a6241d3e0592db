"""`serve:`: how `pipeline serve` answers requests."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from pipeline.config.base import Section, parse_bytes


class ServeConfig(Section):
    """Server of a checkpoint of the run (`pipeline serve`); `docs/serving.md` has the interfaces."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on. One that other machines reach needs an API key (`--api-key-file`, or `PIPELINE_API_KEY` in
    the environment)."""
    port: int = Field(default=5000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one, which is said."""
    slots: int = Field(default=16, ge=1, le=4096)
    """Texts that are continued together. Each holds a cache of up to `max_length` positions."""
    queue: int = Field(default=256, ge=1)
    """Texts that may wait for a slot; beyond it requests are refused with status 429."""
    max_length: int | None = Field(default=None, ge=2)
    """Tokens of a text at most, those of its prompt and the new ones; by default the longest sequence length that the
    run trains with."""
    max_body_bytes: Annotated[int, BeforeValidator(parse_bytes)] = Field(default=2**20, ge=1024)
    """Largest body of a request; a larger one is refused with status 413."""
    watch: bool = False
    """Take up new checkpoints as they are committed. While one is loaded, memory holds two models."""
    log_prompts: bool = False
    """Write the prompts of requests into the log, too."""
