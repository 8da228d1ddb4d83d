"""The gRPC server: the protocol's methods, and gRPC's own question after health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from grpc.aio import ServicerContext

from stoker.serving.edge import Edge
from stoker.serving.grpc import messages
from stoker.serving.grpc.answering import Answering, methods
from stoker.serving.grpc.calls import Entry, abort, as_refusal, caller_of
from stoker.serving.grpc.inferring import Stream, infer
from stoker.serving.grpc.tensors import Message
from stoker.serving.problems import Cancelled

_OPTIONS = (
    # Tensors are larger than gRPC's 4 MiB; an answer has no limit, since the server made it.
    ("grpc.max_send_message_length", -1),
    # A port that another server listens on is an error, and not shared with it.
    ("grpc.so_reuseport", 0),
    # Clients may keep an idle connection alive by a ping every ten seconds.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


def server(edge: Edge, *, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Server:
    """A server that has no port yet: `add_insecure_port` or `add_secure_port` give it one, `start` starts it.

    Must be made in the event loop that it is to run in.
    """
    received = ("grpc.max_receive_message_length", edge.limits.body_bytes)
    made = grpc.aio.server(options=[*_OPTIONS, received, *options])
    answering = methods(is_admin=edge.is_admin)
    for service in (messages.INFERENCE, messages.HEALTH):
        handlers = {method.name: _handler(edge, method, answering) for method in service.methods}
        made.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
    return made


def _handler(edge: Edge, method: MethodDescriptor, answering: dict[str, Answering]) -> Any:
    """How gRPC calls a method, and how it reads and writes its messages."""
    codec = {
        "request_deserializer": messages.taken(method).FromString,
        "response_serializer": messages.given(method).SerializeToString,
    }
    if method.name == "ModelStreamInfer":
        return grpc.stream_stream_rpc_method_handler(_streamed(edge, method.name), **codec)
    return grpc.unary_unary_rpc_method_handler(_single(edge, method.name, answering.get(method.name)), **codec)


def _single(edge: Edge, method: str, answering: Answering | None) -> Any:
    """A method that takes one message and gives one; without `answering` it is inference."""

    async def call(asked: Message, context: ServicerContext) -> Message | None:
        entry = Entry(edge, method)
        try:
            entry.caller = caller_of(edge, method, context)
            if answering is None:
                answer = await infer(edge, asked, entry, time_left_s=context.time_remaining())
            else:
                answer = await answering(edge, asked)
        except asyncio.CancelledError:
            entry.done(refused=Cancelled("the client went away, or its deadline passed"))
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is becomes a status
            refused = as_refusal(error, method)
            entry.done(refused=refused)
            await abort(context, refused)
            return None
        entry.done(bytes_out=answer.ByteSize())
        return answer

    return call


def _streamed(edge: Edge, method: str) -> Any:
    """ModelStreamInfer."""

    async def call(asked: AsyncIterator[Message], context: ServicerContext) -> AsyncIterator[Message]:
        try:
            stream = Stream(edge, context, method)
        except Exception as error:  # noqa: BLE001 - likewise; no key, or a wrong one
            refused = as_refusal(error, method)
            Entry(edge, method).done(refused=refused)
            await abort(context, refused)
            return
        async for answer in stream.answers(asked):
            yield answer

    return call
