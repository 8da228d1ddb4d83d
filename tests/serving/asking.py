"""A whole server for a test, and short ways to ask it."""

from __future__ import annotations

import contextlib
import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.serving.background_server import BackgroundServer
from stoker.serving.server import ServerOptions


def running(*places: Path, **options: Any) -> BackgroundServer:
    """A server on free ports, which looks at directories only when it is asked to."""
    ports = {"http_port": 0, "grpc_port": 0, "admin_port": 0, "watch_s": None}
    return BackgroundServer(ServerOptions(places=places, **{**ports, **options}))


def ask(url: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and document of a request; a POST if it has a body, which is bytes or turned into JSON."""
    status, answer = fetch(url, body, **headers)
    return status, json.loads(answer or b"null")


def fetch(url: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
    """Status and body of an answer. `Some_Header` is sent as `Some-Header`."""
    parts = urlsplit(url)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    with contextlib.closing(http.client.HTTPConnection(parts.netloc, timeout=60)) as connection:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("GET" if data is None else "POST", parts.path, data, sent)
        answer = connection.getresponse()
        return answer.status, answer.read()


def question(rows: int = 1, value: float = 0.5) -> dict[str, Any]:
    """What a tiny model takes."""
    return {"inputs": [{"name": "x", "shape": [rows, 8], "datatype": "FP32", "data": [value] * 8 * rows}]}


def infer(up: BackgroundServer, model: str = "digits", body: Any = None, version: str = "") -> tuple[int, Any]:
    """Ask a model."""
    at = f"/versions/{version}" if version else ""
    return ask(f"{up.started.http}/v2/models/{model}{at}/infer", body or question())


def load(up: BackgroundServer, model: str, **parameters: Any) -> tuple[int, Any]:
    """Ask the admin port to load a model."""
    return ask(f"{up.started.admin}/v2/repository/models/{model}/load", {"parameters": parameters})


def metric(up: BackgroundServer, line: str) -> float:
    """A series' value; 0 where there is none."""
    lines = fetch(f"{up.started.admin}/metrics")[1].decode().splitlines()
    return next((float(one.rpartition(" ")[2]) for one in lines if one.startswith(f"{line} ")), 0.0)


def tensor(**changes: Any) -> dict[str, Any]:
    """A question whose tensor is another."""
    return {"inputs": [{**question()["inputs"][0], **changes}]}
