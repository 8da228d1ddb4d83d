"""Fuzz targets of the server's wire: each takes bytes, and raises only where the server is at fault."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.server import ServerState

from bench.serving.wire_overhead import NoModel
from stoker.records import Manifest
from stoker.serving.grpc import inference_pb2, messages
from stoker.serving.grpc.messages import parsed
from stoker.serving.http.bodies import decode, decode_raw
from stoker.serving.http.connection import MOST_PIPELINED, uvicorn_config
from stoker.serving.protocol import fit
from stoker.serving.refusals import NotFound, Refusal
from stoker.serving.service import InFlight, RepositoryEntry, RequestLimits, ServerContext


class _Whole(NoModel):
    """The same for every page: what is not there is refused as the real service refuses it."""

    def is_ready(self) -> bool:
        """Always."""
        return True

    def is_model_ready(self, model: str, version: str = "") -> bool:
        """That of the one model."""
        return model == "digits" and version in {"", "1"}

    def manifest(self, model: str, version: str = "") -> Manifest:
        """The model's."""
        if not self.is_model_ready(model, version):
            raise NotFound(f"there is no model {model[:40]!r}, version {version[:40]!r}")
        return self.fixed

    def versions(self, model: str) -> tuple[str, ...]:
        """One."""
        return ("1",)

    def config(self, model: str, version: str = "") -> dict[str, str]:
        """As much as a page needs."""
        return {"name": self.manifest(model, version).name}

    def statistics(self, model: str = "", version: str = "") -> list[dict[str, str]]:
        """None were counted."""
        return []

    def count_refusal(self, model: str, refusal: Refusal) -> None:
        """Nothing is counted."""

    def index(self, *, ready_only: bool = False) -> tuple[RepositoryEntry, ...]:
        """The model."""
        return (RepositoryEntry(name="digits", version="1", state="READY", reason=""),)


_MODEL = NoModel().fixed
_LIMITS = RequestLimits(body_bytes=100_000, header_bytes=4096)
_PARSE = inference_pb2.ModelInferRequest.FromString
_TURNS = 20


class _Socket(asyncio.Transport):
    """Takes what is written, until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self._is_closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 5) if name in {"peername", "sockname"} else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no buffer."""

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._is_closing

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, list_of_data: Any) -> None:
        self.written += b"".join(list_of_data)

    def pause_reading(self) -> None:
        """Everything comes anyway."""

    def resume_reading(self) -> None:
        """Likewise."""

    def close(self) -> None:
        self._is_closing = True

    abort = close


async def _connection(data: bytes) -> None:
    edge = ServerContext(service=_Whole(), limits=_LIMITS, in_flight=InFlight(200_000))  # type: ignore[arg-type]
    config = uvicorn_config(edge)
    config.load()
    state, end = ServerState(), _Socket()
    connection: Any = config.http_protocol_class(config=config, server_state=state, app_state={})
    connection.connection_made(end)
    size = 1 + data[0] * 16 if data else 1  # the first byte says how the others are cut
    for start in range(1, len(data), size):
        if end.is_closing():
            break
        connection.data_received(data[start : start + size])
        assert len(connection.pipeline) <= MOST_PIPELINED
        assert edge.in_flight.num_bytes <= edge.in_flight.most_bytes
        await asyncio.sleep(0)
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    connection.connection_lost(None)
    for task in list(state.tasks):
        task.cancel()
    if state.tasks:
        await asyncio.wait(set(state.tasks), timeout=5)
    assert not state.tasks, "a request outlived its connection"
    assert not edge.in_flight.num_bytes, f"{edge.in_flight.num_bytes} bytes are still counted"
    assert not edge.in_flight.connections, "the connection is still counted"
    assert not end.written or end.written.startswith(b"HTTP/1.1 "), f"answered {bytes(end.written[:100])!r}"
    assert b"HTTP/1.1 500 " not in end.written, f"answered {bytes(end.written[:300])!r}"


def fuzz_http_connection(data: bytes) -> None:
    """What comes over a connection of HTTP, cut into pieces: every request is answered or refused, nothing is left."""
    with asyncio.Runner() as runner:
        runner.run(_connection(data))


def fuzz_rest_body(data: bytes) -> None:
    """A body of REST; its first two bytes say how much of it is JSON (0: all is one tensor, 65535: all is JSON)."""
    length = int.from_bytes(data[:2], "little")
    try:
        if length == 0:
            request, _ = decode_raw(data[2:], manifest=_MODEL, model="digits")
        else:
            request, _ = decode(data[2:], json_bytes=None if length == 65535 else length, model="digits")
        fit(request, _MODEL, max_rows=8)
    except Refusal:
        return


def fuzz_grpc_frames(data: bytes) -> None:
    """Messages in gRPC's frames (a byte for compression, four for the length): parsed, decoded, fitted to a model."""
    start = 0
    while start + 5 <= len(data):
        size = int.from_bytes(data[start + 1 : start + 5], "big")
        message, start = data[start + 5 : start + 5 + size], start + 5 + size
        try:
            fit(messages.decode(parsed(message, _PARSE)), _MODEL, max_rows=8)
        except Refusal:
            continue


TARGETS = {"http_connection": fuzz_http_connection, "rest_body": fuzz_rest_body, "grpc_frames": fuzz_grpc_frames}
