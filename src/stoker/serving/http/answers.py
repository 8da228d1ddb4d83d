"""Answers of HTTP: status, headers, body; every refusal is `{"error": …}`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import orjson

from stoker.errors import StokerError
from stoker.serving.http.exchange import Send
from stoker.serving.problems import Refusal
from stoker.serving.wire import Encoded, compression

Headers = tuple[tuple[bytes, bytes], ...]

_JSON = (b"content-type", b"application/json")
_BINARY = (b"content-type", b"application/octet-stream")
_CLOSE = (b"connection", b"close")
_AFTER_STATUS: dict[int, Headers] = {401: ((b"www-authenticate", b"Bearer"),), 408: (_CLOSE,)}


class Answer(NamedTuple):
    """What goes back; `reason` and `error` are a refusal's, for the log."""

    status: int
    body: bytes
    headers: Headers = (_JSON,)
    reason: str = ""
    error: str = ""


def document(value: Any, status: int = 200) -> Answer:
    """A JSON document."""
    return Answer(status, orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))


def inference(encoded: Encoded, accept_encoding: str = "") -> Answer:
    """An inference response, compressed where the client wants that and it can pay."""
    body, json_bytes = encoded
    headers: Headers = (_JSON,)
    if json_bytes is not None:
        headers = (_BINARY, (b"inference-header-content-length", str(json_bytes).encode()))
    encoding = compression.asked_for(accept_encoding)
    if encoding and len(body) >= compression.LEAST_BYTES:
        return Answer(200, compression.compress(body, encoding), (*headers, (b"content-encoding", encoding.encode())))
    return Answer(200, body, headers)


def refusal(error: StokerError, *, extra: Headers = ()) -> Answer:
    """What is said instead of an answer, with the status that the error's kind has."""
    headers: Headers = (_JSON, *_AFTER_STATUS.get(error.http_status, ()), *extra)
    reason = "internal"
    if isinstance(error, Refusal):
        reason = error.reason
        if error.retry_after_s is not None:
            headers = (*headers, (b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    text = str(error)
    return Answer(error.http_status, orjson.dumps({"error": text}), headers, reason, text)


async def send(answer: Answer, to: Send) -> None:
    """Hand it to the ASGI server."""
    length = (b"content-length", str(len(answer.body)).encode())
    await to({"type": "http.response.start", "status": answer.status, "headers": [*answer.headers, length]})
    await to({"type": "http.response.body", "body": answer.body})
