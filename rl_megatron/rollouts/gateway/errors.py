"""`RequestRefused`: an error that the gateway answers in the format of OpenAI's API."""

from __future__ import annotations

from typing import Any

_MOST_CHARACTERS = 1000  # of a message, which may show a value of the request


class RequestRefused(Exception):
    """A request that is answered with an error.

    Attributes:
        status: The HTTP status.
        message: What is wrong, and what to change.
        param: The parameter that it is about, or None.
        code: A word for programs, or None.
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        message = message if len(message) <= _MOST_CHARACTERS else f"{message[:_MOST_CHARACTERS]}…"
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
