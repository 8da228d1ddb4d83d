"""The ASGI application: each request gets one response and one log entry; refusals are `{"error": …}`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import orjson

from stoker.errors import StokerError
from stoker.serving import protocol
from stoker.serving.http import bodies
from stoker.serving.http.bodies import Encoded, check_output_form, decode, decode_raw, encode
from stoker.serving.http.exchange import WORTH_A_THREAD_BYTES, Exchange, Receive, Scope, Send
from stoker.serving.http.routes import ADMIN, POSTED, WITHOUT_KEY, Page, Route, find
from stoker.serving.protocol import checked_parameters, classify
from stoker.serving.refusals import (
    BadRequest,
    Cancelled,
    Failed,
    NotAllowed,
    NotFound,
    OverCapacity,
    Refusal,
    Unavailable,
    shortened,
)
from stoker.serving.security import refuse_cross_site
from stoker.serving.service import AccessEntry, ServerContext

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
        clock = self._edge.clock
        started = clock()
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
        if self._edge.log is None:
            return
        route = exchange.route
        self._edge.log(
            AccessEntry(
                protocol="http",
                method=scope["method"],
                path=exchange.path,
                model=route.model if route else "",
                version=route.version if route else "",
                status=answer.status,
                bytes_in=exchange.bytes_in,
                bytes_out=len(answer.body),
                seconds=clock() - started,
                caller=exchange.caller,
                id=exchange.id,
                reason=answer.reason,
                error=answer.error,
            )
        )

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
            _logger.exception("%s %s failed", exchange.scope["method"], exchange.path)
            return error_response(Failed("the server failed in answering this; its log says how"))

    async def _dispatch(self, exchange: Exchange) -> HttpResponse:
        edge = self._edge
        route = exchange.route = find(exchange.path)
        if route.page in ADMIN and not edge.is_admin:
            raise NotFound(f"{shortened(exchange.path)} is not on this port; the admin port has it")
        if exchange.scope["method"] != route.method and (exchange.scope["method"], route.method) != ("HEAD", "GET"):
            raise NotAllowed(f"{shortened(exchange.path)} takes {route.method}, not {exchange.scope['method']}")
        if edge.is_admin:
            refuse_cross_site(exchange.headers, has_keys=edge.authorize is not None)
        if edge.authorize is not None and route.page not in WITHOUT_KEY:
            exchange.caller = edge.authorize(exchange.text_headers())
        if route.page == "infer":
            return await self._infer(exchange, route)
        if route.page in POSTED:
            return await repository_page(edge, route, exchange)
        return STATE_PAGES[route.page](edge, route)

    async def _infer(self, exchange: Exchange, route: Route) -> HttpResponse:
        service, caller = self._edge.service, exchange.caller
        manifest = service.manifest(route.model, route.version)
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
        exchange.id = request.id
        check_output_form(form, request, manifest)
        inferred = await service.infer(request)
        is_raw = form.binary and not form.outputs and not request.outputs
        if not is_raw and sum(array.nbytes for array in inferred.outputs.values()) > WORTH_A_THREAD_BYTES:
            encoded = await asyncio.to_thread(lambda: encode(classify(inferred, request, manifest.labels), form))
        else:
            encoded = encode(classify(inferred, request, manifest.labels), form)
        accepted = exchange.headers.get(b"accept-encoding", b"").decode("latin-1")
        return inference_response(encoded, accepted)


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


def _ready(edge: ServerContext, _route: Route) -> HttpResponse:
    is_ready = edge.service.is_ready()
    return json_response({"ready": is_ready}, 200 if is_ready else 503)


def _model_ready(edge: ServerContext, route: Route) -> HttpResponse:
    is_ready = edge.service.is_model_ready(route.model, route.version)
    return json_response({"name": route.model, "ready": is_ready}, 200 if is_ready else 503)


def _models(edge: ServerContext, _route: Route) -> HttpResponse:
    names = dict.fromkeys(entry.name for entry in edge.service.index(ready_only=True))
    return json_response({"models": list(names)})


def _metadata(edge: ServerContext, route: Route) -> HttpResponse:
    manifest = edge.service.manifest(route.model, route.version)
    return json_response(protocol.model_metadata(route.model, manifest, edge.service.versions(route.model)))


def _statistics(edge: ServerContext, route: Route) -> HttpResponse:
    return json_response(protocol.statistics_document(edge.service.statistics(route.model, route.version)))


def _metrics(edge: ServerContext, _route: Route) -> HttpResponse:
    if edge.metrics is None:
        raise NotFound("this server keeps no metrics")
    body, content_type = edge.metrics()
    return HttpResponse(200, body, ((b"content-type", content_type.encode()),))


STATE_PAGES: dict[Page, Callable[[ServerContext, Route], HttpResponse]] = {
    "server": lambda edge, _route: json_response(
        protocol.server_metadata(name=edge.name, version=edge.version, is_admin=edge.is_admin)
    ),
    "live": lambda _edge, _route: json_response({"live": True}),
    "ready": _ready,
    "models": _models,
    "all_statistics": _statistics,
    "metadata": _metadata,
    "model_ready": _model_ready,
    "config": lambda edge, route: json_response(edge.service.config(route.model, route.version)),
    "statistics": _statistics,
    "metrics": _metrics,
}
"""Pages that only read the state."""


async def repository_page(edge: ServerContext, route: Route, exchange: Exchange) -> HttpResponse:
    """The index, or the loading or unloading of a model; each takes a JSON body."""
    settings = await _settings(exchange)
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


async def _settings(exchange: Exchange) -> dict[str, object]:
    """The JSON object in a body; empty for an empty body."""
    body = await exchange.body()
    if not body.strip():
        return {}
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object, or empty")
    return value
