"""What the wire costs: CPU time of the server's process for each request, over a service that computes nothing.

    python -m bench.serving.wire_overhead [--requests 4000] [--rounds 5]

A process of its own serves a model of one 28 × 28 FP32 image that gives ten scores at once, always the same ones. This
process asks it, in closed loops over eight connections, with bodies that are made beforehand. What is counted is the
CPU time of the server's process (user and system, all its threads) divided by the requests, so that the client and
other people's work count less; servers take turns. Printed and written to bench/results/: the median over rounds, and
the least and most. A floor is uvicorn or grpc.aio alone, with a handler that reads the bytes and answers as many.
`http_uvicorn` is the whole application on uvicorn's own connections, in place of ours with their limits.
"""

from __future__ import annotations

import argparse
import socket
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import orjson
import uvicorn
import uvloop

from bench.train.results import document, save
from stoker.artifacts.dtypes import Arrays
from stoker.devices.cpu import cpu_s_of
from stoker.loadtesting.server_process import served_in_child
from stoker.records import ArtifactSource, Manifest, TensorSpec, Tolerance
from stoker.serving.grpc import inference_pb2, server
from stoker.serving.http.application import Application, Receive, Scope, Send
from stoker.serving.http.connection import uvicorn_config
from stoker.serving.protocol import fit
from stoker.serving.service import InferenceRequest, InferenceResponse, ServerContext

CONNECTIONS = 8
IMAGE = np.random.default_rng(0).standard_normal((1, 28, 28), np.float32)
SCORES = np.linspace(0, 1, 10, dtype=np.float32).reshape(1, 10)
INFER = "/inference.GRPCInferenceService/ModelInfer"


@dataclass
class NoModel:
    """A service that checks a request and gives the same scores to all."""

    fixed: Manifest = field(
        default_factory=lambda: Manifest(
            name="digits",
            engine="torch",
            precision="fp32",
            graph="none",
            golden="none",
            inputs=(TensorSpec(name="image", datatype="FP32", shape=("batch", 28, 28)),),
            outputs=(TensorSpec(name="scores", datatype="FP32", shape=("batch", 10)),),
            tolerance=Tolerance(absolute=0.0, relative=0.0),
            proved_on="nothing",
            source=ArtifactSource(kind="run", name="none", digest=""),
            made_at="",
            files=(),
        )
    )

    def manifest(self, model: str, version: str = "") -> Manifest:
        """The one there is."""
        return self.fixed

    async def infer(self, request: InferenceRequest) -> InferenceResponse:
        """The same scores."""
        fit(request, self.fixed)
        outputs: Arrays = {"scores": SCORES}
        return InferenceResponse(model="digits", version="1", id=request.id, outputs=outputs)


async def grpc_floor(_asked: bytes, _context: grpc.aio.ServicerContext) -> bytes:
    """Answer 160 bytes, which nobody parses."""
    return b"0" * 160


async def http_floor(_scope: Scope, receive: Receive, send: Send) -> None:
    """Read the body, answer 160 bytes."""
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"160")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"0" * 160})


def serve(kind: str, announce: Callable[[int], None]) -> None:
    """Serve until killed, and announce the port."""
    edge = ServerContext(service=NoModel())  # type: ignore[arg-type] - of the protocol, what inference needs
    if kind.startswith("grpc"):
        uvloop.run(_serve_grpc(edge, announce, is_floor=kind == "grpc-floor"))
        return
    listening = socket.create_server(("127.0.0.1", 0))
    announce(listening.getsockname()[1])
    config = uvicorn_config(edge)
    if kind != "http":
        application = http_floor if kind == "http-floor" else Application(edge)
        config = uvicorn.Config(
            application,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
    uvicorn.Server(config).run(sockets=[listening])


async def _serve_grpc(edge: ServerContext, announce: Callable[[int], None], *, is_floor: bool) -> None:
    made = grpc.aio.server() if is_floor else server(edge)
    if is_floor:
        handler = grpc.unary_unary_rpc_method_handler(grpc_floor)
        service, method = INFER.strip("/").split("/")
        made.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = made.add_insecure_port("127.0.0.1:0")
    await made.start()
    announce(port)
    await made.wait_for_termination()


def http_request(*, binary: bool) -> bytes:
    """A whole request, headers and body."""
    tensor: dict[str, Any] = {"name": "image", "datatype": "FP32", "shape": IMAGE.shape}
    asked: dict[str, Any] = {"inputs": [tensor]}
    tail = b""
    if binary:
        tail = IMAGE.tobytes()
        tensor["parameters"] = {"binary_data_size": len(tail)}
        asked["parameters"] = {"binary_data_output": True}
    else:
        tensor["data"] = IMAGE.reshape(-1).tolist()
    text = orjson.dumps(asked)
    head = (
        f"POST /v2/models/digits/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(text) + len(tail)}\r\n"
        + (f"Inference-Header-Content-Length: {len(text)}\r\n" if binary else "")
        + "User-Agent: bench\r\nAccept: */*\r\n\r\n"
    )
    return head.encode() + text + tail


def ask_http(port: int, request: bytes) -> Callable[[int], None]:
    """Asks over eight connections, in turns; new ones each time, since a server hangs up on those that ask nothing."""

    def ask(requests: int) -> None:
        sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
        for _ in range(requests // CONNECTIONS):
            for one in sockets:
                one.sendall(request)
            for one in sockets:
                _read_answer(one)
        for one in sockets:
            one.close()

    return ask


def _read_answer(one: socket.socket) -> None:
    received = b""
    while b"\r\n\r\n" not in received:
        received += _more(one)
    head, _, body = received.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(received.decode(errors="replace"))
    length = int(next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))[15:])
    while len(body) < length:
        body += _more(one)


def _more(one: socket.socket) -> bytes:
    data = one.recv(65536)
    if not data:
        raise SystemExit("a server hung up in the middle of an answer")
    return data


def ask_grpc(port: int) -> Callable[[int], None]:
    """Asks through one channel, eight at a time."""
    asked = inference_pb2.ModelInferRequest(model_name="digits", raw_input_contents=[IMAGE.tobytes()])
    asked.inputs.add(name="image", datatype="FP32", shape=IMAGE.shape)
    content = asked.SerializeToString()
    call = grpc.insecure_channel(f"127.0.0.1:{port}").unary_unary(INFER)

    def ask(requests: int) -> None:
        for _ in range(requests // CONNECTIONS):
            for pending in [call.future(content) for _ in range(CONNECTIONS)]:
                pending.result()

    return ask


class Case:
    """A server in a process of its own, and how it is asked."""

    def __init__(self, running: ExitStack, kind: str, asking: Callable[[int], Callable[[int], None]]) -> None:
        port, self._pid = running.enter_context(served_in_child(serve, kind))
        self._ask = asking(port)
        self._found: list[float] = []

    def round(self, requests: int) -> None:
        """Ask so often, after a tenth as often to warm up, and keep the CPU time of a request [µs]."""
        self._ask(requests // 10)
        before = cpu_s_of([self._pid])
        self._ask(requests)
        self._found.append((cpu_s_of([self._pid]) - before) / requests * 1e6)

    def found(self) -> dict[str, float]:
        """The CPU time of a request [µs] over the rounds."""
        found = {"median_us": statistics.median(self._found), "least_us": min(self._found), "most_us": max(self._found)}
        return {name: round(value, 1) for name, value in found.items()}


def main() -> None:
    """Measure all, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    binary, text = http_request(binary=True), http_request(binary=False)
    with ExitStack() as running:
        cases = {
            "http_floor": Case(running, "http-floor", lambda port: ask_http(port, binary)),
            "http_uvicorn": Case(running, "http-uvicorn", lambda port: ask_http(port, binary)),
            "http_binary": Case(running, "http", lambda port: ask_http(port, binary)),
            "http_json": Case(running, "http", lambda port: ask_http(port, text)),
            "grpc_floor": Case(running, "grpc-floor", ask_grpc),
            "grpc_raw": Case(running, "grpc", ask_grpc),
        }
        for _ in range(options.rounds):
            for case in cases.values():
                case.round(options.requests)
        found = {name: case.found() for name, case in cases.items()}
    for name, row in found.items():
        print(f"{name:12} {row['median_us']:7.1f} µs  ({row['least_us']:.1f} to {row['most_us']:.1f})")
    command = f"python -m bench.serving.wire_overhead --requests {options.requests} --rounds {options.rounds}"
    versions = {"uvicorn": uvicorn.__version__, "grpc": grpc.__version__, "numpy": np.__version__}
    content = document(
        "CPU time of the server for each request, over a service that computes nothing", command, versions
    )
    content |= {"cases": found, "connections": CONNECTIONS, "requests": options.requests, "rounds": options.rounds}
    save(Path(f"bench/results/wire_overhead_{datetime.now(UTC):%Y-%m-%d}.json"), content)


if __name__ == "__main__":
    main()
