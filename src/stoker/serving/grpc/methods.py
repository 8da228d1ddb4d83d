"""gRPC methods: the response of each (`answer`, `infer`, `InferenceStream`), and a call's key, status and log entry."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from grpc.aio import ServicerContext

from stoker.errors import StokerError
from stoker.serving import protocol
from stoker.serving.grpc import health_pb2, inference_pb2
from stoker.serving.grpc.messages import (
    INFERENCE,
    SMALL_BYTES,
    Message,
    decode,
    encode,
    parameters_of,
    parsed,
    typed_memory,
)
from stoker.serving.protocol import classify
from stoker.serving.refusals import Cancelled, Failed, NotFound, Refusal
from stoker.serving.service import AccessEntry, ServerContext


def _health(edge: ServerContext, asked: Message) -> Message:
    """The health of the server if no service or the protocol's is named, else of the model of that name."""
    if asked.service in {"", INFERENCE.full_name}:
        is_ready = edge.service.is_ready()
    else:
        is_ready = edge.service.is_model_ready(asked.service)
    return health_pb2.HealthCheckResponse(status="SERVING" if is_ready else "NOT_SERVING")


_STATE = {
    "ServerLive": "live",
    "ServerReady": "ready",
    "ModelReady": "model_ready",
    "ServerMetadata": "server",
    "ModelMetadata": "metadata",
    "ModelConfig": "config",
    "ModelStatistics": "statistics",
}
"""Methods whose response has the fields of a document of `protocol.STATE`."""
_REPOSITORY = frozenset({"RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"})
WITHOUT_KEY = frozenset({"ServerLive", "ServerReady", "ModelReady", "Check"})


async def answer(edge: ServerContext, method: str, asked: Message) -> Message:
    """The response of any method without inference.

    Raises:
        Refusal: the method is for the admin port only, or the service refused.
    """
    if method in _REPOSITORY and not edge.is_admin:
        raise NotFound("the repository's calls are not on this port; the admin port has them")
    if method == "Check":
        return _health(edge, asked)
    document: Any = {}
    if method == "RepositoryModelLoad":
        await edge.service.load(asked.model_name, parameters_of(asked.parameters))
    elif method == "RepositoryModelUnload":
        await edge.service.unload(asked.model_name)
    elif method == "RepositoryIndex":
        document = {"models": protocol.index_document(edge.service.index(ready_only=asked.ready))}
    else:
        document = protocol.STATE[_STATE[method]](edge, getattr(asked, "name", ""), getattr(asked, "version", ""))
        if method == "ModelConfig":
            document = {"config": document}
    # What the message has no fields for is left out.
    return ParseDict(document, getattr(inference_pb2, f"{method}Response")(), ignore_unknown_fields=True)


_logger = logging.getLogger(__name__)


def caller_of(edge: ServerContext, method: str, context: ServicerContext) -> str:
    """The caller's name; empty if no key is needed.

    Raises:
        Unauthorized: the metadata has no key, or an unknown one.
    """
    if edge.authorize is None or method in WITHOUT_KEY:
        return ""
    metadata = context.invocation_metadata() or ()
    return edge.authorize({name: value for name, value in metadata if isinstance(value, str)})


def as_refusal(error: BaseException, method: str) -> Refusal:
    """The refusal for an error; an unexpected one goes to the program's log and not to the caller."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, StokerError):
        return Failed(str(error))
    _logger.error("%s failed", method, exc_info=error)
    return Failed("the server failed in answering this; its log says how")


async def abort(context: ServicerContext, refused: Refusal) -> None:
    """End the call with the refusal's status, and `retry-after` [s] in the trailing metadata."""
    trailing: tuple[tuple[str, str], ...] = ()
    if refused.retry_after_s is not None:
        trailing = (("retry-after", str(max(1, math.ceil(refused.retry_after_s)))),)
    await context.abort(grpc.StatusCode[refused.grpc_status], str(refused), trailing)


class CallRecord:
    """The log entry of a call, from its start to its end."""

    def __init__(self, edge: ServerContext, method: str) -> None:
        self._edge = edge
        self._started = edge.clock()
        path = f"/inference.GRPCInferenceService/{method}"
        self.entry = AccessEntry(protocol="grpc", method=method, path=path, status="OK")

    def done(self, refused: Refusal | None = None) -> None:
        """Log the call: as answered, or as refused."""
        if refused is not None:
            self.entry.status = refused.grpc_status
            self.entry.reason, self.entry.error = refused.reason, str(refused)
        self._edge.finished(self.entry, self._started)


MOST_AT_ONCE = 256
"""Limit on a stream's requests in flight or answered and not yet sent; further ones are not read until then."""

_FINAL, _WANTS_FINAL = "triton_final_response", "triton_enable_empty_final_response"


async def infer(edge: ServerContext, asked: Message, entry: AccessEntry, *, time_left_s: float | None) -> Message:
    """Answer one request; its bytes are in the entry.

    Raises:
        Refusal: the request is malformed, does not fit the model, or cannot be answered in time.
    """
    entry.model, entry.version, entry.id = asked.model_name, asked.model_version, asked.id
    with ExitStack() as held:
        try:
            held.enter_context(edge.in_flight.taken(entry.bytes_in))
            edge.service.manifest(asked.model_name, asked.model_version)  # refuses an unknown model before all is read
            read = partial(decode, asked, caller=entry.caller, time_left_s=time_left_s)
            # Typed contents and strings are read value by value; other raw contents are only viewed.
            is_quick = entry.bytes_in <= SMALL_BYTES or (
                asked.raw_input_contents and all(given.datatype != "BYTES" for given in asked.inputs)
            )
            request = read() if is_quick else await asyncio.to_thread(read)
        except Refusal as refusal:
            edge.service.count_refusal(asked.model_name, refusal)
            raise
        return encode(classify(await edge.service.infer(request), request))


class InferenceStream:
    """Requests of a stream, answered in the order of completion, each with its id.

    Answers count in `in_flight` until they are sent; one without room there is refused.
    """

    def __init__(self, edge: ServerContext, context: ServicerContext, method: str) -> None:
        self._edge = edge
        self._context = context
        self._method = method
        self._caller = caller_of(edge, method, context)
        self._room = asyncio.Semaphore(MOST_AT_ONCE)
        self._done: asyncio.Queue[tuple[Message, int] | None] = asyncio.Queue()
        self._unsent_bytes = 0

    async def answers(self, asked: AsyncIterator[bytes]) -> AsyncIterator[Message]:
        """One answer per request; ends when the client sends no more and all are answered."""

        async def read() -> None:
            try:
                async with asyncio.TaskGroup() as under_way:
                    async for raw in asked:
                        await self._room.acquire()
                        under_way.create_task(self._answer(raw))
            finally:  # the queue ends in any case
                self._done.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while (done := await self._done.get()) is not None:
                reply, num_bytes = done
                self._room.release()
                yield reply
                self._give_back(num_bytes)
            await reading
        finally:
            reading.cancel()
            reading.add_done_callback(lambda _reading: self._give_back(self._unsent_bytes))  # no answer follows

    def _give_back(self, num_bytes: int) -> None:
        self._edge.in_flight.give_back(num_bytes)
        self._unsent_bytes -= num_bytes

    async def _answer(self, raw: bytes) -> None:
        record = CallRecord(self._edge, self._method)
        entry = record.entry
        entry.caller, entry.bytes_in = self._caller, len(raw)
        wants_final = False
        try:
            with self._edge.in_flight.taken(typed_memory(raw)):
                asked = parsed(raw, inference_pb2.ModelInferRequest.FromString)
                del raw
                wants_final = _WANTS_FINAL in asked.parameters and asked.parameters[_WANTS_FINAL].bool_param
                answer = await infer(self._edge, asked, entry, time_left_s=self._context.time_remaining())
            num_bytes = answer.ByteSize()
            self._edge.in_flight.take(num_bytes)
        except asyncio.CancelledError:
            record.done(Cancelled("the stream was cancelled"))
            raise
        except Exception as error:  # noqa: BLE001 - one request's failure is not the stream's
            refused = as_refusal(error, self._method)
            record.done(refused)
            num_bytes = 0
            reply = inference_pb2.ModelStreamInferResponse(error_message=str(refused))
            reply.infer_response.id = entry.id
        else:
            reply = inference_pb2.ModelStreamInferResponse(infer_response=answer)
            self._unsent_bytes += num_bytes
            entry.bytes_out = num_bytes
            record.done()
        if wants_final:
            reply.infer_response.parameters[_FINAL].bool_param = True
        self._done.put_nowait((reply, num_bytes))
