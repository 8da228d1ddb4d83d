"""The ASGI application: each request gets one response and one log entry; refusals are `{"error": …}`.

`find` gives the page of a path, `Exchange` a request with its body under limits, `Application` the response.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

import orjson
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from stoker.errors import StokerError
from stoker.serving import protocol
from stoker.serving.http import bodies
from stoker.serving.http.bodies import Encoded, OutputForm, check_output_form, decode, decode_raw, encode, json_object
from stoker.serving.protocol import checked_parameters, classify
from stoker.serving.refusals import (
    BadRequest,
    Cancelled,
    Failed,
    NotAllowed,
    NotFound,
    OverCapacity,
    Refusal,
    RequestTimeout,
    TooLarge,
    Unavailable,
    Unsupported,
    shortened,
)
from stoker.serving.security import refuse_cross_site
from stoker.serving.service import AccessEntry, InferenceRequest, InFlight, RequestLimits, ServerContext
from stoker.units import format_bytes, format_seconds

Page = Literal[
    "server",
    "live",
    "ready",
    "models",
    "metadata",
    "model_ready",
    "config",
    "statistics",
    "infer",
    "index",
    "load",
    "unload",
    "metrics",
]
Method = Literal["GET", "POST"]

POSTED: frozenset[Page] = frozenset({"infer", "index", "load", "unload"})
ADMIN: frozenset[Page] = frozenset({"index", "load", "unload", "metrics"})
WITHOUT_KEY: frozenset[Page] = frozenset({"live", "ready", "model_ready"})
"""An orchestrator's probes have no key."""

_PAGES: dict[tuple[str, ...], Page] = {
    ("v2",): "server",
    ("v2", "health", "live"): "live",
    ("v2", "health", "ready"): "ready",
    ("v2", "models"): "models",
    ("v2", "models", "stats"): "statistics",
    ("v2", "repository", "index"): "index",
    ("metrics",): "metrics",
}
_OF_A_MODEL: dict[str, Page] = {
    "": "metadata",
    "ready": "model_ready",
    "config": "config",
    "stats": "statistics",
    "infer": "infer",
}
_OF_THE_REPOSITORY: dict[str, Page] = {"load": "load", "unload": "unload"}
_UNSUPPORTED_OF_A_MODEL = frozenset({"generate", "generate_stream", "trace"})
_MOST_KNOWN_CHARS = 256
"""Longer paths are not cached: they are no model's, and many of them would fill the memory."""
_UNSUPPORTED = frozenset({"trace", "logging", "systemsharedmemory", "cudasharedmemory"})


@dataclass(frozen=True)
class Route:
    """A page and its model; an empty `version` is the default one."""

    page: Page
    model: str = ""
    version: str = ""

    @property
    def method(self) -> Method:
        """The page's HTTP method; HEAD is treated as GET."""
        return "POST" if self.page in POSTED else "GET"


def find(path: str) -> Route:
    """The page at a percent-quoted path; segments are unquoted one by one.

    Raises:
        NotFound: there is none.
        Unsupported: the protocol has it, this server does not.
    """
    return _known(path) if len(path) <= _MOST_KNOWN_CHARS else _find(path)


def _find(path: str) -> Route:
    segments = tuple(unquote(part) for part in path.removesuffix("/").split("/")[1:])
    if page := _PAGES.get(segments):
        return Route(page)
    match segments:
        case ("v2", "models", model, "versions", version, *action) if model and version:
            return _of_a_model(path, model, version, action)
        case ("v2", "models", model, *action) if model:
            return _of_a_model(path, model, "", action)
        case ("v2", "repository", "models", model, action) if model and action in _OF_THE_REPOSITORY:
            return Route(_OF_THE_REPOSITORY[action], model)
        case ("v2", extension, *_) if extension in _UNSUPPORTED:
            raise Unsupported(f"this server does not have the extension at {shortened(path)}")
    raise NotFound(f"there is no page {shortened(path)}; the protocol's begin at /v2")


_known = lru_cache(maxsize=1024)(_find)


def _of_a_model(path: str, model: str, version: str, action: list[str]) -> Route:
    if len(action) <= 1 and (page := _OF_A_MODEL.get("".join(action))):
        return Route(page, model, version)
    if action and action[0] in _UNSUPPORTED_OF_A_MODEL:
        raise Unsupported(f"this server does not have the extension at {shortened(path)}")
    raise NotFound(f"there is no page {shortened(path)}; of a model there are ready, config, stats and infer")


Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

WORTH_A_THREAD_BYTES = 64 * 1024
"""Size above which bytes are decompressed, parsed, written or compressed on a thread instead of the event loop."""


class Exchange:
    """A request while it is answered. `scope` and `receive` are ASGI's.

    Its decompressed body, and its answer until it is sent, count in `in_flight` until `release`; then the connection
    counts what its client has not read.
    """

    __slots__ = ("_in_flight", "_receive", "_taken", "entry", "headers", "limits", "route", "scope")

    def __init__(self, scope: Scope, receive: Receive, limits: RequestLimits, in_flight: InFlight) -> None:
        self.scope = scope
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.limits = limits
        path: str = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        self.entry = AccessEntry("http", scope["method"], path)  # by name it takes twice as long
        self.route: Route | None = None
        self._taken = 0
        self._receive = receive
        self._in_flight = in_flight

    def hold(self, num_bytes: int) -> None:
        """Count bytes held for this request.

        Raises:
            OverCapacity: there is no room.
        """
        self._in_flight.take(num_bytes)
        self._taken += num_bytes

    def release(self) -> None:
        """Release all counted bytes."""
        self._in_flight.give_back(self._taken)
        self._taken = 0

    def text_headers(self) -> dict[str, str]:
        """All headers, names in lower case."""
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self.headers.items()}

    def number(self, header: bytes) -> int | None:
        """Value of a header that is a number of bytes; None if it is absent.

        Raises:
            BadRequest: it is not a whole number.
        """
        value = self.headers.get(header)
        if value is None:
            return None
        if not value.isdigit() or len(value) > 18:
            raise BadRequest(f"the header {header.decode()} must be a number of bytes, got {value[:40]!r}")
        return int(value)

    async def body(self) -> bytes:
        """The whole body, decompressed.

        Raises:
            TooLarge: it exceeds the limit, as sent or decompressed.
            OverCapacity: all bodies together exceed the server's limit.
            RequestTimeout: it did not arrive in time.
            Cancelled: the client disconnected.
            BadRequest: it is damaged.
            WrongFormat: its compression is unknown.
        """
        body = await self._read()
        self.entry.bytes_in = len(body)
        encoding = self.headers.get(b"content-encoding")
        if encoding is None:
            return body
        name, most = encoding.decode("latin-1"), self.limits.body_bytes
        if len(body) < WORTH_A_THREAD_BYTES:
            whole = bodies.decompress(body, name, most_bytes=most)
        else:
            whole = await asyncio.to_thread(bodies.decompress, body, name, most_bytes=most)
        self.hold(len(whole))
        return whole

    async def _read(self) -> bytes:
        if isinstance(self._receive, BufferedBody) and self._receive.is_whole:  # nearly always, and without a timer
            return self._bounded([(await self._receive())["body"]])
        announced = self.number(b"content-length")
        if announced is not None and announced > self.limits.body_bytes:
            raise self._too_large(announced)
        try:
            async with asyncio.timeout(self.limits.body_s):
                pieces: list[bytes] = []
                size = 0
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise Cancelled(f"the client went away after {size} bytes of the body")
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if size > self.limits.body_bytes or not message.get("more_body", False):
                        return self._bounded(pieces)
        except TimeoutError as error:
            raise RequestTimeout(
                f"the body did not arrive within {format_seconds(self.limits.body_s)}; send it faster, or in parts"
            ) from error

    def _bounded(self, pieces: list[bytes]) -> bytes:
        size = sum(map(len, pieces))
        if size > self.limits.body_bytes:
            raise self._too_large(size)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _too_large(self, size: int) -> TooLarge:
        most = format_bytes(self.limits.body_bytes)
        return TooLarge(f"the body has {size} bytes or more; this server takes {most}: send fewer rows at once")


_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class BufferedBody:
    """ASGI's `receive` for an application that needs the whole body; it wakes the request's task once.

    Uvicorn's pauses every 64 KiB and copies the body twice more. Of a body with more than `most_bytes`, no more than
    the exceeding piece is kept; the application receives it as a part, and refuses it. Kept bytes count in `in_flight`
    until `release`.
    """

    __slots__ = (
        "_awaited",
        "_content",
        "_cycle",
        "_has_news",
        "_in_flight",
        "_most_bytes",
        "_num_bytes",
        "_refusal",
        "_taken",
        "is_whole",
    )

    def __init__(self, cycle: RequestResponseCycle, most_bytes: int, in_flight: InFlight) -> None:
        self._cycle = cycle
        self._most_bytes = most_bytes
        self._in_flight = in_flight
        self._content: bytes | bytearray = b""
        self._num_bytes = self._taken = 0
        self._refusal: OverCapacity | None = None
        self.is_whole = False
        """Whether the body is complete."""
        self._has_news = False
        self._awaited: asyncio.Event | None = None

    def add(self, piece: bytes) -> None:
        """Add a received piece."""
        if self._num_bytes > self._most_bytes or self._refusal is not None:
            return
        try:
            self._in_flight.take(len(piece))
        except OverCapacity as refusal:
            self._refusal = refusal
            self.release()
            self._tell()
            return
        self._taken += len(piece)
        if not self._num_bytes:
            self._content = piece  # nearly always the only one; not copied
        elif isinstance(self._content, bytes):
            self._content = bytearray(self._content + piece)
        else:
            self._content += piece  # a list of pieces of two bytes would take thirty times as much
        self._num_bytes += len(piece)
        if self._num_bytes > self._most_bytes:
            self._tell()

    def end(self) -> None:
        """Mark the body as complete."""
        self.is_whole = True
        self._tell()

    def release(self) -> None:
        """Drop the content: the request is over, or will not be answered."""
        self._in_flight.give_back(self._taken)
        self._content, self._taken = b"", 0

    async def __call__(self) -> dict[str, Any]:
        """The body, or its beginning if it is too large.

        Raises:
            OverCapacity: all bodies together exceed the server's limit.
        """
        cycle = self._cycle
        if cycle.waiting_for_100_continue and not cycle.transport.is_closing():
            cycle.transport.write(_CONTINUE)
            cycle.waiting_for_100_continue = False
        if not self._has_news:
            self._awaited = asyncio.Event()
            await self._awaited.wait()
        if self._refusal is not None:
            raise self._refusal
        body, self._content = self._content, b""
        return {"type": "http.request", "body": body, "more_body": not self.is_whole}

    def _tell(self) -> None:
        """Wake the application, or let it not wait at all."""
        self._has_news = True
        if self._awaited is not None:
            self._awaited.set()


DISCONNECTED = "the client went away"
"""Message of the cancellation of a request whose connection is lost."""

_logger = logging.getLogger(__name__)


class Application:
    """The Open Inference Protocol over a service; with `edge.is_admin` also the repository's calls and metrics."""

    def __init__(self, edge: ServerContext) -> None:
        self._edge = edge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI 3 request."""
        if scope["type"] != "http":
            return
        started = self._edge.clock()
        exchange = Exchange(scope, receive, self._edge.limits, self._edge.in_flight)
        answer = await self._answer(exchange)
        if len(answer.body) > WORTH_A_THREAD_BYTES:
            exchange.release()  # the request's bytes; from here on the answer counts
            try:
                exchange.hold(len(answer.body))
            except OverCapacity as refused:
                answer = error_response(refused)
        with contextlib.suppress(asyncio.CancelledError):  # the client is gone; the log entry is still due
            await send_response(answer, send)
        exchange.release()
        entry = exchange.entry
        entry.status, entry.bytes_out = answer.status, len(answer.body)
        entry.reason, entry.error = answer.reason, answer.error
        self._edge.finished(entry, started)

    async def _answer(self, exchange: Exchange) -> HttpResponse:
        """The response, also for any error."""
        try:
            return await self._dispatch(exchange)
        except NotAllowed as error:
            method = exchange.route.method if exchange.route else "GET"
            allowed = b"GET, HEAD" if method == "GET" else b"POST"
            return error_response(error, extra=((b"allow", allowed),))
        except StokerError as error:
            return error_response(error)
        except asyncio.CancelledError as error:
            gone = DISCONNECTED in error.args
            return error_response(Cancelled(DISCONNECTED) if gone else Unavailable("the server is stopping"))
        except Exception:
            _logger.exception("%s %s failed", exchange.scope["method"], exchange.entry.path)
            return error_response(Failed("the server failed in answering this; its log says how"))

    async def _dispatch(self, exchange: Exchange) -> HttpResponse:
        edge, entry = self._edge, exchange.entry
        route = exchange.route = find(entry.path)
        entry.model, entry.version = route.model, route.version
        if route.page in ADMIN and not edge.is_admin:
            raise NotFound(f"{shortened(entry.path)} is not on this port; the admin port has it")
        if exchange.scope["method"] != route.method and (exchange.scope["method"], route.method) != ("HEAD", "GET"):
            raise NotAllowed(f"{shortened(entry.path)} takes {route.method}, not {exchange.scope['method']}")
        if edge.is_admin:
            refuse_cross_site(exchange.headers, has_keys=edge.authorize is not None)
        if edge.authorize is not None and route.page not in WITHOUT_KEY:
            entry.caller = edge.authorize(exchange.text_headers())
        if route.page == "infer":
            return await self._infer(exchange, route)
        if route.page in POSTED:
            return await repository_page(edge, route, exchange)
        return state_page(edge, route)

    async def _infer(self, exchange: Exchange, route: Route) -> HttpResponse:
        service = self._edge.service
        try:
            request, form = await self._inference_request(exchange, route)
        except Refusal as refusal:
            service.count_refusal(route.model, refusal)
            raise
        inferred = await service.infer(request)
        is_raw = form.binary and not form.outputs and not request.outputs
        if not is_raw and sum(array.nbytes for array in inferred.outputs.values()) > WORTH_A_THREAD_BYTES:
            encoded = await asyncio.to_thread(lambda: encode(classify(inferred, request), form))
        else:
            encoded = encode(classify(inferred, request), form)
        accepted = exchange.headers.get(b"accept-encoding", b"").decode("latin-1")
        if len(encoded.body) <= WORTH_A_THREAD_BYTES or not bodies.accepted_encoding(accepted):
            return inference_response(encoded, accepted)
        exchange.hold(len(encoded.body))  # besides the request's, while it is compressed
        return await asyncio.to_thread(inference_response, encoded, accepted)

    async def _inference_request(self, exchange: Exchange, route: Route) -> tuple[InferenceRequest, OutputForm]:
        """The request in an exchange's body, and the form that it wants outputs in.

        Raises:
            Refusal: the model is not ready, or the body is malformed or too large.
        """
        caller = exchange.entry.caller
        manifest = self._edge.service.manifest(route.model, route.version)
        body = await exchange.body()
        json_bytes = exchange.number(b"inference-header-content-length")
        if json_bytes == 0:
            request, form = decode_raw(body, manifest=manifest, model=route.model, version=route.version, caller=caller)
        else:
            read = partial(decode, body, json_bytes=json_bytes, model=route.model, version=route.version, caller=caller)
            # JSON and strings are read value by value; other binary data is only viewed.
            if len(body) > WORTH_A_THREAD_BYTES and (
                json_bytes is None or json_bytes > WORTH_A_THREAD_BYTES or b"BYTES" in body[:json_bytes]
            ):
                exchange.hold(2 * len(body))  # its copies while it is read
                request, form = await asyncio.to_thread(read)
            else:
                request, form = read()
        exchange.entry.id = request.id
        check_output_form(form, request, manifest)
        return request, form


Headers = tuple[tuple[bytes, bytes], ...]

_JSON = (b"content-type", b"application/json")
_BINARY = (b"content-type", b"application/octet-stream")
_CLOSE = (b"connection", b"close")
_AFTER_STATUS: dict[int, Headers] = {401: ((b"www-authenticate", b"Bearer"),), 408: (_CLOSE,)}


class HttpResponse(NamedTuple):
    """A response; `reason` and `error` are a refusal's, for the log."""

    status: int
    body: bytes
    headers: Headers = (_JSON,)
    reason: str = ""
    error: str = ""


def json_response(value: Any, status: int = 200) -> HttpResponse:
    """A JSON document."""
    return HttpResponse(status, orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))


def inference_response(encoded: Encoded, accept_encoding: str = "") -> HttpResponse:
    """An inference response, compressed if the client requests it and it is large enough."""
    body, json_bytes = encoded
    headers: Headers = (_JSON,)
    if json_bytes is not None:
        headers = (_BINARY, (b"inference-header-content-length", str(json_bytes).encode()))
    encoding = bodies.accepted_encoding(accept_encoding)
    if encoding and len(body) >= bodies.LEAST_BYTES:
        return HttpResponse(200, bodies.compress(body, encoding), (*headers, (b"content-encoding", encoding.encode())))
    return HttpResponse(200, body, headers)


def error_response(error: StokerError, *, extra: Headers = ()) -> HttpResponse:
    """The response for an error, with the status of its class."""
    headers: Headers = (_JSON, *_AFTER_STATUS.get(error.http_status, ()), *extra)
    reason = "internal"
    if isinstance(error, Refusal):
        reason = error.reason
        if error.retry_after_s is not None:
            headers = (*headers, (b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    text = str(error)
    return HttpResponse(error.http_status, orjson.dumps({"error": text}), headers, reason, text)


async def send_response(answer: HttpResponse, to: Send) -> None:
    """Pass a response to the ASGI server."""
    length = (b"content-length", str(len(answer.body)).encode())
    await to({"type": "http.response.start", "status": answer.status, "headers": [*answer.headers, length]})
    await to({"type": "http.response.body", "body": answer.body})


def state_page(edge: ServerContext, route: Route) -> HttpResponse:
    """A page that only reads the state; 503 if what it is asked about is not ready."""
    if route.page == "metrics":
        if edge.metrics is None:
            raise NotFound("this server keeps no metrics")
        body, content_type = edge.metrics()
        return HttpResponse(200, body, ((b"content-type", content_type.encode()),))
    document = protocol.STATE[route.page](edge, route.model, route.version)
    is_unready = route.page in {"ready", "model_ready"} and not document["ready"]
    return json_response(document, 503 if is_unready else 200)


async def repository_page(edge: ServerContext, route: Route, exchange: Exchange) -> HttpResponse:
    """The index, or the loading or unloading of a model; each takes a JSON body."""
    body = await exchange.body()
    settings = json_object(body)[0] if body.strip() else {}
    if route.page == "index":
        ready_only = settings.get("ready", False)
        if not isinstance(ready_only, bool):
            raise BadRequest(f"`ready` must be true or false, got {ready_only!r}")
        return json_response(protocol.index_document(edge.service.index(ready_only=ready_only)))
    if route.page == "load":
        await edge.service.load(route.model, checked_parameters(settings.get("parameters"), "the request"))
    else:
        await edge.service.unload(route.model)
    return json_response({})
