"""What each page answers; inference apart."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import orjson

from stoker.serving.edge import Edge
from stoker.serving.http.answers import Answer, document
from stoker.serving.http.exchange import Exchange
from stoker.serving.http.routes import Page, Route
from stoker.serving.problems import BadRequest, NotFound
from stoker.serving.wire import documents
from stoker.serving.wire.parameters import checked

Told = Callable[[Edge, Route], Answer]
Done = Callable[[Edge, Route, Exchange], Awaitable[Answer]]


def _server(edge: Edge, _route: Route) -> Answer:
    return document(documents.server_metadata(name=edge.name, version=edge.version, is_admin=edge.is_admin))


def _live(_edge: Edge, _route: Route) -> Answer:
    return document({"live": True})


def _ready(edge: Edge, _route: Route) -> Answer:
    is_ready = edge.service.is_ready()
    return document({"ready": is_ready}, 200 if is_ready else 503)


def _model_ready(edge: Edge, route: Route) -> Answer:
    is_ready = edge.service.is_model_ready(route.model, route.version)
    return document({"name": route.model, "ready": is_ready}, 200 if is_ready else 503)


def _models(edge: Edge, _route: Route) -> Answer:
    names = dict.fromkeys(entry.name for entry in edge.service.index(ready_only=True))
    return document({"models": list(names)})


def _metadata(edge: Edge, route: Route) -> Answer:
    manifest = edge.service.manifest(route.model, route.version)
    return document(documents.model_metadata(route.model, manifest, edge.service.versions(route.model)))


def _config(edge: Edge, route: Route) -> Answer:
    return document(edge.service.config(route.model, route.version))


def _statistics(edge: Edge, route: Route) -> Answer:
    return document(documents.statistics(edge.service.statistics(route.model, route.version)))


def _metrics(edge: Edge, _route: Route) -> Answer:
    if edge.metrics is None:
        raise NotFound("this server keeps no metrics")
    body, content_type = edge.metrics()
    return Answer(200, body, ((b"content-type", content_type.encode()),))


TELLING: dict[Page, Told] = {
    "server": _server,
    "live": _live,
    "ready": _ready,
    "models": _models,
    "all_statistics": _statistics,
    "metadata": _metadata,
    "model_ready": _model_ready,
    "config": _config,
    "statistics": _statistics,
    "metrics": _metrics,
}
"""Pages that only look."""


async def _index(edge: Edge, _route: Route, exchange: Exchange) -> Answer:
    ready_only = (await _settings(exchange)).get("ready", False)
    if not isinstance(ready_only, bool):
        raise BadRequest(f"`ready` must be true or false, got {ready_only!r}")
    return document(documents.index(edge.service.index(ready_only=ready_only)))


async def _load(edge: Edge, route: Route, exchange: Exchange) -> Answer:
    given = (await _settings(exchange)).get("parameters")
    await edge.service.load(route.model, checked(given, "the request"))
    return document({})


async def _unload(edge: Edge, route: Route, exchange: Exchange) -> Answer:
    await _settings(exchange)
    await edge.service.unload(route.model)
    return document({})


DOING: dict[Page, Done] = {"index": _index, "load": _load, "unload": _unload}
"""Pages that read a body and may take their time."""


async def _settings(exchange: Exchange) -> dict[str, object]:
    """The JSON object in a body; an empty body is an empty one."""
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
