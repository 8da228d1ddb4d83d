"""Serving exported models until someone stops the server."""

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

from stoker import artifacts
from stoker.errors import BadArtifact, BadJob, ServiceError

NEEDED = ("uvicorn", "httptools", "uvloop", "orjson", "grpc", "google.protobuf", "prometheus_client", "ml_dtypes")
"""Modules of the extra `serve`, besides engines, which are loaded with the models that name them."""


def serve(
    models: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    announce: Callable[[Any], None] = lambda _started: None,
    **options: Any,
) -> None:
    """Serve models over HTTP and gRPC until SIGTERM or SIGINT; what was accepted by then is answered.

    Args:
        models: a model (`models/digits`), a directory of models (`models`), or several of either.
        announce: is told what is up (`stoker.serving.server.ServerStarted`) before requests are awaited.
        options: fields of `stoker.serving.server.ServerOptions`.

    Raises:
        StokerError: it could not start, or left requests unanswered; see `stoker.serving.server.run`.
    """
    # Until the server handles it: what it asks for, reading files again, has not been read yet.
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN) if _may_set_signals() else None
    try:
        _serve(models, announce, options)
    finally:
        if before is not None:
            signal.signal(signal.SIGHUP, before)


def _serve(
    models: str | PathLike[str] | Sequence[str | PathLike[str]],
    announce: Callable[[Any], None],
    options: dict[str, Any],
) -> None:
    require_libraries()
    from stoker.serving.server import ServerOptions, run  # noqa: PLC0415 - needs the libraries just looked for

    places = (models,) if isinstance(models, str | PathLike) else models
    run(ServerOptions(places=tuple(Path(place) for place in places), **options), announce)


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """Which version of a model serves from now on, and which did; None: the newest that passes its checks."""

    model: str
    before: int | None
    now: int | None


def rollback(model: str | PathLike[str], *, to: int | None = None, newest: bool = False) -> Rollback:
    """Have a model served by an older version; a server that watches its directory takes it up in a second or two.

    Args:
        model: its directory, such as `models/digits`.
        to: the version to serve; None: the one before the version that serves.
        newest: serve the newest version again, and those to come, as without a rollback.

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
    now = None if newest else _version_to_serve(place, available, before or available[-1], to)
    if now is not None:
        artifacts.read(place / str(now)).verify()
    artifacts.write_settings(place, dataclasses.replace(settings, versions=() if now is None else (now,)))
    return Rollback(model=place.resolve().name, before=before, now=now)


def _version_to_serve(model: Path, available: Sequence[int], serving: int, to: int | None) -> int:
    listed = ", ".join(map(str, available))
    if to is not None:
        if to not in available:
            raise BadArtifact(f"{model} has no version {to}", remedy=f"There are: {listed}.")
        return to
    older = [number for number in available if number < serving]
    if not older:
        raise BadJob(f"{model} has no version older than {serving}, which serves", remedy=f"There are: {listed}.")
    return older[-1]


def _may_set_signals() -> bool:
    """Whether this is the thread that signals are handled in."""
    return threading.current_thread() is threading.main_thread()


def require_libraries(needed: Sequence[str] = NEEDED) -> None:
    """See that what a server stands on is installed.

    Raises:
        ServiceError: it is not; the extra that brings it is named.
    """
    for name in needed:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ServiceError(
                f"serving needs {name.partition('.')[0]}, which is not installed here",
                remedy="pip install 'stoker[serve]'",
            ) from error
