"""ModelInfer and ModelStreamInfer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from grpc.aio import ServicerContext

from stoker.serving.edge import Edge
from stoker.serving.grpc.calls import Entry, as_refusal, caller_of
from stoker.serving.grpc.messages import message
from stoker.serving.grpc.tensors import Message, decode, encode
from stoker.serving.problems import Cancelled
from stoker.serving.wire import classify

MOST_AT_ONCE = 256
"""Requests of one stream that are under way or answered and not yet sent; further ones are not read meanwhile."""

_FINAL, _WANTS_FINAL = "triton_final_response", "triton_enable_empty_final_response"
_StreamResponse = message("ModelStreamInferResponse")


async def infer(edge: Edge, asked: Message, entry: Entry, *, time_left_s: float | None) -> Message:
    """Answer one request.

    Raises:
        Refusal: it is malformed, does not fit the model, or cannot be answered in time.
    """
    entry.model, entry.version, entry.id = asked.model_name, asked.model_version, asked.id
    entry.bytes_in = entry.bytes_in or asked.ByteSize()
    with edge.in_flight.taken(entry.bytes_in):
        manifest = edge.service.manifest(asked.model_name, asked.model_version)
        request = decode(asked, caller=entry.caller, time_left_s=time_left_s)
        return encode(classify(await edge.service.infer(request), request, manifest.labels))


class Stream:
    """Requests of a stream, answered in the order in which they are done, each with its id."""

    def __init__(self, edge: Edge, context: ServicerContext, method: str) -> None:
        self._edge = edge
        self._context = context
        self._method = method
        self._caller = caller_of(edge, method, context)
        self._room = asyncio.Semaphore(MOST_AT_ONCE)
        self._done: asyncio.Queue[Message | None] = asyncio.Queue()

    async def answers(self, asked: AsyncIterator[Message]) -> AsyncIterator[Message]:
        """One answer for each request; ends when the client sends no more and all are answered."""
        reading = asyncio.create_task(self._read(asked))
        try:
            while (answer := await self._done.get()) is not None:
                self._room.release()
                yield answer
            await reading
        finally:
            reading.cancel()

    async def _read(self, asked: AsyncIterator[Message]) -> None:
        """Start what comes in; in the end, however it comes, the queue ends."""
        try:
            async with asyncio.TaskGroup() as under_way:
                async for one in asked:
                    await self._room.acquire()
                    under_way.create_task(self._answer(one))
        finally:
            self._done.put_nowait(None)

    async def _answer(self, asked: Message) -> None:
        entry = Entry(self._edge, self._method)
        entry.caller = self._caller
        try:
            answer = await infer(self._edge, asked, entry, time_left_s=self._context.time_remaining())
        except asyncio.CancelledError:
            entry.done(refused=Cancelled("the stream was cancelled"))
            raise
        except Exception as error:  # noqa: BLE001 - one request's failure is not the stream's
            refused = as_refusal(error, self._method)
            entry.done(refused=refused)
            reply = _StreamResponse(error_message=str(refused))
            reply.infer_response.id = asked.id
        else:
            reply = _StreamResponse(infer_response=answer)
            entry.done(bytes_out=answer.ByteSize())
        if asked.parameters[_WANTS_FINAL].bool_param if _WANTS_FINAL in asked.parameters else False:
            reply.infer_response.parameters[_FINAL].bool_param = True
        self._done.put_nowait(reply)
