"""What each method answers, given its message: nothing of gRPC's in here but the messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.json_format import ParseDict

from stoker.serving.edge import Edge
from stoker.serving.grpc import messages
from stoker.serving.grpc.tensors import Message, parameters_of
from stoker.serving.problems import NotFound
from stoker.serving.wire import documents

Answering = Callable[[Edge, Message], Awaitable[Message]]

_Health = messages.given(messages.HEALTH.methods_by_name["Check"])


def _document(kind: str, value: Any) -> Message:
    """A message with the fields of a JSON document; what it has no fields for is left out."""
    return ParseDict(value, messages.message(kind)(), ignore_unknown_fields=True)


async def _live(_edge: Edge, _asked: Message) -> Message:
    return _document("ServerLiveResponse", {"live": True})


async def _ready(edge: Edge, _asked: Message) -> Message:
    return _document("ServerReadyResponse", {"ready": edge.service.is_ready()})


async def _model_ready(edge: Edge, asked: Message) -> Message:
    return _document("ModelReadyResponse", {"ready": edge.service.is_model_ready(asked.name, asked.version)})


async def _server_metadata(edge: Edge, _asked: Message) -> Message:
    told = documents.server_metadata(name=edge.name, version=edge.version, is_admin=edge.is_admin)
    return _document("ServerMetadataResponse", told)


async def _model_metadata(edge: Edge, asked: Message) -> Message:
    manifest = edge.service.manifest(asked.name, asked.version)
    told = documents.model_metadata(asked.name, manifest, edge.service.versions(asked.name))
    return _document("ModelMetadataResponse", told)


async def _config(edge: Edge, asked: Message) -> Message:
    return _document("ModelConfigResponse", {"config": edge.service.config(asked.name, asked.version)})


async def _statistics(edge: Edge, asked: Message) -> Message:
    told = documents.statistics(edge.service.statistics(asked.name, asked.version))
    return _document("ModelStatisticsResponse", told)


async def _index(edge: Edge, asked: Message) -> Message:
    told = documents.index(edge.service.index(ready_only=asked.ready))
    return _document("RepositoryIndexResponse", {"models": told})


async def _load(edge: Edge, asked: Message) -> Message:
    await edge.service.load(asked.model_name, parameters_of(asked.parameters))
    return _document("RepositoryModelLoadResponse", {})


async def _unload(edge: Edge, asked: Message) -> Message:
    await edge.service.unload(asked.model_name)
    return _document("RepositoryModelUnloadResponse", {})


async def _health(edge: Edge, asked: Message) -> Message:
    """Of the server, where no service or the protocol's is named, else of the model of that name."""
    if asked.service in {"", messages.INFERENCE.full_name}:
        is_ready = edge.service.is_ready()
    else:
        is_ready = edge.service.is_model_ready(asked.service)
    return _Health(status="SERVING" if is_ready else "NOT_SERVING")


async def _only_for_admins(_edge: Edge, _asked: Message) -> Message:
    raise NotFound("the repository's calls are not on this port; the admin port has them")


TELLING: dict[str, Answering] = {
    "ServerLive": _live,
    "ServerReady": _ready,
    "ModelReady": _model_ready,
    "ServerMetadata": _server_metadata,
    "ModelMetadata": _model_metadata,
    "ModelConfig": _config,
    "ModelStatistics": _statistics,
    "Check": _health,
}
_REPOSITORY: dict[str, Answering] = {
    "RepositoryIndex": _index,
    "RepositoryModelLoad": _load,
    "RepositoryModelUnload": _unload,
}
WITHOUT_KEY = frozenset({"ServerLive", "ServerReady", "ModelReady", "Check"})


def methods(*, is_admin: bool) -> dict[str, Answering]:
    """Every method by name, inference apart."""
    return TELLING | (_REPOSITORY if is_admin else dict.fromkeys(_REPOSITORY, _only_for_admins))
