"""The gRPC server: the protocol's methods, and gRPC's own question after health."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from grpc.aio import EOF, ServicerContext

from stoker.serving.edge import Edge
from stoker.serving.grpc import messages, receiving
from stoker.serving.grpc.answering import Answering, methods
from stoker.serving.grpc.calls import Entry, abort, as_refusal, caller_of
from stoker.serving.grpc.inferring import Stream, infer
from stoker.serving.grpc.receiving import Parse, Reception, parsed
from stoker.serving.grpc.tensors import Message
from stoker.serving.problems import Cancelled
from stoker.units import KIB

_OPTIONS = (
    # Tensors are larger than gRPC's 4 MiB; an answer has no limit, since the server made it.
    ("grpc.max_send_message_length", -1),
    # A port that another server listens on is an error, and not shared with it.
    ("grpc.so_reuseport", 0),
    # Clients may keep an idle connection alive by a ping every ten seconds.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


COUNTED_BYTES = 16 * KIB
"""Answers above it are counted in the memory budget until the client has read them."""


def server(edge: Edge, *, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Server:
    """A server that has no port yet: `add_insecure_port` or `add_secure_port` give it one, `start` starts it.

    Must be made in the event loop that it is to run in.
    """
    made = grpc.aio.server(options=[*_OPTIONS, *receiving.options(edge), *options])
    reception = Reception(edge)
    answering = methods(is_admin=edge.is_admin)
    for service in (messages.INFERENCE, messages.HEALTH):
        handlers = {method.name: _handler(edge, method, answering, reception) for method in service.methods}
        made.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
    return made


def _handler(
    edge: Edge, method: MethodDescriptor, answering: dict[str, Answering], reception: Reception
) -> grpc.RpcMethodHandler[Any, Any]:
    """How gRPC calls a method. Its messages are read by `reception`, as bytes, which it takes a streaming method for.

    On the wire a call with one message is the same as a stream of one.
    """
    parse = messages.taken(method).FromString
    write = messages.given(method).SerializeToString
    if method.name == "ModelStreamInfer":
        stream = _streamed(edge, method.name, reception, parse)
        return grpc.stream_stream_rpc_method_handler(stream, response_serializer=write)
    single = _single(edge, method.name, answering.get(method.name), reception, parse)
    return grpc.stream_unary_rpc_method_handler(single, response_serializer=write)


def _single(edge: Edge, method: str, answering: Answering | None, reception: Reception, parse: Parse) -> Any:
    """A method that takes one message and gives one; without `answering` it is inference."""

    async def call(_messages: object, context: ServicerContext) -> Message | None:
        entry = Entry(edge, method)
        try:
            entry.caller = caller_of(edge, method, context)
            raw = await reception.only(context)
            entry.bytes_in = len(raw)
            asked = parsed(raw, parse)
            del raw
            if answering is None:
                answer = await infer(edge, asked, entry, time_left_s=context.time_remaining())
            else:
                answer = await answering(edge, asked)
            bytes_out = answer.ByteSize()
            if bytes_out > COUNTED_BYTES:
                reception.hold_answer(context, bytes_out)
        except asyncio.CancelledError:
            entry.done(refused=Cancelled("the client went away, or its deadline passed"))
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is becomes a status
            refused = as_refusal(error, method)
            entry.done(refused=refused)
            await abort(context, refused)
            return None
        entry.done(bytes_out=bytes_out)
        return answer

    return call


def _streamed(edge: Edge, method: str, reception: Reception, parse: Parse) -> Any:
    """ModelStreamInfer."""

    async def asked_by(context: ServicerContext) -> AsyncIterator[Message]:
        while (raw := await context.read()) is not EOF:
            yield parsed(raw, parse)

    async def call(_messages: object, context: ServicerContext) -> AsyncIterator[Message]:
        with contextlib.ExitStack() as held:
            try:
                stream = Stream(edge, context, method)
                held.enter_context(reception.stream())
            except Exception as error:  # noqa: BLE001 - likewise; no key, or a wrong one
                refused = as_refusal(error, method)
                Entry(edge, method).done(refused=refused)
                await abort(context, refused)
                return
            async for answer in stream.answers(asked_by(context)):
                yield answer

    return call
