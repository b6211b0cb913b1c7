"""Errors in OpenAI's format: {"error": {message, type, param, code}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """An error response. `param` names the field of the request that caused it."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's name for the kind of error."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        """The body of the answer."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def refused(param: str, message: str, code: str | None = None) -> ApiError:
    """The error for a request that cannot be answered; `param` is the field to correct."""
    return ApiError(400, message, param, code)


def busy(message: str, seconds: float) -> ApiError:
    """The error for an overloaded server: the client may try again after some seconds."""
    wait = str(max(1, min(60, round(seconds))))
    return ApiError(429, message, code="too_many_requests", headers={"Retry-After": wait})


def too_slow(seconds: float) -> ApiError:
    """The error for an answer that took longer than the server allows."""
    return ApiError(504, f"The answer took longer than the {seconds:g} s that this server allows.", code="timeout")


def internal() -> ApiError:
    """The error for a bug of ours. Details go to the log, not to the client."""
    return ApiError(500, "The server made a mistake while answering; its log says more.", code="internal_error")
