"""Refusals: why a request is not answered, each with its HTTP and gRPC status."""

from __future__ import annotations

from typing import ClassVar

from stoker.errors import ServiceError

MOST_CHARS = 600
"""Limit on a message; the middle of a longer one is left out, since names in it come from callers."""
_MOST_OF_A_NAME = 80


def shortened(name: str) -> str:
    """A name that a caller sent, in quotes; for a long one its beginning and its length.

    >>> shortened("digits"), shortened("1" * 5000)[-22:]
    ("'digits'", "1' … (5000 characters)")
    """
    if len(name) <= _MOST_OF_A_NAME:
        return repr(name)
    return f"{name[:_MOST_OF_A_NAME]!r} … ({len(name)} characters)"


class Refusal(ServiceError):
    """A request that is not answered; `reason` labels it in the metrics. Subclasses give the statuses."""

    reason: ClassVar[str] = "internal"
    http_status = 500
    grpc_status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        if len(message) > MOST_CHARS:
            message = f"{message[: MOST_CHARS // 2]} … {message[-MOST_CHARS // 2 :]}"
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BadRequest(Refusal):
    """The request is malformed, or does not fit the model's inputs."""

    reason = "bad_request"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class Unauthorized(Refusal):
    """The request has no API key, or an unknown one."""

    reason = "unauthorized"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class Forbidden(Refusal):
    """A web page of another site sent the request through a browser."""

    reason = "forbidden"
    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class NotFound(Refusal):
    """There is no such model, version or page."""

    reason = "not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class NotAllowed(Refusal):
    """The page exists for another HTTP method."""

    reason = "not_allowed"
    http_status = 405
    grpc_status = "UNIMPLEMENTED"


class RequestTimeout(Refusal):
    """The body did not arrive in time."""

    reason = "too_slow"
    http_status = 408
    grpc_status = "DEADLINE_EXCEEDED"


class TooLarge(Refusal):
    """The body, the rows or a dimension exceed a limit."""

    reason = "too_large"
    http_status = 413
    grpc_status = "RESOURCE_EXHAUSTED"


class WrongFormat(Refusal):
    """The body has an unknown compression or content type."""

    reason = "wrong_format"
    http_status = 415
    grpc_status = "INVALID_ARGUMENT"


class QueueFull(Refusal):
    """The queue, or the caller's share of it, is full."""

    reason = "queue_full"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"


class OverCapacity(Refusal):
    """The bodies of all requests in flight have reached the server's limit."""

    reason = "crowded"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"


class Failed(Refusal):
    """The engine could not compute this request."""

    reason = "failed"


class Unsupported(Refusal):
    """A part of the protocol that this server does not have."""

    reason = "unsupported"
    http_status = 501
    grpc_status = "UNIMPLEMENTED"


class Unavailable(Refusal):
    """The model or the server is not ready, or is shutting down."""

    reason = "unavailable"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class DeadlineUnreachable(Refusal):
    """The deadline is predicted to be missed; the request was not computed."""

    reason = "would_be_late"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class DeadlinePassed(Refusal):
    """The deadline passed in the queue, or could no longer be met; the request was not computed."""

    reason = "deadline_passed"
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class Cancelled(Refusal):
    """The caller has disconnected."""

    reason = "cancelled"
    http_status = 499
    grpc_status = "CANCELLED"
