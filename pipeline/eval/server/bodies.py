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

MAX_TEXTS = 128
"""Texts that a request may ask for: prompts times `n`."""
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_IDS = 2**31

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
                raise ValueError(f"{name}: {_plain(str(value))} is not supported here; leave it out, or give {allowed}")
        return self


class StreamOptions(Body):
    """`stream_options` of OpenAI's interface."""

    include_usage: bool = False
    """Count tokens in a last event."""
    include_obfuscation: bool = False
    """Not done here."""
    _neutral = {"include_obfuscation": (False,)}


class Completion(Body):
    """`POST /v1/completions`: OpenAI's fields, and `top_k`, `min_p`, `repetition_penalty` as vLLM calls them."""

    model: str | None = Field(default=None, max_length=1000)
    """A name of /v1/models; by default what is there."""
    prompt: Text | list[Text] | Ids | list[Ids] = ""
    """A text or several, or ids of tokens."""
    max_tokens: int | None = Field(default=16, ge=0)
    """New tokens at most; 0 only with `echo`."""
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
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Log probabilities of the tokens, and of the N most probable ones."""
    echo: bool | None = False
    """Begin with the prompt."""
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
    best_of: int | None = None
    """Not supported: 1."""
    logit_bias: dict[str, float] | None = None
    """Not supported: empty."""
    suffix: str | None = None
    """Not supported: empty."""
    _neutral = {
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "best_of": (1,),
        "suffix": ("",),
    }

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
    def _together(self) -> Completion:
        texts = len(self.prompts) * (self.n or 1)
        if texts > MAX_TEXTS:
            raise ValueError(f"n: {self.n} for each prompt makes {texts} texts; at most {MAX_TEXTS} are allowed")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 leaves nothing to answer; give 1 or more, or set echo")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream: true")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """`prompt` as a list of texts or of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


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
