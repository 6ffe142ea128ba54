"""What can go wrong at the API server, as types."""

from __future__ import annotations

from llmtrain_operator.runtime.backend import BackendError


class ApiError(BackendError):
    """The API server refused or failed; `status` is the HTTP status, 0 where there was no answer."""

    def __init__(self, message: str, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message, retry_after)
        self.status = status


class UnreachableError(ApiError):
    """No answer came: refused, dropped, or timed out. What was asked may or may not have happened."""


class NotFoundError(ApiError):
    """404."""


class ConflictError(ApiError):
    """409: it exists already, or it is not the object (version, uid) it was taken for."""


class GoneError(ApiError):
    """410: the version or continue token is too old; list anew."""


class InvalidError(ApiError):
    """400 or 422: the object breaks a rule; trying again cannot help until it changes."""


class ForbiddenError(ApiError):
    """401 or 403: no permission, or a quota or an admission policy says no."""


class ThrottledError(ApiError):
    """429: asked too often; `retry_after` says when to come again."""


class ServerError(ApiError):
    """5xx."""


_BY_STATUS: dict[int, type[ApiError]] = {
    400: InvalidError,
    401: ForbiddenError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    422: InvalidError,
    429: ThrottledError,
}


def error_for(status: int, message: str, retry_after: float | None) -> ApiError:
    """Return the typed error for an HTTP status."""
    kind = _BY_STATUS.get(status, ServerError if status >= 500 else ApiError)
    return kind(message, status, retry_after)
