"""Asks an ASGI application without a socket."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import orjson

from stoker.serving.http.application import Application


@dataclass(frozen=True)
class Answered:
    """What came back; names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, which must be JSON and said to be."""
        assert self.headers["content-type"] == "application/json"
        return orjson.loads(self.body)

    @property
    def error(self) -> str:
        """The message of a refusal."""
        assert list(self.json) == ["error"]
        return self.json["error"]


async def ask(
    application: Application,
    method: str,
    path: str,
    *,
    body: Any = b"",
    pieces: tuple[bytes, ...] | None = None,
    headers: dict[str, str] | None = None,
    goes_away: bool = False,
) -> Answered:
    """One request; a `body` that is no bytes goes as JSON. After `pieces` of one nothing comes, or it `goes_away`."""
    content = body if isinstance(body, bytes) else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    parts = [content] if pieces is None else list(pieces)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not parts:
            if not goes_away:
                await asyncio.Event().wait()  # a slow client: nothing ever comes
            return {"type": "http.disconnect"}
        piece = parts.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(parts) or pieces is not None}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
    }
    await application(scope, receive, send)
    start, *rest = sent
    answered = {name.decode(): value.decode() for name, value in start["headers"]}
    content = b"".join(message["body"] for message in rest)
    assert answered["content-length"] == str(len(content))
    return Answered(start["status"], answered, content)
