"""The thread that drives the model: requests wait in a bounded queue, and what it makes goes back to the event loop."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pipeline.common.errors import UserError
from pipeline.data.tokenization.chat_prompts import ChatPrompts
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.eval.generation.batch import GeneratedText, GenerationBatch, Token
from pipeline.eval.generation.sampling import Sampling
from pipeline.eval.server.refusal import Refusal
from pipeline.train.model.decoder import Decoder

MOST_UNREAD = 2**14
"""Events of a request that wait for its client to read on."""


@dataclass(frozen=True)
class Served:
    """A model that is in memory, and where it is from."""

    model: Decoder
    tokenizer: Tokenizer
    bytes_of_a_token: int
    """Bytes of text, as UTF-8, that a token stands for at most."""
    run: str
    """Name of the run folder."""
    step: int | None
    """Step of the checkpoint; None for weights in a folder."""
    tokens: int | None
    """Trained on so far; None where it is not known."""
    fingerprint: str
    """Fingerprint of the checkpoint, or of the weights in a folder."""
    loaded_at: float
    """Seconds since 1970."""
    average: bool = False
    """True for the moving average of the weights."""
    folder: str | None = None
    """Name of the folder of the weights; None for a checkpoint."""
    chat: ChatPrompts | None = None
    """For conversations; None if there is no chat template."""
    chat_problem: str | None = None
    """Why the chat template beside the weights cannot be used."""

    @property
    def id(self) -> str:
        """Run and step, as `model` of a request can name them; for weights in a folder run and fingerprint."""
        return f"{self.run}@weights-{self.fingerprint}" if self.step is None else f"{self.run}@step-{self.step}"

    @property
    def title(self) -> str:
        """Name and amount of training, for the log."""
        folder = "" if self.folder is None else f" of {self.folder}"
        average = ", moving average" if self.average else ""
        tokens = "" if self.tokens is None else f" ({self.tokens:,} tokens)"
        return f"{self.id}{folder}{average}{tokens}"


@dataclass(frozen=True)
class TextRequest:
    """A text that is to be continued."""

    prompt_ids: Sequence[int]
    sampling: Sampling


@dataclass(frozen=True)
class Event:
    """Progress of one text of a request since its last event."""

    index: int
    """Number of the text in the request."""
    served: Served
    piece: GeneratedText
    prompt: tuple[Token, ...]
    """In the first event of a text with `prompt_logprobs`: its prompt."""


@dataclass
class Ticket:
    """A request's texts, from the queue to their ends. The event loop that submitted it reads `events`."""

    texts: Sequence[TextRequest]
    step: int | None
    """Only this step of the run will do."""
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event | Refusal] = field(default_factory=asyncio.Queue)
    dropped: bool = False
    """Nobody waits for it any more."""


class Worker:
    """One thread that continues the texts of all requests, as many together as there are slots.

    Args:
        served: the first model.
        slots: texts that are continued together.
        max_length: tokens of a text, its prompt's and new ones.
        queue: texts that may wait.
        report: told what went wrong inside, in words.
    """

    def __init__(
        self, served: Served, *, slots: int, max_length: int, queue: int, report: Callable[[str], None]
    ) -> None:
        self.served = served
        self.slots, self.max_length, self.queue = slots, max_length, queue
        self.error: str | None = None
        """Why the last forward pass failed; None as soon as one has succeeded again."""
        self.dead: str | None = None
        """Why the thread has ended before its time; None while it works."""
        self._report = report
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Ticket, int]] = deque()
        self._next: Served | None = None
        self._deadline: float | None = None  # set when it is to end
        # Of the thread alone:
        self._batch = self._new_batch()
        self._running: dict[int, tuple[Ticket, int]] = {}
        self._begun: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Texts in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Texts in a slot."""
        return len(self._running)

    @property
    def is_changing(self) -> bool:
        """True if another model waits for texts to end on the present one."""
        return self._next is not None

    def submit(self, texts: Sequence[TextRequest], step: int | None = None) -> Ticket:
        """Queue the texts of a request, all or none; called in an event loop.

        Args:
            texts: they become events with their index.
            step: refuse them if another step of the run is in memory when their turn comes.

        Raises:
            Refusal: the queue is full, or the server ends.
        """
        ticket = Ticket(texts, step, asyncio.get_running_loop())
        with self._changed:
            self.check_room(len(texts))
            self._waiting.extend((ticket, index) for index in range(len(texts)))
            self._changed.notify()
        return ticket

    def check_room(self, texts: int) -> None:
        """Check that there is room in the queue for `texts` more.

        Raises:
            Refusal: the queue is full, or the server ends.
        """
        with self._changed:
            if self.dead is not None or self._deadline is not None:
                raise self._gone()
            if len(self._waiting) + texts > self.queue:
                raise Refusal(
                    429,
                    f"the queue is full: {len(self._waiting)} texts wait and serve.queue is {self.queue}; try again "
                    "later",
                )

    def drop(self, ticket: Ticket) -> None:
        """Nobody waits for a request any more: what is left of it makes room for others."""
        with self._changed:
            if ticket.dropped:
                return
            ticket.dropped = True
            self._waiting = deque(entry for entry in self._waiting if entry[0] is not ticket)
            self._changed.notify()

    def take_up(self, served: Served) -> None:
        """Serve another model as soon as the texts that are being continued have ended on the present one."""
        with self._changed:
            self._next = served
            self._changed.notify()

    def close(self, grace: float) -> None:
        """Refuse what comes and what waits; texts that are being continued have `grace` seconds left."""
        with self._changed:
            self._deadline = min(self._deadline or math.inf, time.monotonic() + grace)
            refused, self._waiting = self._waiting, deque()
            self._changed.notify()
            for ticket in {id(ticket): ticket for ticket, _ in refused}.values():
                self._send(ticket, [self._gone()])

    def wait(self, timeout: float) -> bool:
        """Wait until it has ended after `close`; whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self._fail(self._gone())
        except BaseException as error:  # a mistake of ours: say it to all who wait, and on /health
            self._report(traceback.format_exc())
            with self._changed:
                self.dead = f"the model's thread has ended ({_words(error)}); restart the server"
                self._running.update((-1 - number, entry) for number, entry in enumerate(self._waiting))
                self._waiting.clear()
            self._fail(Refusal(503, self.dead))

    def _turn(self) -> bool:
        """Wait for something to do, and do it; False at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting or self._running or self._next is not None or self._deadline is not None
            )
            if self._deadline is not None and (not self._running or time.monotonic() > self._deadline):
                return False
            if self._next is not None and not self._running:
                self.served, self._next = self._next, None
                self._batch = self._new_batch()
            for key in [key for key, (ticket, _) in self._running.items() if ticket.dropped]:
                self._batch.drop(key)
                self._forget(key)
            # Nothing new begins on a model that is about to go.
            count = 0 if self._next is not None else min(self._batch.free, len(self._waiting))
            begin = [self._waiting.popleft() for _ in range(count)]
        for ticket, index in begin:
            self._begin(ticket, index)
        if self._running:
            self._step()
        return True

    def _begin(self, ticket: Ticket, index: int) -> None:
        if ticket.step not in (None, self.served.step):
            self._send(ticket, [Refusal(404, f"step {ticket.step} was replaced by step {self.served.step}", "model")])
            return
        wanted = ticket.texts[index]
        try:
            key = self._batch.start(wanted.prompt_ids, wanted.sampling)
        except UserError as error:
            self._send(ticket, [Refusal(422, str(error), "prompt")])
            return
        except Exception as error:
            self._failed(error)
            self._send(ticket, [Refusal(503, f"the model failed: {self.error}")])
            return
        self._running[key] = (ticket, index)

    def _step(self) -> None:
        """One forward pass for all texts that are being continued."""
        try:
            made = self._batch.step()
        except Exception as error:  # of the model or the device: those in the batch get no answer, others may
            self._failed(error)
            self._fail(Refusal(503, f"the model failed: {self.error}"))
            self._batch = self._new_batch()
            return
        self.error = None
        sent: dict[int, tuple[Ticket, list[Event | Refusal]]] = {}
        for key, piece in made:
            ticket, index = self._running[key]
            prompt: tuple[Token, ...] = ()
            if key not in self._begun:
                self._begun.add(key)
                if ticket.texts[index].sampling.prompt_logprobs:
                    prompt = self._batch.prompt_tokens(key)
            sent.setdefault(id(ticket), (ticket, []))[1].append(Event(index, self.served, piece, prompt))
            if piece.finish is not None:
                self._forget(key)
        for ticket, events in sent.values():
            self._send(ticket, events)

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, UserError):
            self._report("".join(traceback.format_exception(error)))
        self.error = _words(error)

    def _forget(self, key: int) -> None:
        del self._running[key]
        self._begun.discard(key)

    def _fail(self, refusal: Refusal) -> None:
        """End all texts that are being continued."""
        for ticket in {id(ticket): ticket for ticket, _ in self._running.values()}.values():
            self._send(ticket, [refusal])
        self._running.clear()
        self._begun.clear()

    def _gone(self) -> Refusal:
        return Refusal(503, self.dead or "the server is shutting down")

    def _new_batch(self) -> GenerationBatch:
        return GenerationBatch(self.served.model, self.served.tokenizer, slots=self.slots, max_length=self.max_length)

    def _send(self, ticket: Ticket, events: Sequence[Event | Refusal]) -> None:
        """Hand events over to the loop that waits for them."""

        def put() -> None:
            for event in events:
                ticket.events.put_nowait(event)
            if ticket.events.qsize() > MOST_UNREAD and not ticket.dropped:
                self.drop(ticket)
                while not ticket.events.empty():
                    ticket.events.get_nowait()
                ticket.events.put_nowait(Refusal(408, f"the client is {MOST_UNREAD} tokens behind"))

        if not ticket.dropped:
            with suppress(RuntimeError):  # a loop that is closed has nobody who waits
                ticket.loop.call_soon_threadsafe(put)


def _words(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip().split("\n", maxsplit=1)[0][:300]
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
