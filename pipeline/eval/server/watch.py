"""Takes up new checkpoints of a run while it trains: reads files alone, never the run's lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import orjson

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.data.datasets.token_bytes import token_bytes
from pipeline.data.tokenization.chat_prompts import chat_prompts
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.eval.inference import load_decoder
from pipeline.eval.server.worker import Served, Worker
from pipeline.train.checkpoint.committed import UNREADABLE
from pipeline.train.checkpoint.exported import ExportedWeights, WeightsOf, section_of
from pipeline.train.checkpoint.manager import Checkpoints

POLL_SECONDS = 2.0
_AGAIN_SECONDS = 60.0
"""After so long one that could not be loaded is tried again: a network file system may have been the reason."""
_GENEROUS = 16
"""Factor by which a normalizer may shorten a text; an estimate."""


def load_served(config: Config, which: WeightsOf, chat_template: Path | None = None) -> Served:
    """The model of verified weights: of a checkpoint, or in a folder.

    Args:
        config: of the run.
        which: weights.
        chat_template: file of a template to take in place of the model's own.

    Raises:
        UserError: as `load_for_inference`, or the template cannot be used.
    """
    loaded = load_decoder(config, which)
    source = loaded.source
    chat, problem = None, None
    try:
        chat = chat_prompts(source.path, loaded.tokenizer, chat_template)
    except UserError as error:
        if chat_template is not None:
            raise
        problem = str(error)
    return Served(
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        bytes_of_a_token=_bytes_of_a_token(loaded.tokenizer),
        run=config.run.dir.name,
        step=source.step,
        tokens=source.tokens if isinstance(source, ExportedWeights) else int(source.state()["tokens"]),
        fingerprint=source.fingerprint,
        loaded_at=time.time(),
        average=section_of(source, config.eval.weights) == "ema",
        folder=source.path.name if isinstance(source, ExportedWeights) else None,
        chat=chat,
        chat_problem=problem,
    )


def _bytes_of_a_token(tokenizer: Tokenizer) -> int:
    """Bytes of text of the longest token; an upper estimate where text is changed before it is cut into tokens."""
    sizes = token_bytes(tokenizer)
    definition = orjson.loads(tokenizer.definition)
    added = definition["added_tokens"]
    if sizes is not None and not any(each["lstrip"] or each["rstrip"] for each in added):  # these take in spaces
        return int(sizes.max())
    vocabulary = definition["model"]["vocab"]
    entries = vocabulary if isinstance(vocabulary, dict) else (entry for entry, _ in vocabulary)
    return _GENEROUS * max(len(entry.encode()) for entry in (*entries, *(each["content"] for each in added)))


class CheckpointWatcher:
    """A thread that looks for a newer checkpoint every few seconds, loads it and hands it to the worker.

    Args:
        config: of the run, as the server was started with it.
        worker: who gets the models.
        log: told what was taken up, and what could not be.
        chat_template: as for `load_served`.
    """

    def __init__(
        self, config: Config, worker: Worker, log: Callable[[str], None], chat_template: Path | None = None
    ) -> None:
        self._config, self._worker, self._log = config, worker, log
        self._chat_template = chat_template
        self._checkpoints = Checkpoints.of_run(config.run.dir)
        self._taken = worker.served.fingerprint
        self._bad: tuple[str, float] | None = None  # what could not be loaded, and when
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.error: str | None = None
        """Why the newest checkpoint is not served; None if it is."""

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Stop looking, and wait until a checkpoint that is being loaded is there."""
        self._ended.set()
        self._thread.join(_AGAIN_SECONDS)

    def _run(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            self.look()

    def look(self) -> None:
        """Take up the latest checkpoint, if there is another one."""
        if self._worker.is_changing:  # memory has room for two
            return
        fingerprint = ""
        try:
            latest = self._checkpoints.latest()
            if latest is None:
                raise UserError(f"{self._checkpoints.folder} has no checkpoint any more")
            fingerprint = latest.fingerprint
            if fingerprint == self._taken:
                self.error, self._bad = None, None
                return
            if self._bad is not None and self._bad[0] == fingerprint and time.monotonic() < self._bad[1]:
                return
            served = load_served(self._config, latest.step, self._chat_template)
            if served.tokenizer.fingerprint != self._worker.served.tokenizer.fingerprint:
                raise UserError(f"{latest.path} has another tokenizer; restart the server")
        except Exception as error:  # damaged, removed while it was read, out of memory: the present one stays
            words = str(error) if isinstance(error, (UserError, *UNREADABLE)) else f"{type(error).__name__}: {error}"
            if words != self.error:
                self._log(f"cannot load a new checkpoint, still serves step {self._worker.served.step}: {words}")
            self.error, self._bad = words[:2000], (fingerprint, time.monotonic() + _AGAIN_SECONDS)
            return
        self._taken, self.error, self._bad = served.fingerprint, None, None
        self._worker.take_up(served)
        self._log(f"now serves step {served.step} ({served.tokens:,} tokens)")
