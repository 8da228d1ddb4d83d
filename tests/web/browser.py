"""Asks the page's application without a network, as a browser or a program would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from stoker.web.server import Ui, UiOptions

TOKEN = "0123456789abcdef0123"  # noqa: S105 - of these tests
PORT = 8420


@dataclass
class Answer:
    """Status, headers by lower-case name, and body."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def ui_of(*roots: Path, **options: Any) -> Ui:
    """The page of these folders, which have been looked at once."""
    ui = Ui(UiOptions(roots=roots, token=TOKEN, port=PORT, **options))
    ui.index.scan()
    ui._is_scanned.set()
    return ui


async def asked(
    application: Any, address: str, *, method: str = "GET", token: str | None = TOKEN, body: bytes = b"", **headers: str
) -> Answer:
    """The answer to one request; `headers` are named with underscores."""
    path, _, query = address.partition("?")
    named = {"host": f"127.0.0.1:{PORT}", **{name.replace("_", "-"): value for name, value in headers.items()}}
    if token is not None:
        named.setdefault("authorization", f"Bearer {token}")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in named.items()],
        "client": ("127.0.0.1", 5),
        "server": ("127.0.0.1", PORT),
    }
    status, found, parts = 0, {}, []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, found
        if message["type"] == "http.response.start":
            status = message["status"]
            found = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            parts.append(message.get("body", b""))

    await application(scope, receive, send)
    return Answer(status, found, b"".join(parts))


def ask(ui: Ui, address: str, **options: Any) -> Answer:
    """One request to the page in an event loop of its own."""
    return asyncio.run(asked(ui.application(), address, **options))


async def streamed(
    ui: Ui, run: str, offset: int, enough: Callable[[list[tuple[str, Any, int]]], bool]
) -> list[tuple[str, Any, int]]:
    """Events of a stream until they are `enough`: kind, document, id."""
    found: list[tuple[str, Any, int]] = []
    stream = ui._stream(ui.index.rows[run], "", offset, -1)
    looks = asyncio.create_task(ui._keep_looking())
    try:
        async with asyncio.timeout(60):
            async for piece in stream:
                for block in piece.decode().split("\n\n"):
                    fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
                    if "data" in fields:
                        found.append((fields["event"], json.loads(fields["data"]), int(fields.get("id", -1))))
                if enough(found):
                    return found
    finally:
        looks.cancel()
        await stream.aclose()
    raise AssertionError("the stream ended")


Stream = Callable[..., Awaitable[list[tuple[str, Any, int]]]]
