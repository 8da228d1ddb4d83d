"""Who races: how each server is started with given settings, and how it is asked in the fastest way it documents."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.serving.race.samples import Arrays, Format
from stoker.artifacts import Artifact
from stoker.loadtesting.http_connection import Address
from stoker.loadtesting.inference_requests import http_request, infer_payload
from stoker.loadtesting.load_generator import Payload

ROOT = Path(__file__).resolve().parents[3]
COMPRESSED = "stoker-compressed"
"""Ours with another artifact of the same model; raced where one is given."""

_SERVERS = "bench.serving.race.servers"
_RAW = {"Content-Type": "application/octet-stream"}
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Setting:
    """How many workers with how many threads each, the most samples in a batch, and the longest wait for more [s]."""

    workers: int
    threads: int
    max_batch: int
    delay_s: float

    def __str__(self) -> str:
        """As it stands in the results: `2x1 b32 2ms`."""
        return f"{self.workers}x{self.threads} b{self.max_batch} {self.delay_s * 1e3:g}ms"


@dataclass(frozen=True)
class Pythons:
    """The interpreters of the environments: ours, the peers', MLServer's."""

    ours: str = sys.executable
    peers: str = ""
    mlserver: str = ""


@dataclass(frozen=True)
class Contender:
    """A server; `wire` says in words how it is asked, `settings` are those it is tuned over."""

    name: str
    wire: str
    package: str
    settings: tuple[Setting, ...]
    command: Callable[[Pythons, Artifact, Setting, int, Path], list[str]]
    payload: Callable[[Address, Artifact, Arrays], Payload]
    answer: Callable[[Artifact, bytes, bytes], NDArray[np.float32]]

    def python(self, pythons: Pythons) -> str:
        """Its interpreter."""
        return {"stoker": pythons.ours, "mlserver": pythons.mlserver}.get(self.package, pythons.peers)


def _layouts(max_batch: int, *delays_s: float) -> tuple[Setting, ...]:
    """Three ways to use two cores, and as many delays on the first."""
    first, *others = delays_s
    return (
        Setting(1, 2, max_batch, first),
        Setting(2, 1, max_batch, first),
        Setting(1, 1, max_batch, first),
        *(Setting(1, 2, max_batch, delay_s) for delay_s in others),
    )


def environment(artifact: Artifact, setting: Setting, port: int) -> dict[str, str]:
    """The environment of a server: what to serve and how, and the checkout on its path."""
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
        "RACE_ARTIFACT": str(artifact.path),
        "RACE_MODULE": artifact.manifest.name,
        "RACE_SETTINGS": json.dumps(asdict(setting)),
        "RACE_PORT": str(port),
        "OMP_NUM_THREADS": str(setting.threads),
        "BENTOML_DO_NOT_TRACK": "True",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONWARNINGS": "ignore",
    }


def _module(name: str) -> Callable[[Pythons, Artifact, Setting, int, Path], list[str]]:
    return lambda pythons, _artifact, _setting, _port, _work: [pythons.peers, "-m", f"{_SERVERS}.{name}"]


def _stoker(pythons: Pythons, artifact: Artifact, setting: Setting, port: int, _work: Path) -> list[str]:
    chosen = {
        "instances": setting.workers,
        "threads": setting.threads,
        "max_batch_rows": setting.max_batch,
        "max_delay_s": setting.delay_s,
    }
    words = [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]
    return [
        pythons.ours,
        "-m",
        "stoker",
        "serve",
        str(artifact.path.parent),
        "--http-port",
        str(port),
        "--grpc-port",
        "-1",
        "--admin-port",
        "-1",
        *words,
    ]


def _fastapi(pythons: Pythons, _artifact: Artifact, setting: Setting, port: int, _work: Path) -> list[str]:
    return [
        pythons.peers,
        "-m",
        "uvicorn",
        f"{_SERVERS}.fastapi_server:app",
        "--port",
        str(port),
        "--workers",
        str(setting.workers),
        "--log-level",
        "warning",
        "--no-access-log",
        "--timeout-worker-healthcheck",
        "60",
        "--host",
        "127.0.0.1",
    ]


def _bentoml(pythons: Pythons, _artifact: Artifact, _setting: Setting, port: int, _work: Path) -> list[str]:
    return [
        pythons.peers,
        "-m",
        "bentoml",
        "serve",
        f"{_SERVERS}.bentoml_server:Api",
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--timeout",
        "120",
    ]


def _mlserver(pythons: Pythons, _artifact: Artifact, setting: Setting, port: int, work: Path) -> list[str]:
    folder = work / f"mlserver-{port}"
    folder.mkdir(parents=True, exist_ok=True)
    workers = 0 if setting.workers == 1 else setting.workers  # one model is fastest in the server's own process
    server = {
        "host": "127.0.0.1",
        "http_port": port,
        "grpc_port": port + 1,
        "metrics_port": port + 2,
        "debug": False,
        "parallel_workers": workers,
        "use_structured_logging": False,
    }
    model = {
        "name": "model",
        "implementation": f"{_SERVERS}.mlserver_runtime.Runtime",
        "max_batch_size": setting.max_batch,
        "max_batch_time": max(setting.delay_s, 0.0005),
    }
    (folder / "settings.json").write_text(json.dumps(server), encoding="utf-8")
    (folder / "model-settings.json").write_text(json.dumps(model), encoding="utf-8")
    return [str(Path(pythons.mlserver).with_name("mlserver")), "start", str(folder)]


def _raw_payload(path: str) -> Callable[[Address, Artifact, Arrays], Payload]:
    def payload(address: Address, artifact: Artifact, sample: Arrays) -> Payload:
        body = Format(artifact.manifest.inputs).encode(sample)
        return Payload(http_request(address, "POST", path, body, _RAW), 1)

    return payload


def _json_payload(path: str, document: Callable[[str], object]) -> Callable[[Address, Artifact, Arrays], Payload]:
    def payload(address: Address, artifact: Artifact, sample: Arrays) -> Payload:
        word = base64.b64encode(Format(artifact.manifest.inputs).encode(sample)).decode()
        body = json.dumps(document(word), separators=(",", ":")).encode()
        return Payload(http_request(address, "POST", path, body, _JSON), 1)

    return payload


def _v2_document(word: str) -> object:
    return {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "BYTES", "data": [word]}]}


def _oip_payload(address: Address, artifact: Artifact, sample: Arrays) -> Payload:
    return infer_payload(address, artifact.path.parent.name, {name: array[None] for name, array in sample.items()})


def _raw_answer(_artifact: Artifact, _head: bytes, body: bytes) -> NDArray[np.float32]:
    return np.frombuffer(body, np.float32)


def _oip_answer(_artifact: Artifact, head: bytes, body: bytes) -> NDArray[np.float32]:
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
    return np.frombuffer(body[int(fields[b"inference-header-content-length"]) :], np.float32)


def _from_words(pick: Callable[[object], str]) -> Callable[[Artifact, bytes, bytes], NDArray[np.float32]]:
    return lambda _artifact, _head, body: np.frombuffer(base64.b64decode(pick(json.loads(body))), np.float32)


def contenders(max_batch: int) -> Mapping[str, Contender]:
    """All of them by name; each is tuned over four settings, eager PyTorch over two."""
    waiting = _layouts(max_batch, 0.002, 0.010)
    raw = ("raw tensors in HTTP bodies", _raw_answer)
    found = (
        Contender(
            "stoker",
            "Open Inference Protocol, binary tensors over HTTP",
            "stoker",
            _layouts(max_batch, 0.0, 0.002),
            _stoker,
            _oip_payload,
            _oip_answer,
        ),
        Contender(
            COMPRESSED,
            "the same, of a model that `stoker compress` made",
            "stoker",
            _layouts(max_batch, 0.0, 0.002),
            _stoker,
            _oip_payload,
            _oip_answer,
        ),
        Contender(
            "litserve", raw[0], "litserve", waiting, _module("litserve_server"), _raw_payload("/predict"), raw[1]
        ),
        Contender(
            "bentoml",
            "base64 in JSON: it takes raw bodies for files alone",
            "bentoml",
            _layouts(max_batch, 0.0),
            _bentoml,
            _json_payload("/answers", lambda word: {"items": [word]}),
            _from_words(lambda document: document[0]),
        ),  # type: ignore[index]
        Contender("ray", raw[0], "ray", waiting, _module("ray_server"), _raw_payload("/"), raw[1]),
        Contender(
            "mlserver",
            "V2 JSON with BYTES in base64: its REST has no binary tensors",
            "mlserver",
            waiting,
            _mlserver,
            _json_payload("/v2/models/model/infer", _v2_document),
            _from_words(lambda document: document["outputs"][0]["data"][0]),
        ),  # type: ignore[index]
        Contender(
            "fastapi-eager",
            raw[0],
            "fastapi",
            (Setting(1, 2, 1, 0.0), Setting(2, 1, 1, 0.0)),
            _fastapi,
            _raw_payload("/"),
            raw[1],
        ),
    )
    return {one.name: one for one in found}
