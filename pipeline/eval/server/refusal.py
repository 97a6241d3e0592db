"""Refusals of requests: a status, a message that names the field, and its form in either interface."""

from __future__ import annotations

from typing import Any

_CODES = {401: "invalid_api_key", 404: "not_found", 429: "queue_full"}
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}


class Refusal(Exception):
    """A request that gets no text.

    Args:
        status: of HTTP.
        message: names the field, its value and the limit.
        field: of the body.
        closes: whether the connection ends with it, because nobody can say where the next request would begin.
    """

    def __init__(self, status: int, message: str, field: str | None = None, *, closes: bool = False) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.closes = status, message, field, closes

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {"Connection": "close"} if self.closes else _HEADERS.get(self.status, {})

    def body(self, path: str) -> dict[str, Any]:
        """JSON of the answer: OpenAI's form, but for Megatron's route, where it is a message and a field."""
        if path == "/api":
            return {"message": self.message, "field": self.field}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        code = "model_not_found" if (self.status, self.field) == (404, "model") else _CODES.get(self.status)
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": code}}
