"""Bodies of requests, as both interfaces have them. What we do not have is refused by name, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from pipeline.eval.generation.sampling import Sampling

MAX_TEXTS = 128
"""Texts that a request may ask for: prompts times `n`."""
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_IDS = 2**31
MAX_MESSAGES = 4096
"""Messages of a conversation."""
ROLES = ("system", "user", "assistant")
"""Roles of messages."""

Text = Annotated[str, Field(max_length=2**24)]
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=MAX_IDS)]], Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Temperature = Annotated[float, Field(ge=0, le=1000)]


class Body(BaseModel):
    """A request. Unknown fields are refused, and types are exact: `true` is not a number."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    _neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields of the interface that this server does not have -> values that change nothing, besides null."""

    @model_validator(mode="before")
    @classmethod
    def _knows_its_fields(cls, value: Any) -> Any:
        # pydantic would list each of the unknown ones, of which a body can have a hundred thousand.
        unknown = next((key for key in value if key not in cls.model_fields), None) if isinstance(value, dict) else None
        if unknown is not None:
            raise ValueError(f"{_plain(unknown)}: there is no such field")
        return value

    @model_validator(mode="after")
    def _has_only_what_we_do(self) -> Body:
        for name, neutral in self._neutral.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                allowed = " or ".join(repr(each) for each in neutral) or "null"
                shown = _plain(str(value)) if isinstance(value, str | int | float) else "this"
                raise ValueError(f"{name}: {shown} is not supported here; leave it out, or give {allowed}")
        return self


class StreamOptions(Body):
    """`stream_options` of OpenAI's interface."""

    include_usage: bool = False
    """Count tokens in a last event."""
    include_obfuscation: bool = False
    """Not done here."""
    _neutral = {"include_obfuscation": (False,)}


class Sampled(Body):
    """Fields of both of OpenAI's routes, and `top_k`, `min_p`, `repetition_penalty` as vLLM calls them."""

    model: str | None = Field(default=None, max_length=1000)
    """A name of /v1/models; by default what is there."""
    max_tokens: int | None = Field(default=None, ge=0)
    """New tokens at most."""
    temperature: Temperature | None = 1.0
    """Divides the logits; 0 takes the most probable token each time."""
    top_p: float | None = Field(default=1.0, gt=0, le=1)
    """Draw from the smallest set of tokens whose probability reaches this."""
    top_k: int | None = Field(default=None, ge=-1)
    """Draw from the k most probable tokens; 0 and -1: from all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Draw from tokens with at least this share of the largest probability."""
    repetition_penalty: float | None = Field(default=1.0, ge=0.01, le=100)
    """Divides positive logits of tokens that were there, and multiplies negative ones."""
    n: int | None = Field(default=1, ge=1, le=MAX_TEXTS)
    """Texts for each prompt."""
    stream: bool | None = False
    """Server-sent events, as the text comes."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    """The text ends before the first of these."""
    seed: Seed | None = None
    """Seed of the draws; choice i has seed + i. By default a new one."""
    user: str | None = Field(default=None, max_length=1000)
    """Who asks; not looked at."""
    presence_penalty: float | None = None
    """Not supported: 0."""
    frequency_penalty: float | None = None
    """Not supported: 0."""
    logit_bias: dict[str, float] | None = None
    """Not supported: empty."""
    _neutral = {"presence_penalty": (0,), "frequency_penalty": (0,)}

    @field_validator("logit_bias", mode="plain", json_schema_input_type=dict[str, float] | None)
    @classmethod
    def _logit_bias(cls, value: Any) -> Any:
        if value not in (None, {}):
            raise ValueError("is not supported here; leave it out, or give {}")
        return value

    @field_validator("stop", mode="wrap")
    @classmethod
    def _stop(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        wrong = ValueError(f"must be a text of 1 to 256 characters, or a list of at most {MAX_STOPS}")
        if isinstance(value, list) and len(value) > MAX_STOPS:  # pydantic would look at each
            raise wrong
        try:
            return handler(value)
        except ValidationError:
            raise wrong from None

    @model_validator(mode="after")
    def _streams(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream: true")
        return self

    @property
    def counts_stream(self) -> bool:
        """True if a last event counts the tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, seed: int, most: int, **more: Any) -> Sampling:
        """The settings of one text.

        Args:
            seed: Of its draws.
            most: New tokens at most.
            more: Further settings, of the route.
        """
        return Sampling(
            max_tokens=most,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=None if self.top_k in (None, 0, -1) else self.top_k,
            top_p=None if self.top_p in (None, 1) else self.top_p,
            min_p=self.min_p or None,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            seed=seed,
            **more,
        )


class Completion(Sampled):
    """`POST /v1/completions`."""

    prompt: Text | list[Text] | Ids | list[Ids] = ""
    """A text or several, or ids of tokens."""
    max_tokens: int | None = Field(default=16, ge=0)
    """New tokens at most; 0 only with `echo`."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Log probabilities of the tokens, and of the N most probable ones."""
    echo: bool | None = False
    """Begin with the prompt."""
    best_of: int | None = None
    """Not supported: 1."""
    suffix: str | None = None
    """Not supported: empty."""
    _neutral = {**Sampled._neutral, "best_of": (1,), "suffix": ("",)}

    # In place of pydantic, which would list each of a million wrong entries for each kind of prompt.
    @field_validator("prompt", mode="plain", json_schema_input_type=Text | list[Text] | Ids | list[Ids])
    @classmethod
    def _prompt(cls, value: Any) -> Any:
        several = isinstance(value, list) and value and isinstance(value[0], (str, list))
        if several and len(value) > MAX_TEXTS:
            raise ValueError(f"has {len(value)} prompts; at most {MAX_TEXTS} are allowed")
        for each in value if several else [value]:
            if not (_is_text(each) or _are_ids(each)) or (several and type(each) is not type(value[0])):
                raise ValueError(
                    "must be a text, a list of texts, a list of token ids, or a list of such lists; UTF-8, lists not "
                    "empty"
                )
        return value

    @model_validator(mode="after")
    def _together(self) -> Completion:
        texts = len(self.prompts) * (self.n or 1)
        if texts > MAX_TEXTS:
            raise ValueError(f"n: {self.n} for each prompt makes {texts} texts; at most {MAX_TEXTS} are allowed")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 leaves nothing to answer; give 1 or more, or set echo")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """`prompt` as a list of texts or of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class ResponseFormat(Body):
    """`response_format` of OpenAI's interface."""

    type: str = Field(default="text", max_length=100)
    """Only `text`."""
    json_schema: dict[str, Any] | None = None
    """Not supported."""
    _neutral = {"type": ("text",), "json_schema": ()}


class ChatCompletion(Sampled):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, str]]
    """The conversation: `role` (system, user or assistant) and `content` (a text, or parts that are texts)."""
    max_tokens: int | None = Field(default=None, ge=1)
    """New tokens at most; by default as many as there are positions left."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The newer name of `max_tokens`."""
    logprobs: bool | None = False
    """Log probabilities of the tokens."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Those of the N most probable tokens; only with `logprobs`."""
    response_format: ResponseFormat | None = None
    """Only a text."""
    tools: Any = None
    """Not supported: a call would have to be read out of the text."""
    tool_choice: Any = None
    """Not supported: `none`."""
    parallel_tool_calls: bool | None = None
    """Without tools it changes nothing."""
    functions: Any = None
    """Not supported."""
    function_call: Any = None
    """Not supported: `none`."""
    modalities: Any = None
    """Not supported."""
    audio: Any = None
    """Not supported."""
    _neutral = {
        **Sampled._neutral,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
    }

    # In place of pydantic, which would list each wrong one of a million messages.
    @field_validator("messages", mode="plain", json_schema_input_type=list[dict[str, Any]])
    @classmethod
    def _messages(cls, value: Any) -> Any:
        if not isinstance(value, list) or not value:
            raise ValueError("must be a list of one message or more")
        if len(value) > MAX_MESSAGES:
            raise ValueError(f"has {len(value)} messages; at most {MAX_MESSAGES} are allowed")
        return [_message(number, each) for number, each in enumerate(value)]

    @model_validator(mode="after")
    def _together(self) -> ChatCompletion:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens: leave it out, as max_completion_tokens says the same")
        return self


def _message(number: int, value: Any) -> dict[str, str]:
    """A message with its content as one text."""
    if not isinstance(value, dict):
        raise ValueError(f"message {number} must be an object with role and content")
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or role not in ROLES:
        shown = _plain(role) if isinstance(role, str) else type(role).__name__
        more = "; tools are not supported here" if role in ("tool", "function") else ""
        raise ValueError(f"message {number} has the role {shown!r}; the roles are {', '.join(ROLES)}{more}")
    unknown = next((key for key, each in value.items() if key not in ("role", "content") and each is not None), None)
    if unknown is not None:
        raise ValueError(f"message {number} has {_plain(str(unknown))!r}, which is not supported here; leave it out")
    text = "".join(_part(number, each) for each in content) if isinstance(content, list) else content
    if not isinstance(text, str) or not _is_text(text):
        raise ValueError(f"message {number} needs content: a UTF-8 text, or a list of parts of the type 'text'")
    return {"role": role, "content": text}


def _part(number: int, part: Any) -> str:
    """The text of a part of a message."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and _is_text(part.get("text")) and len(part) == 2:
        return str(part["text"])
    if isinstance(kind, str) and kind != "text":
        raise ValueError(f"message {number} has a part of the type {_plain(kind)!r}; only 'text' is supported here")
    raise ValueError(f"message {number} has a part that is not {{'type': 'text', 'text': ...}}")


class Generate(Body):
    """`PUT /api`, as clients of Megatron-LM send it."""

    prompts: Annotated[list[Text], FailFast(), Field(min_length=1, max_length=MAX_TEXTS)]
    """Texts to continue."""
    tokens_to_generate: int = Field(default=64, ge=0)
    """New tokens at most; 0 with `logprobs` scores the prompts."""
    temperature: Temperature = 1.0
    """Divides the logits; 0 takes the most probable token each time."""
    top_k: int = Field(default=0, ge=0)
    """Draw from the k most probable tokens; 0: from all."""
    top_p: float = Field(default=0.0, ge=0, le=1)
    """Draw from the smallest set of tokens whose probability reaches this; 0: from all."""
    logprobs: bool = False
    """Log probabilities of all tokens but the first, those of the prompt too."""
    add_BOS: bool = False
    """Begin a document: the end-of-document token before each prompt."""
    stop_on_eol: bool = False
    """End before the first line end."""
    stop_on_double_eol: bool = False
    """End before the first empty line."""
    random_seed: int | None = Field(default=None, ge=-1, lt=2**63)
    """Seed of the draws; prompt i has seed + i. By default, and with -1, a new one."""
    no_log: bool = False
    """Keep the prompts out of the log, also with `serve.log_prompts`."""
    top_p_decay: float | None = None
    """Not supported: 0."""
    top_p_bound: float | None = None
    """Not supported: 0."""
    beam_width: int | None = None
    """Not supported."""
    length_penalty: float | None = None
    """Not supported: 1."""
    stop_token: int | None = None
    """Only the model's own end-of-document token."""
    prevent_newline_after_colon: bool | None = None
    """Not supported: false."""
    _neutral = {
        "top_p_decay": (0,),
        "top_p_bound": (0,),
        "beam_width": (),
        "length_penalty": (1,),
        "prevent_newline_after_colon": (False,),
    }

    @model_validator(mode="after")
    def _together(self) -> Generate:
        if self.tokens_to_generate == 0 and not self.logprobs:
            raise ValueError("tokens_to_generate: 0 leaves nothing to answer; give 1 or more, or set logprobs")
        return self


def _is_text(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _are_ids(value: Any) -> bool:
    if not isinstance(value, list) or set(map(type, value)) != {int}:  # which bool is not
        return False
    return bool(min(value) >= 0 and max(value) < MAX_IDS)


def problem(errors: list[Any]) -> tuple[str, str | None]:
    """Message about a body, in one line, and the field: of the first of pydantic's errors.

    The value is left out where it may be long or no text.
    """
    error = errors[0]
    place = [str(part) for part in error["loc"] if part != "body"]
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "json_invalid":
        return f"the body is not JSON ({error.get('ctx', {}).get('error', message)})", None
    if error["type"] in ("model_attributes_type", "model_type", "missing") and not place:
        return "the body must be a JSON object", None
    if not place:
        # A validator over several fields begins with the one to change.
        name, colon, _ = message.partition(": ")
        return message, name if colon and name.isidentifier() else None
    field = _plain(place[0])
    value = error.get("input")
    shown = f" (it is {value!r})" if isinstance(value, (int, float)) and abs(value) < 1e18 else ""
    inner = ".".join(part for part in place[1:] if part.isdigit())
    return f"{field}{'.' + inner if inner else ''}: {message[:1].lower()}{message[1:]}{shown}", field


def _plain(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()[:100]
