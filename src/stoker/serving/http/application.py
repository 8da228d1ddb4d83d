"""The ASGI application: a request in, one answer and one line of log out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial

from stoker.errors import StokerError
from stoker.serving.access.cross_site import refuse_cross_site
from stoker.serving.edge import Access, Edge
from stoker.serving.http import answers
from stoker.serving.http.answers import Answer
from stoker.serving.http.exchange import WORTH_A_THREAD_BYTES, Exchange, Receive, Scope, Send
from stoker.serving.http.pages import DOING, TELLING
from stoker.serving.http.routes import ADMIN, WITHOUT_KEY, Route, find
from stoker.serving.problems import Cancelled, Crowded, Failed, NotAllowed, NotFound, Unavailable, shortened
from stoker.serving.wire import check_form, classify, decode, decode_raw, encode

DISCONNECTED = "the client went away"
"""With this message the task of a request is cancelled whose connection is lost."""

_logger = logging.getLogger(__name__)


class Application:
    """The Open Inference Protocol over a service; with `edge.is_admin` the repository's calls and metrics as well."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI 3 calls for."""
        if scope["type"] != "http":
            return
        clock = self._edge.clock
        started = clock()
        exchange = Exchange(scope, receive, self._edge.limits, self._edge.in_flight)
        answer = await self._answer(exchange)
        if len(answer.body) > WORTH_A_THREAD_BYTES:
            exchange.release()  # of the request; from here on the answer counts
            try:
                exchange.hold(len(answer.body))
            except Crowded as refused:
                answer = answers.refusal(refused)
        with contextlib.suppress(asyncio.CancelledError):  # gone while it was answered; the line of log is still due
            await answers.send(answer, send)
        exchange.release()
        if self._edge.log is None:
            return
        route = exchange.route
        self._edge.log(
            Access(
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

    async def _answer(self, exchange: Exchange) -> Answer:
        """What goes back, whatever happens."""
        try:
            return await self._dispatch(exchange)
        except NotAllowed as error:
            method = exchange.route.method if exchange.route else "GET"
            allowed = b"GET, HEAD" if method == "GET" else b"POST"
            return answers.refusal(error, extra=((b"allow", allowed),))
        except StokerError as error:
            return answers.refusal(error)
        except asyncio.CancelledError as error:
            gone = DISCONNECTED in error.args
            return answers.refusal(Cancelled(DISCONNECTED) if gone else Unavailable("the server is stopping"))
        except Exception:
            _logger.exception("%s %s failed", exchange.scope["method"], exchange.path)
            return answers.refusal(Failed("the server failed in answering this; its log says how"))

    async def _dispatch(self, exchange: Exchange) -> Answer:
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
        if doing := DOING.get(route.page):
            return await doing(edge, route, exchange)
        return TELLING[route.page](edge, route)

    async def _infer(self, exchange: Exchange, route: Route) -> Answer:
        service, caller = self._edge.service, exchange.caller
        manifest = service.manifest(route.model, route.version)
        body = await exchange.body()
        json_bytes = exchange.number(b"inference-header-content-length")
        if json_bytes == 0:
            request, form = decode_raw(body, manifest=manifest, model=route.model, version=route.version, caller=caller)
        else:
            read = partial(decode, body, json_bytes=json_bytes, model=route.model, version=route.version, caller=caller)
            if len(body) > WORTH_A_THREAD_BYTES and _takes_long(body, json_bytes):
                exchange.hold(2 * len(body))  # its copies while it is read
                request, form = await asyncio.to_thread(read)
            else:
                request, form = read()
        exchange.id = request.id
        check_form(form, request, manifest)
        inferred = await service.infer(request)
        is_raw = form.binary and not form.outputs and not request.outputs
        if not is_raw and sum(array.nbytes for array in inferred.outputs.values()) > WORTH_A_THREAD_BYTES:
            encoded = await asyncio.to_thread(
                lambda: encode(classify(inferred, request, manifest.labels), form),
            )
        else:
            encoded = encode(classify(inferred, request, manifest.labels), form)
        accepted = exchange.headers.get(b"accept-encoding", b"").decode("latin-1")
        return answers.inference(encoded, accepted)


def _takes_long(body: bytes, json_bytes: int | None) -> bool:
    """Whether a large body is read value by value: JSON, or strings. Binary numbers are only looked at."""
    return json_bytes is None or json_bytes > WORTH_A_THREAD_BYTES or b"BYTES" in body[:json_bytes]
