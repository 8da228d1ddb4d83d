"""The gRPC server, asked by a plain channel."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from stoker.serving.grpc import inference_pb2, messages, methods, server
from stoker.serving.grpc.health_pb2 import HealthCheckRequest
from stoker.serving.grpc.methods import MOST_AT_ONCE
from stoker.serving.grpc.server import MOST_CALLS
from stoker.serving.refusals import DeadlinePassed, OverCapacity, QueueFull, Refusal, Unauthorized
from stoker.serving.service import AccessEntry, InferenceRequest, InFlight, RequestLimits, ServerContext
from tests.serving.fakes import FakeService, refusing, scores_of
from tests.serving.waiting import until

IMAGE = np.arange(64, dtype=np.float32).reshape(1, 8, 8)
PREFIX = "/inference.GRPCInferenceService/"
HEADERS, RST_STREAM, SETTINGS = 1, 3, 4
"""Kinds of HTTP/2's frames."""
REFUSALS = 7, 11
"""Its errors REFUSED_STREAM and ENHANCE_YOUR_CALM."""


def _frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


async def _next_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readexactly(9)
    return head[3], await reader.readexactly(int.from_bytes(head[:3], "big"))


def question(**changes: Any) -> Any:
    """An inference of `digits`."""
    asked = inference_pb2.ModelInferRequest(
        **({"model_name": "digits", "raw_input_contents": [IMAGE.tobytes()], "id": "r-1"} | changes)
    )
    asked.inputs.add(name="image", datatype="FP32", shape=IMAGE.shape)
    return asked


class Client:
    """Calls methods by their names."""

    def __init__(self, channel: grpc.aio.Channel, port: int) -> None:
        self._channel, self.port = channel, port

    def call(self, name: str, asked: Any = None, *, service: Any = messages.INFERENCE, **how: Any) -> Any:
        method = service.methods_by_name[name]
        kind = self._channel.stream_stream if method.server_streaming else self._channel.unary_unary
        made = kind(
            f"/{service.full_name}/{name}",
            request_serializer=messages.request_class(method).SerializeToString,
            response_deserializer=messages.response_class(method).FromString,
        )
        return made(messages.request_class(method)() if asked is None else asked, **how)


@asynccontextmanager
async def served(service: FakeService | None = None, **edge: Any) -> AsyncIterator[Client]:
    """A server on a free port and a client of it."""
    running = server(ServerContext(service=service or FakeService(), **edge))
    port = running.add_insecure_port("127.0.0.1:0")
    await running.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Client(channel, port)
    finally:
        await running.stop(grace=None)


def asked(act: Callable[[Client], Awaitable[Any]], service: FakeService | None = None, **edge: Any) -> Any:
    """What comes of asking, from outside of a loop."""

    async def ask() -> Any:
        async with served(service, **edge) as client:
            return await act(client)

    return asyncio.run(ask())


def refused(
    act: Callable[[Client], Awaitable[Any]], service: FakeService | None = None, **edge: Any
) -> grpc.aio.AioRpcError:
    """The status that asking ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        asked(act, service, **edge)
    return caught.value


def test_an_inference() -> None:
    """Raw contents in, raw contents out, the id echoed."""
    answer = asked(lambda client: client.call("ModelInfer", question()))
    assert (answer.id, answer.model_version) == ("r-1", "1")
    np.testing.assert_array_equal(np.frombuffer(answer.raw_output_contents[0], np.float32), scores_of(IMAGE)[0])


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model_name": "nobody"}, grpc.StatusCode.NOT_FOUND),
        ({"model_version": "9"}, grpc.StatusCode.NOT_FOUND),
        ({"raw_input_contents": [b"x"]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"outputs": [{"name": "nothing"}]}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_wrong_questions_have_their_status(changes: dict[str, Any], code: grpc.StatusCode) -> None:
    """And a sentence."""
    error = refused(lambda client: client.call("ModelInfer", question(**changes)))
    assert (error.code(), bool(error.details())) == (code, True)


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (QueueFull("the queue is full", retry_after_s=2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (DeadlinePassed("too late"), grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
def test_every_refusal_has_its_status(refusal: Refusal, code: grpc.StatusCode) -> None:
    """With when to try again, where that is known."""
    error = refused(lambda client: client.call("ModelInfer", question()), refusing(refusal))
    assert (error.code(), error.details()) == (code, str(refusal))
    assert dict(error.trailing_metadata()).get("retry-after") == ("3" if refusal.retry_after_s else None)


def test_an_error_nobody_foresaw_is_hidden(caplog: pytest.LogCaptureFixture) -> None:
    """The client learns that it was not its fault; the log learns what it was."""
    with caplog.at_level(logging.ERROR):
        error = refused(lambda client: client.call("ModelInfer", question()), FakeService(refuse=OSError("secret")))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in error.details()
    assert "OSError: secret" in caplog.text


def test_a_long_message_fits_into_a_header() -> None:
    """A status' message is bounded, or the client would see a broken stream instead."""
    error = refused(lambda client: client.call("ModelInfer", question(model_name="🙂" * 20_000)))
    assert (error.code(), len(error.details()) < 700) == (grpc.StatusCode.NOT_FOUND, True)


def test_more_calls_than_a_connection_may_have_wait() -> None:
    """The client's library keeps the limit, and none of its calls fails, also while earlier ones are being freed."""

    async def ask(client: Client) -> list[str]:
        answers = []
        for _ in range(3):
            calls = [client.call("ModelInfer", question(id=str(number))) for number in range(3 * MOST_CALLS)]
            answers += [answer.id for answer in await asyncio.gather(*calls)]
        return answers

    assert asked(ask) == [str(number) for number in range(3 * MOST_CALLS)] * 3


@pytest.mark.parametrize("acknowledges", [True, False])
def test_calls_beyond_the_limit_are_refused(acknowledges: bool) -> None:
    """Also of a client that never acknowledges the limit; each call may hold a part of its message."""
    called = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in {
            b":method": b"POST",
            b":scheme": b"http",
            b":path": PREFIX.encode() + b"ModelInfer",
            b"te": b"trailers",
            b"content-type": b"application/grpc",
        }.items()
    )

    async def ask(client: Client) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0))
        while (await _next_frame(reader))[0] != SETTINGS:
            pass
        if acknowledges:
            writer.write(_frame(SETTINGS, 1, 0))
        writer.writelines(_frame(HEADERS, 4, 2 * number + 1, called) for number in range(2 * MOST_CALLS))
        refused = 0
        while refused < MOST_CALLS:
            kind, content = await _next_frame(reader)
            refused += kind == RST_STREAM and int.from_bytes(content, "big") in REFUSALS
        writer.close()

    asked(lambda client: asyncio.wait_for(ask(client), 20))


def test_messages_over_the_limit_are_refused() -> None:
    """By gRPC itself, before they are read."""
    limits = RequestLimits(body_bytes=1000)
    error = refused(lambda client: client.call("ModelInfer", question(id="x" * 2000)), limits=limits)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_messages_are_bounded_together() -> None:
    """What is more than the server may hold is refused with when to come again, and counted."""
    held, service = InFlight(50), FakeService()
    error = refused(lambda client: client.call("ModelInfer", question(id="x" * 60)), service, in_flight=held)
    assert service.refused == [("digits", OverCapacity.reason)]
    assert (error.code(), "of 50 B that it may" in error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    assert dict(error.trailing_metadata())["retry-after"] == "1"
    assert held.num_bytes == 0


def test_a_deadline_and_a_cancel_reach_the_service() -> None:
    """The deadline of gRPC goes along with the request; once it has passed, the service's wait is cancelled."""
    service = FakeService(hold=asyncio.Event())
    lines: list[AccessEntry] = []

    async def act(client: Client) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.call("ModelInfer", question(), timeout=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(service.cancelled.wait(), 60)

    asked(act, service, log=lines.append)
    (request,) = service.requests
    assert request.deadline_s is not None
    assert 0 < request.deadline_s < 0.31  # gRPC rounds up to whole milliseconds
    assert [line.status for line in lines] == ["CANCELLED"]


def _ann_alone(metadata: Mapping[str, str]) -> str:
    if metadata.get("authorization") != "Bearer 123":
        raise Unauthorized("no key, or an unknown one")
    return "ann"


KEY = (("authorization", "Bearer 123"),)


def test_keys_are_asked_for_but_not_of_probes() -> None:
    """In the metadata; health needs none, and a stream needs one as much as a call."""
    service = FakeService()

    async def act(client: Client) -> None:
        for question_of in (client.call("ModelInfer", question()), client.call("ServerMetadata")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await question_of
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.call("ModelStreamInfer", iter([question()])).read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await client.call("ServerReady")).ready
        assert (await client.call("ModelInfer", question(), metadata=KEY)).id == "r-1"

    asked(act, service, authorize=_ann_alone)
    assert [request.caller for request in service.requests] == ["ann"]


def test_one_line_of_log_for_each_request() -> None:
    """An answer, a refusal, and each request of a stream."""
    lines: list[AccessEntry] = []

    async def act(client: Client) -> None:
        await client.call("ModelInfer", question(model_version="1"))
        stream = client.call("ModelStreamInfer", iter([question(id="s-1"), question(model_name="nobody")]))
        assert len([answer async for answer in stream]) == 2

    asked(act, log=lines.append)
    assert [(line.method, line.model, line.id, line.status) for line in lines] == [
        ("ModelInfer", "digits", "r-1", "OK"),
        ("ModelStreamInfer", "digits", "s-1", "OK"),
        ("ModelStreamInfer", "nobody", "r-1", "NOT_FOUND"),
    ]
    assert lines[0].bytes_in > IMAGE.nbytes
    assert (lines[0].bytes_out > 40, lines[0].version, lines[2].reason) == (True, "1", "not_found")


def test_a_stream_answers_in_the_order_of_completion() -> None:
    """What waits holds up nothing else; ids tell which is which; a wish for a last word is granted."""
    service = FakeService()

    async def act(client: Client) -> list[str]:
        release = asyncio.Event()
        service.hold = release
        first, second = question(id="first"), question(id="second")
        second.parameters["triton_enable_empty_final_response"].bool_param = True

        async def questions() -> AsyncIterator[Any]:
            yield first
            await service.held.wait()
            service.hold = None
            yield second

        answers = client.call("ModelStreamInfer", questions())
        found = [await answers.read()]
        release.set()
        found.append(await answers.read())
        assert found[0].infer_response.parameters["triton_final_response"].bool_param
        return [one.infer_response.id for one in found]

    assert asked(act, service) == ["second", "first"]


def test_a_stream_may_be_as_long_as_it_likes() -> None:
    """More requests than may be under way at once are all answered, once each."""
    ids = [f"r-{number}" for number in range(MOST_AT_ONCE + 50)]

    async def act(client: Client) -> list[str]:
        stream = client.call("ModelStreamInfer", iter([question(id=one) for one in ids]))
        return [answer.infer_response.id async for answer in stream]

    assert sorted(asked(act)) == sorted(ids)


def test_a_stream_that_is_left_leaves_nothing_behind() -> None:
    """Its requests are cancelled in the service."""
    service = FakeService(hold=asyncio.Event())

    async def act(client: Client) -> None:
        stream = client.call("ModelStreamInfer", iter([question()]))
        await asyncio.wait_for(service.held.wait(), 60)
        stream.cancel()
        await asyncio.wait_for(service.cancelled.wait(), 60)

    asked(act, service)


def test_large_typed_contents_are_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted as what they become, and give the same answer as raw contents."""
    threads, held = [], []
    in_flight = InFlight()

    def watched(message: Any, **how: Any) -> InferenceRequest:
        threads.append(threading.current_thread())
        held.append(in_flight.num_bytes)
        return messages.decode(message, **how)

    monkeypatch.setattr(methods, "decode", watched)
    values = np.arange(20_000, dtype=np.float32)
    typed = inference_pb2.ModelInferRequest(model_name="echo-fp32")
    typed.inputs.add(name="x", datatype="FP32", shape=[1, len(values)]).contents.fp32_contents.extend(values)
    answer = asked(lambda client: client.call("ModelInfer", typed), in_flight=in_flight)
    assert answer.raw_output_contents[0] == values.tobytes()
    assert threads != [threading.current_thread()]
    assert held[0] > messages.TYPED_TIMES * values.nbytes
    assert in_flight.num_bytes == 0


def test_a_message_of_a_million_tensors_is_refused() -> None:
    """Two bytes each on the wire; they would take a hundred each."""

    async def act(client: Client) -> None:
        await client._channel.unary_unary(PREFIX + "ModelInfer")(b"\x2a\x00" * 1_000_000)

    error = refused(act)
    assert (error.code(), "more than 1,000 fields" in error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)


def test_a_malformed_message_of_a_stream_is_refused_by_itself() -> None:
    """The requests before and after it are answered."""

    async def act(client: Client) -> list[str]:
        call = client._channel.stream_stream(
            PREFIX + "ModelStreamInfer", response_deserializer=inference_pb2.ModelStreamInferResponse.FromString
        )
        good = question().SerializeToString()
        return sorted([answer.error_message async for answer in call(iter([good, b"\xff", good]))])

    first, second, error = asked(act)
    assert (first, second) == ("", "")
    assert error.startswith("the message is not the method's")


def test_answers_of_a_stream_that_are_not_read_count() -> None:
    """What has no room with them is refused, the others come, and nothing stays counted."""
    num = 1_000_000  # more than flow control lets through unread
    lines: list[AccessEntry] = []
    held = InFlight(10 * num)  # a request and its answer have 4 * num each
    large = question(model_name="echo-fp32", raw_input_contents=[bytes(4 * num)])
    large.inputs[0].CopyFrom(
        inference_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, num])
    )

    async def act(client: Client) -> list[str]:
        stream = client.call("ModelStreamInfer", iter([large] * 5))
        await until(lambda: len(lines) == 5)
        return [answer.error_message async for answer in stream]

    errors = asked(act, log=lines.append, in_flight=held)
    assert len(errors) == 5
    assert {error.partition(" holds ")[0] for error in errors} == {"", "the server"}
    assert held.num_bytes == 0


def test_the_repository_is_for_the_admin_port() -> None:
    """The plain port says where it is."""
    error = refused(lambda client: client.call("RepositoryIndex"))
    assert (error.code(), "admin port" in error.details()) == (grpc.StatusCode.NOT_FOUND, True)
    service = FakeService()

    async def act(client: Client) -> int:
        load = inference_pb2.RepositoryModelLoadRequest(model_name="digits")
        unload = inference_pb2.RepositoryModelUnloadRequest(model_name="digits")
        await client.call("RepositoryModelUnload", unload)
        assert service.unloaded == {"digits"}
        await client.call("RepositoryModelLoad", load)
        load.parameters["config"].string_param = "{}"
        await client.call("RepositoryModelLoad", load)
        assert service.loaded_with == {"config": "{}"}
        return len((await client.call("RepositoryIndex")).models)

    assert asked(act, service, is_admin=True) == len(service.manifests)


def test_the_standard_question_after_health() -> None:
    """Of the server, and of a model by its name."""
    service = FakeService(unloaded={"two"})

    async def act(client: Client) -> list[int]:
        names = ("", "inference.GRPCInferenceService", "digits", "two")
        return [
            (await client.call("Check", HealthCheckRequest(service=name), service=messages.HEALTH)).status
            for name in names
        ]

    assert asked(act, service) == [2, 2, 1, 2]
    error = refused(lambda client: client.call("Check", HealthCheckRequest(service="nobody"), service=messages.HEALTH))
    assert error.code() is grpc.StatusCode.NOT_FOUND


def test_a_method_that_is_not_had_is_unimplemented() -> None:
    """Shared memory, traces and logs."""

    async def act(client: Client) -> None:
        await client._channel.unary_unary(PREFIX + "SystemSharedMemoryStatus")(b"")

    assert refused(act).code() is grpc.StatusCode.UNIMPLEMENTED
