"""A server under mixed load for an hour: memory, descriptors and threads as curves, and no answer that fails.

    python -m bench.serving.soak [--minutes 60]

A server in a process of its own serves a small MLP with ONNX Runtime. Callers ask it without a pause: HTTP in binary
and in JSON (small, and large enough to be read on a thread), gRPC calls, a gRPC stream, and requests that are wrong
(bad JSON, endless trailers, half bodies that hang up). Meanwhile a version is written and loaded every few seconds and
old ones are removed, and SIGHUP comes every ten. Every five seconds resident memory, descriptors and threads are read
from /proc. It passes if every good request is answered with 200 or refused for load (429, 503), every bad one is
refused, the server ends by SIGTERM with code 0, and from the first fifth of the time on memory grows by less than 5 %
and 16 MiB together, descriptors and threads by less than 16 (medians of the first and last tenth of the rest).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from bench.serving.mlp import mlp_artifact
from bench.train.results import document, save
from stoker.serving.grpc import inference_pb2

RESULTS = Path(__file__).resolve().parents[1] / "results"
WIDTHS = (64, 256, 10)
KEPT, LOOK_S, RELOAD_S, HANGUP_S = 3, 5.0, 4.0, 10.0
MIB = 2**20
_GOOD, _LOAD = {200}, {429, 503}
_Infer = inference_pb2.ModelInferRequest
_SERVICE = "/inference.GRPCInferenceService/"


class Soak:
    """Callers that ask until the end, and what came of it."""

    def __init__(self, ports: dict[str, int], seconds: float) -> None:
        self.ports = ports
        self.ends = time.monotonic() + seconds
        self.outcomes: dict[str, Counter[str]] = {}
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    def count(self, kind: str, outcome: object, *, is_right: bool) -> None:
        """One more request and what came of it."""
        with self._lock:
            self.outcomes.setdefault(kind, Counter())[str(outcome)] += 1
            if not is_right and len(self.wrong) < 100:
                self.wrong.append(f"{kind}: {outcome}")

    def caller(self, kind: str, ask: Callable[[], Iterator[tuple[object, bool]]]) -> threading.Thread:
        """A thread that asks again and again; `ask` yields outcomes and whether they are right."""

        def run() -> None:
            while time.monotonic() < self.ends:
                try:
                    for outcome, is_right in ask():
                        self.count(kind, outcome, is_right=is_right)
                        if time.monotonic() >= self.ends:
                            return
                except Exception as error:  # noqa: BLE001 - whatever it is, it is written down
                    self.count(kind, f"{type(error).__name__}: {error}"[:200], is_right=False)

        return threading.Thread(target=run, name=kind)

    def http(self, body: bytes, headers: dict[str, str], right: set[int]) -> Iterator[tuple[object, bool]]:
        """One connection that asks a thousand times."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.ports["http"], timeout=60)) as connection:
            for _ in range(1000):
                connection.request("POST", "/v2/models/soak/infer", body, headers)
                answer = connection.getresponse()
                answer.read()
                yield answer.status, answer.status in right

    def calls(self, message: Any) -> Iterator[tuple[object, bool]]:
        """One channel of gRPC that asks a thousand times."""
        with grpc.insecure_channel(f"127.0.0.1:{self.ports['grpc']}") as channel:
            infer = channel.unary_unary(f"{_SERVICE}ModelInfer")
            for _ in range(1000):
                try:
                    infer(message.SerializeToString(), timeout=60)
                    yield "OK", True
                except grpc.RpcError as error:
                    code = error.code().name
                    yield code, code in {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}

    def stream(self, message: Any) -> Iterator[tuple[object, bool]]:
        """A stream of 200 requests."""
        with grpc.insecure_channel(f"127.0.0.1:{self.ports['grpc']}") as channel:
            infer = channel.stream_stream(
                f"{_SERVICE}ModelStreamInfer",
                response_deserializer=inference_pb2.ModelStreamInferResponse.FromString,
            )
            for answer in infer((message.SerializeToString() for _ in range(200)), timeout=60):
                yield answer.error_message[:100] or "OK", not answer.error_message

    def trailers(self) -> Iterator[tuple[object, bool]]:
        """Trailers without end are cut off."""
        with socket.create_connection(("127.0.0.1", self.ports["http"]), timeout=60) as client:
            head = (
                b"POST /v2/models/soak/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
            )
            with contextlib.suppress(OSError):
                client.sendall(head)
                for _ in range(200):
                    client.sendall(b"a: b\r\n" * 10_000)
                yield "taken", False
        yield "cut off", True
        time.sleep(0.2)

    def half(self) -> Iterator[tuple[object, bool]]:
        """A client that hangs up in the middle of its body."""
        with socket.create_connection(("127.0.0.1", self.ports["http"]), timeout=60) as client:
            client.sendall(
                b"POST /v2/models/soak/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 5000000\r\n\r\n" + bytes(MIB)
            )
        yield "hung up", True
        time.sleep(0.1)


def requests() -> tuple[bytes, bytes, bytes, Any]:
    """JSON small and large, binary, and a message of gRPC."""
    rows = np.random.default_rng(0).standard_normal((128, WIDTHS[0]), np.float32)

    def as_json(array: np.ndarray) -> bytes:
        tensor = {"name": "x", "shape": list(array.shape), "datatype": "FP32", "data": array.tolist()}
        return json.dumps({"inputs": [tensor]}).encode()

    one = rows[:1]
    tensor = {"name": "x", "shape": [1, WIDTHS[0]], "datatype": "FP32", "parameters": {"binary_data_size": one.nbytes}}
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    message = _Infer(model_name="soak")
    message.inputs.add(name="x", datatype="FP32", shape=[1, WIDTHS[0]])
    message.raw_input_contents.append(one.tobytes())
    return as_json(one), as_json(rows), len(text).to_bytes(4, "little") + text + one.tobytes(), message


def look(pid: int) -> dict[str, float]:
    """Resident memory [MiB], descriptors and threads of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "rss_mib": round(int(status["VmRSS"].split()[0]) / 1024, 1),
        "descriptors": sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
        "threads": int(status["Threads"]),
    }


def reload_versions(soak: Soak, artifact: Path, place: Path) -> None:
    """Write a version, have it loaded, remove old ones; again and again."""
    number = 1
    while time.monotonic() < soak.ends:
        number += 1
        shutil.copytree(artifact, place / f".{number}")
        (place / f".{number}").rename(place / str(number))
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", soak.ports["admin"], timeout=120)
        ) as connection:
            connection.request("POST", "/v2/repository/models/soak/load", b"{}")
            answer = connection.getresponse()
            answer.read()
            soak.count("reload", answer.status, is_right=answer.status == 200)
        for old in range(number - KEPT, 0, -1):
            if not (place / str(old)).exists():
                break
            shutil.rmtree(place / str(old))
        time.sleep(RELOAD_S)


def judged(curve: list[dict[str, float]]) -> dict[str, Any]:
    """How much each curve grew after the first fifth, and whether that is little enough."""
    rest = curve[len(curve) // 5 :]
    tenth = max(1, len(rest) // 10)
    judged: dict[str, Any] = {}
    for name in ("rss_mib", "descriptors", "threads"):
        first, last = (statistics.median(point[name] for point in part) for part in (rest[:tenth], rest[-tenth:]))
        most = 16 + 0.05 * first if name == "rss_mib" else 16
        judged[name] = {"first": first, "last": last, "most_growth": round(most, 1), "passes": last - first <= most}
    return judged


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(minutes: float, folder: Path) -> dict[str, Any]:
    """Serve, ask, look; what came of it."""
    artifact = mlp_artifact(folder / "made" / "soak", WIDTHS, engine="onnxruntime").path
    place = folder / "models" / "soak"
    shutil.copytree(artifact, place / "1")
    ports = {name: free_port() for name in ("http", "grpc", "admin")}
    command = [sys.executable, "-m", "stoker", "serve", str(folder / "models"), "--access-log", str(folder / "log")]
    command += [word for name, port in ports.items() for word in (f"--{name}-port", str(port))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _wait_until_ready(ports["http"])
        soak = Soak(ports, 60 * minutes)
        small, large, binary, message = requests()
        length, binary = int.from_bytes(binary[:4], "little"), binary[4:]
        answered = _GOOD | _LOAD
        threads = [
            soak.caller(
                "http_binary", lambda: soak.http(binary, {"Inference-Header-Content-Length": str(length)}, answered)
            ),
            soak.caller("http_json", lambda: soak.http(small, {}, answered)),
            soak.caller("http_large_json", lambda: soak.http(large, {}, answered)),
            soak.caller("http_bad_json", lambda: soak.http(small[:-9], {}, {400})),
            soak.caller(
                "http_lists", lambda: soak.http(b'{"inputs":[' + b"[]," * 50_000 + b"[]]}", {}, {400, 413, 429})
            ),
            soak.caller("grpc", lambda: soak.calls(message)),
            soak.caller("grpc_stream", lambda: soak.stream(message)),
            soak.caller("trailers", soak.trailers),
            soak.caller("half_bodies", soak.half),
            threading.Thread(target=reload_versions, args=(soak, artifact, place), name="reloads"),
        ]
        for thread in threads:
            thread.start()
        curve, began, hung_up = [], time.monotonic(), time.monotonic()
        while time.monotonic() < soak.ends and process.poll() is None:
            curve.append({"seconds": round(time.monotonic() - began, 1), **look(process.pid)})
            if time.monotonic() - hung_up > HANGUP_S:
                process.send_signal(signal.SIGHUP)
                hung_up = time.monotonic()
            time.sleep(LOOK_S)
        for thread in threads:
            thread.join(130)
        process.terminate()
        code = process.wait(60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    verdict = judged(curve)
    passes = code == 0 and not soak.wrong and all(part["passes"] for part in verdict.values())
    return {
        "passes": passes,
        "exit_code": code,
        "growth": verdict,
        "outcomes": {kind: dict(counts.most_common(20)) for kind, counts in sorted(soak.outcomes.items())},
        "wrong": soak.wrong,
        "curve": curve,
    }


def _wait_until_ready(port: int) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        with (
            contextlib.suppress(OSError),
            contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection,
        ):
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    raise TimeoutError("the server was not ready within 120 s")


def main() -> None:
    """Soak, print, write; exit code 1 if it did not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory() as temporary:
        result = run(minutes, Path(temporary))
    for kind, counts in result["outcomes"].items():
        print(f"{kind:16} {counts}")
    for name, growth in result["growth"].items():
        print(f"{name:16} {growth}")
    print(f"exit code {result['exit_code']}, {len(result['wrong'])} wrong {result['wrong'][:5]}")
    versions = {name: version(name) for name in ("stoker", "onnxruntime", "uvicorn", "uvloop", "grpcio")}
    versions["python"] = platform.python_version()
    content = document(__doc__.splitlines()[0], f"python -m bench.serving.soak --minutes {minutes:g}", versions)
    save(RESULTS / f"serving_soak_{datetime.now(UTC).date().isoformat()}.json", content | result)
    if not result["passes"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
