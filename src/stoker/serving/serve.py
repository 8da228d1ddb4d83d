"""`serve` and `rollback`: serve exported models until a signal, and choose which version serves.

Imports no library of the extra `serve` until it is needed, so that a missing one is reported well.
"""

from __future__ import annotations

import dataclasses
import importlib
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from stoker import artifacts, serving
from stoker.errors import BadArtifact, BadJob, ServiceError

NEEDED = ("uvicorn", "httptools", "uvloop", "orjson", "grpc", "google.protobuf", "prometheus_client", "ml_dtypes")
"""Modules of the extra `serve`; engines are imported with the models that name them."""


def serve(
    models: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    announce: Callable[[Any], None] = lambda _started: None,
    **options: Any,
) -> None:
    """Serve models over HTTP and gRPC until SIGTERM or SIGINT; what was accepted by then is answered.

    Args:
        models: a model (`models/digits`), a directory of models (`models`), or several of either.
        announce: called with the `stoker.serving.server.ServerStarted` once the server is up.
        options: fields of `stoker.serving.server.ServerOptions`.

    Raises:
        StokerError: it could not start, or left requests unanswered; see `stoker.serving.server.run`.
    """
    # Ignored until the server handles it: there is nothing to reload yet. Only the main thread may set a handler.
    may_set_signals = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN) if may_set_signals else None
    try:
        require_libraries()
        places = (models,) if isinstance(models, str | PathLike) else models
        opened = serving.server.ServerOptions(places=tuple(Path(place) for place in places), **options)
        serving.server.run(opened, announce)
    finally:
        if before is not None:
            signal.signal(signal.SIGHUP, before)


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """The version of a model that serves now, and the one before; None: the newest that passes its checks."""

    model: str
    before: int | None
    now: int | None


def rollback(model: str | PathLike[str], *, to: int | None = None, newest: bool = False) -> Rollback:
    """Serve an older version of a model; a server that watches its directory follows within two seconds.

    Args:
        model: its directory, such as `models/digits`.
        to: the version to serve; None: the one before the current version.
        newest: serve the newest version again, including later ones, as without a rollback.

    Raises:
        BadArtifact: there is no such version, its files are not what was exported, or `service.json` cannot be
            written.
        BadJob: there is no older version, or both options are given.
    """
    place = Path(model)
    if to is not None and newest:
        raise BadJob("--to and --newest contradict each other", remedy="Give one of them.")
    available = artifacts.versions(place)
    if not available:
        raise BadArtifact(
            f"{place} is no model: no numbered directory in it has a manifest.json",
            remedy="Name the model's directory, such as models/digits.",
        )
    settings = artifacts.read_settings(place)
    before = max(settings.versions, default=None)
    listed = ", ".join(map(str, available))
    serving = before or available[-1]
    older = [number for number in available if number < serving]
    if to is not None and to not in available:
        raise BadArtifact(f"{place} has no version {to}", remedy=f"There are: {listed}.")
    if to is None and not newest and not older:
        raise BadJob(f"{place} has no version older than {serving}, which serves", remedy=f"There are: {listed}.")
    now = None
    if not newest:
        now = older[-1] if to is None else to
        artifacts.read(place / str(now)).verify()
    artifacts.write_settings(place, dataclasses.replace(settings, versions=() if now is None else (now,)))
    return Rollback(model=place.resolve().name, before=before, now=now)


def require_libraries(needed: Sequence[str] = NEEDED) -> None:
    """Check that a server's libraries are installed.

    Raises:
        ServiceError: one is not; with the extra to install.
    """
    for name in needed:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ServiceError(
                f"serving needs {name.partition('.')[0]}, which is not installed here",
                remedy="pip install 'stoker[serve]'",
            ) from error
