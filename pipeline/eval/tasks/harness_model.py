"""The model of an evaluation as lm-evaluation-harness wants one. Needs that package, so it is imported when it is used.

Every rank has one, which calls itself the only one: each is given all requests, and `scoring` deals the work out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from pipeline.common.errors import UserError
from pipeline.data.tokenization.chat_prompts import ChatPrompts
from pipeline.eval.engine import GenerationEngine
from pipeline.eval.scoring import Prompt, Request, Scored, continue_greedily, rolling, score, truncated

_NEW_TOKENS = 256
"""New tokens where a task does not say how many; the harness's own default."""
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks give the number of new tokens, the harness's own name first."""


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """The three kinds of requests, answered by the model of an engine. All ranks make the same calls.

    The text between special tokens is all that is encoded, as in training: a text that has the name of a special token
    in it has ordinary tokens there. Texts without a context begin after an end-of-document token.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        batch_size: int,
        progress: Callable[[str, int], AbstractContextManager[Callable[[int], None]]] = lambda what, count: nullcontext(
            lambda count: None
        ),
        chat: ChatPrompts | None = None,
    ) -> None:
        """A model for `simple_evaluate`.

        Args:
            engine: the model.
            batch_size: requests of one forward pass on one rank.
            progress: given a word and a number of requests; inside its context they are computed, and what it yields is
                told after each batch how many are done.
            chat: makes a conversation of each context; None: contexts are texts to continue.
        """
        super().__init__()
        self._engine = engine
        self._batch_size = batch_size
        self._progress = progress
        self._chat = chat
        self.truncated = Counter[str]()
        """Requests of each task whose context was longer than the model takes; only its end was used."""

    @property
    def eot_token_id(self) -> int:
        """Id of the token that closes a document."""
        return self._engine.tokenizer.end_of_document

    @property
    def max_length(self) -> int:
        """Tokens of input at once."""
        return self._engine.max_length

    @property
    def max_gen_toks(self) -> int:
        """New tokens where a task does not say."""
        return _NEW_TOKENS

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's cache of requests."""
        return self._engine.tokenizer.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template, of which the harness keeps a hash."""
        return None if self._chat is None else self._chat.template

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, up to where the answer begins."""
        if not add_generation_prompt:
            raise UserError(
                "eval.harness.apply_chat_template: a task begins the answer itself (gen_prefix), which is not "
                "supported; leave the task out"
            )
        assert self._chat is not None
        return self._chat.render(chat_history)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text; nothing is added. In a conversation the special tokens of its template count as such."""
        if self._chat is not None:
            return self._engine.tokenizer.encode_parsed(string)[0]
        return self._engine.tokenizer.encode(string)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the greedy one."""
        asked = [(request.args, *self._tokens(*request.args)) for request in requests]
        for request, (_, context, continuation) in zip(requests, asked, strict=True):
            long = bool(continuation) and len(context) + len(continuation) > self.max_length + 1
            self.truncated[request.task_name] += long
        return self._loglikelihood_tokens(asked)

    def _tokens(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of a context, at least one, and of what follows: none only where nothing does.

        They are split as the harness does it, which has no answer where no token begins after the context.
        """
        prefix = self.prefix_token_id
        text = context.rstrip()
        continuation = context[len(text) :] + continuation
        first, whole = self.tok_encode(text), self.tok_encode(text + continuation)
        if not continuation:
            return first or [prefix], []
        if not context and whole[:1] == [prefix] and len(whole) > 1:
            return whole[:1], whole[1:]
        if len(whole) > len(first):
            return first or [prefix], whole[len(first) :]
        # The end of the context and the continuation have become one token, whose probability stands for it.
        return whole[:-1] or [prefix], whole[-1:]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        # That nothing follows is certain, whatever the context.
        results = [(0.0, True)] * len(requests)
        asked = [number for number, (_, _, continuation) in enumerate(requests) if continuation]
        scored = self._score([truncated(*requests[number][1:], self.max_length) for number in asked], "likelihoods")
        for number, each in zip(asked, scored, strict=True):
            results[number] = (-each.nats, each.greedy)
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood of each whole text, in disjoint windows."""
        asked: list[Request] = []
        counts = []
        for (text,) in (request.args for request in requests):
            windows = rolling(self.tok_encode(text), self.prefix_token_id, self.max_length)
            asked += windows
            counts.append(len(windows))
        scored = iter(self._score(asked, "texts"))
        return [-sum(next(scored).nats for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """The greedy continuation of each context, up to the first stop."""
        prompts, stops = [], []
        for request in requests:
            context, options = request.args
            most, stop = self._limits(options)
            tokens = self.tok_encode(context) or [self.prefix_token_id]
            room = self.max_length - most
            self.truncated[request.task_name] += len(tokens) > room
            prompts.append(Prompt(tokens[-room:], most))
            stops.append(stop)

        ends = () if self._chat is None else self._chat.end_tokens

        def ended(number: int, tokens: list[int]) -> bool:
            return tokens[-1] in ends or any(stop in self._text(tokens) for stop in stops[number])

        with self._progress("continuations", len(prompts)) as advance:
            new = continue_greedily(self._engine, prompts, batch_size=self._batch_size, ended=ended, advance=advance)
        texts = []
        for tokens, stop in zip(new, stops, strict=True):
            text = self._text([token for token in tokens if token not in ends])
            for end in stop:
                text = text.split(end)[0]
            texts.append(text)
        return texts

    def _limits(self, options: dict[str, Any]) -> tuple[int, list[str]]:
        """New tokens at most, and the texts that end a continuation."""
        if options.get("do_sample", float(options.get("temperature") or 0) > 0):
            raise UserError(
                "eval.harness: a task samples its continuations (do_sample, temperature), but only greedy decoding is "
                "supported; leave it out, or set do_sample: false in your copy of its file (eval.harness.include_path)"
            )
        most = int(next((options[key] for key in _LIMITS if options.get(key) is not None), self.max_gen_toks))
        if most < 1:
            raise UserError(
                f"eval.harness: a task asks for {most} new tokens (max_gen_toks); set 1 or more in your copy of its "
                "file (eval.harness.include_path)"
            )
        if most >= self.max_length:
            raise UserError(
                f"eval.harness: a task asks for {most} new tokens (max_gen_toks), which must fit with the context into "
                f"{self.max_length} tokens (eval.max_length, by default train.sequence_length); raise that, or set a "
                "smaller max_gen_toks in your copy of the task's file (eval.harness.include_path)"
            )
        until = options.get("until") or []
        return most, [stop for stop in ([until] if isinstance(until, str) else until) if stop]

    def _text(self, tokens: Sequence[int]) -> str:
        """Text of new tokens, without special ones."""
        tokenizer = self._engine.tokenizer
        special = set(tokenizer.special_tokens.values())
        return tokenizer.decode([token for token in tokens if token not in special])

    def _score(self, requests: list[Request], what: str) -> list[Scored]:
        with self._progress(what, len(requests)) as advance:
            return score(self._engine, requests, batch_size=self._batch_size, advance=advance)
