"""The run file: one pydantic model a section, and the loader that merges, overrides and validates."""

from pipeline.config.root import Config

__all__ = ["Config"]
