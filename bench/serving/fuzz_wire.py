"""Fuzzes the parsers of the wire: whatever comes, the outcome is a request or a refusal.

    python -m bench.serving.fuzz_wire [--seconds 120] [--seed 0]

Four parsers take turns: bodies of REST (JSON, JSON with binary data behind it, one tensor's bytes), compressed bodies,
messages of gRPC, and whole requests on a socket of a running server. Inputs are good ones that were damaged: bytes
flipped, cut, doubled; values of the JSON replaced by others that are too large, negative, nested or of another kind;
sizes and lengths that lie; and plain noise. Written to bench/results/: how many inputs there were and how each ended,
by kind of refusal; how much resident memory grew; and every input that ended otherwise, of which there must be none.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gzip
import json
import platform
import random
import resource
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import uvicorn
from google.protobuf.message import DecodeError

from bench.serving.wire_overhead import IMAGE, NoModel
from bench.train.results import document, save
from stoker.serving.grpc import inference_pb2, messages
from stoker.serving.http import bodies
from stoker.serving.http.bodies import decode, decode_raw
from stoker.serving.http.connection import uvicorn_config
from stoker.serving.protocol import fit
from stoker.serving.refusals import Refusal
from stoker.serving.service import RequestLimits, ServerContext

MODEL = NoModel().fixed
MOST_BYTES = 1_000_000
LIMITS = RequestLimits(body_bytes=MOST_BYTES, header_s=0.2, body_s=0.2, linger_s=0.2)
ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3,
    2**31,
    2**63,
    2**64,
    10**400,
    -(2**63),
    0.5,
    1e308,
    "",
    "x",
    "FP32",
    "BYTES",
    "BOOL",
    [],
    {},
    [[]],
    [1],
    [[1], [2, 3]],
    [1, "2", None],
    {"a": 1},
    {"binary_data_size": 4},
    {"classification": -1},
)


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Flip, cut, double, insert or replace some bytes."""
    out = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(out) + 1)
        match chance.randrange(5):
            case 0 if at < len(out):
                out[at] ^= 1 << chance.randrange(8)
            case 1:
                del out[at : at + chance.randrange(1, 64)]
            case 2:
                out[at:at] = out[at : at + chance.randrange(1, 64)]
            case 3:
                out[at:at] = chance.randbytes(chance.randrange(1, 16))
            case _:
                out[at : at + 1] = chance.choice((b"[", b"{", b'"', b"-", b"9" * 30, b"\0", b"\xff"))
    return bytes(out)


def changed(value: Any, chance: random.Random) -> Any:
    """The JSON with a value somewhere in it replaced, removed or repeated."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.15:
        return chance.choice(ODD)
    value = copy.copy(value)
    key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
    match chance.randrange(8):
        case 0:
            del value[key]
        case 1 if isinstance(value, list):
            value.insert(key, value[key])
        case _:
            value[key] = changed(value[key], chance)
    return value


def rest_body(chance: random.Random) -> tuple[bytes, int | None]:
    """A body of REST and the length of its JSON as the header claims it."""
    tensor: dict[str, Any] = {"name": "image", "datatype": "FP32", "shape": [1, 28, 28]}
    is_binary = chance.random() < 0.5
    tail = IMAGE.tobytes() if is_binary else b""
    tensor |= {"parameters": {"binary_data_size": len(tail)}} if is_binary else {"data": IMAGE.tolist()}
    asked: Any = {
        "id": "1",
        "inputs": [tensor],
        "outputs": [{"name": "scores", "parameters": {"binary_data": True, "classification": 2}}],
        "parameters": {"timeout": 100, "priority": 1, "binary_data_output": True},
    }
    for _ in range(chance.randint(0, 3)):
        asked = changed(asked, chance)
    text = json.dumps(asked).encode()
    body = text + tail
    if chance.random() < 0.4:
        body = damaged(body, chance)
    length: int | None = len(text) if is_binary else None
    if chance.random() < 0.2:
        length = chance.choice((None, 0, 1, len(text) - 1, len(text) + 1, len(body), len(body) + 1, 10**17))
    return body, length


def one_body(chance: random.Random) -> None:
    """A body of REST, decoded and fitted to a model."""
    body, length = rest_body(chance) if chance.random() < 0.9 else (chance.randbytes(chance.randrange(200)), None)
    if length == 0:
        request, _ = decode_raw(body, manifest=MODEL, model="digits")
    else:
        request, _ = decode(body, json_bytes=length, model="digits")
    fit(request, MODEL, max_rows=8)


def one_compressed(chance: random.Random) -> None:
    """A compressed body, damaged or a bomb."""
    name = chance.choice(("gzip", "deflate"))
    plain = bytes(chance.choice((10, 5000, 3 * MOST_BYTES)))
    body = gzip.compress(plain, 1) if name == "gzip" else zlib.compress(plain, 1)
    if chance.random() < 0.7:
        body = damaged(body, chance)
    assert len(bodies.decompress(body, name, most_bytes=MOST_BYTES)) <= MOST_BYTES


def one_message(chance: random.Random) -> str:
    """A message of gRPC; what protobuf itself refuses never comes to us."""
    asked = inference_pb2.ModelInferRequest(model_name="digits")
    asked.inputs.add(name="image", datatype="FP32", shape=[1, 28, 28])
    if chance.random() < 0.5:
        asked.raw_input_contents.append(IMAGE.tobytes())
    else:
        asked.inputs[0].contents.fp32_contents.extend(IMAGE.reshape(-1).tolist())
    asked.parameters["timeout"].int64_param = 5
    content = asked.SerializeToString()
    head = damaged(content[:80], chance) if chance.random() < 0.7 else content[:80]
    content = head + (damaged(content[80:], chance) if chance.random() < 0.5 else content[80:])
    try:
        asked.ParseFromString(content)
    except DecodeError:
        return "no message"
    fit(messages.decode(asked), MODEL, max_rows=8)
    return "request"


def one_of_a_socket(address: tuple[str, int], chance: random.Random) -> str:
    """A request on a socket, damaged in head or body; gives the status, or that the server hung up."""
    body, length = rest_body(chance)
    header = "" if length is None else f"Inference-Header-Content-Length: {length}\r\n"
    head = f"POST /v2/models/digits/infer HTTP/1.1\r\nHost: x\r\n{header}Content-Length: {len(body)}\r\n\r\n".encode()
    if chance.random() < 0.7:
        head = damaged(head, chance)
    with socket.create_connection(address, timeout=20) as one:
        try:
            one.sendall(head + body)
            one.shutdown(socket.SHUT_WR)
            received = one.recv(65536)
        except (ConnectionError, BrokenPipeError):
            return "hung up"
    if not received:
        return "hung up"
    if not received.startswith(b"HTTP/1.1 "):
        raise AssertionError(f"answered {received[:100]!r}")
    return received[9:12].decode()


def outcome(one: Callable[[random.Random], object], chance: random.Random) -> str:
    """How one input ended; anything but a request or a refusal is an error of ours and is raised."""
    try:
        told = one(chance)
    except Refusal as refused:
        return refused.reason
    return told if isinstance(told, str) else "request"


def served() -> tuple[tuple[str, int], Callable[[], None]]:
    """A server in a thread, and how to stop it."""
    listening = socket.create_server(("127.0.0.1", 0))
    edge = ServerContext(service=NoModel(), limits=LIMITS)  # type: ignore[arg-type] - of the protocol, what inference needs
    config = uvicorn_config(edge, timeout_graceful_shutdown=1)
    running = uvicorn.Server(config)
    running.install_signal_handlers = lambda: None  # type: ignore[method-assign, assignment] - not the main thread
    thread = threading.Thread(target=lambda: asyncio.run(running.serve(sockets=[listening])), daemon=True)
    thread.start()

    def stop() -> None:
        running.should_exit = True
        thread.join(20)
        assert not edge.in_flight.num_bytes, f"{edge.in_flight.num_bytes} bytes of bodies are still counted"

    return listening.getsockname()[:2], stop


def fuzz(seconds: float, seed: int) -> dict[str, Any]:
    """All parsers in turns for so long; each input is made from the seed and its number alone."""
    address, stop = served()
    parsers: dict[str, Callable[[random.Random], object]] = {
        "rest_body": one_body,
        "compressed": one_compressed,
        "grpc_message": one_message,
        "socket": lambda chance: one_of_a_socket(address, chance),
    }
    found: dict[str, Counter[str]] = {name: Counter() for name in parsers}
    wrong: list[str] = []
    until, number, before_kb = time.monotonic() + seconds, 0, 0
    while time.monotonic() < until:
        for name, one in parsers.items():
            for _ in range(50 if name != "socket" else 5):
                number += 1
                try:
                    found[name][outcome(one, random.Random(f"{seed}-{number}"))] += 1
                except Exception as error:  # noqa: BLE001 - what must not be, written down and counted
                    wrong.append(f"{name}, input {number}: {type(error).__name__}: {error}")
        before_kb = before_kb or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    stop()
    return {
        "inputs": number,
        "outcomes": {name: dict(counts.most_common()) for name, counts in found.items()},
        "peak_memory_grown_mib": round(grown_kb / 1024, 1),
        "wrong": wrong[:50],
    }


def main() -> None:
    """Fuzz, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = fuzz(options.seconds, options.seed)
    for name, counts in found["outcomes"].items():
        print(f"{name:13} {sum(counts.values()):8,}  {counts}")
    print(f"peak memory grew by {found['peak_memory_grown_mib']} MiB; {len(found['wrong'])} ended otherwise")
    command = f"python -m bench.serving.fuzz_wire --seconds {options.seconds:g} --seed {options.seed}"
    versions = {"python": platform.python_version(), "orjson": orjson.__version__, "numpy": np.__version__}
    content = document("Damaged inputs of the wire's parsers, and how each ended", command, versions)
    save(Path(f"bench/results/fuzz_wire_{datetime.now(UTC):%Y-%m-%d}.json"), content | found)
    if found["wrong"]:
        raise SystemExit("\n".join(found["wrong"]))


if __name__ == "__main__":
    main()
