"""The files that a served tensor passes, from the socket to the engine and back."""

from __future__ import annotations

import threading
from pathlib import Path
from types import CodeType, FrameType

import pytest

import stoker
from bench.serving.background_server import BackgroundServer
from stoker.loadtesting.http_connection import address_of, ask
from stoker.loadtesting.inference_requests import infer_payload
from stoker.serving.server import ServerOptions
from stoker.testing.tiny_models import tiny_artifact, tiny_inputs

MOST_FILES = 14
_ROOT = Path(stoker.__file__).parent


class Calls:
    """The code objects that are called in threads started while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.called: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if self.is_on and event == "call":
            self.called.add(frame.f_code)

    def files(self) -> list[str]:
        """Stoker's own, relative to the package."""
        paths = {Path(code.co_filename) for code in self.called}
        return sorted(str(path.relative_to(_ROOT)) for path in paths if path.is_relative_to(_ROOT))


def test_a_served_tensor_passes_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request in binary over HTTP, in the event loop and in the engine's thread: a reader follows it in an hour."""
    calls = Calls()
    monkeypatch.setattr(threading, "_profile_hook", calls)
    artifact = tiny_artifact(tmp_path / "digits")
    options = ServerOptions(
        places=(artifact.path.parent,), http_port=0, grpc_port=None, admin_port=None, watch_s=None, cores=1
    )
    with BackgroundServer(options) as server:
        assert server.started.http is not None
        address = address_of(server.started.http)
        request = infer_payload(address, artifact.path.parent.name, tiny_inputs()).request
        assert ask(address, request).status == 200  # what is done once is done
        calls.is_on = True
        assert ask(address, request).status == 200
        calls.is_on = False
    files = calls.files()
    assert "engines/onnxruntime.py" in files
    assert "serving/http/connection.py" in files
    assert len(files) <= MOST_FILES, files
