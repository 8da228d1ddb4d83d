"""From a directory to engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker import engines
from stoker.errors import BadArtifact
from stoker.records import ServiceSettings
from stoker.serving.repository.version_loader import load_version
from stoker.testing.tiny_models import tiny_artifact


def test_instances_and_threads_come_from_settings_or_cores(tmp_path: Path) -> None:
    """Eight cores make two instances of four threads; given numbers stand."""
    path = tiny_artifact(tmp_path).path
    loaded = load_version(path, ServiceSettings(), cores=8)
    assert (len(loaded.engines), loaded.settings.threads) == (2, 4)
    assert loaded.load_s > 0
    assert len(load_version(path, ServiceSettings(instances=3, threads=1), cores=1).engines) == 3


def test_engines_are_closed_where_the_check_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that does not pass keeps no threads and no memory, whatever its engine raises."""
    artifact = tiny_artifact(tmp_path)
    closed = []

    class Raising:
        def run(self, inputs):
            raise RuntimeError("the library gave up\nsomewhere")

        def close(self):
            closed.append(self)

    monkeypatch.setattr(engines, "load", lambda *_args, **_how: (Raising(), Raising()))
    with pytest.raises(RuntimeError, match="the library gave up"):
        load_version(artifact.path, ServiceSettings(), cores=1)
    assert len(closed) == 2


def test_damaged_files_are_refused_before_an_engine_loads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests come first."""
    artifact = tiny_artifact(tmp_path)
    artifact.graph_path.write_bytes(artifact.graph_path.read_bytes() + b"x")
    monkeypatch.setattr(engines, "load", lambda *_args, **_how: pytest.fail("loaded"))
    with pytest.raises(BadArtifact, match="is not what was exported"):
        load_version(artifact.path, ServiceSettings(), cores=1)
