"""metrics.jsonl: every row of every attempt, one per line."""

from __future__ import annotations

from pipeline.common import storage
from pipeline.train.monitor.loggers.base import Logger


class MetricsFile(storage.JsonLines, Logger):
    """metrics.jsonl. Nothing is forgotten at a rewind: readers take the row of the last attempt at a step."""

    keeps_all = True
