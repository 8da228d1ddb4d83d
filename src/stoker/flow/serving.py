"""Serving exported models until someone stops the server."""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from stoker.errors import ServiceError

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
        announce: is told what is up (`stoker.serving.options.Started`) before requests are awaited.
        options: fields of `stoker.serving.options.ServerOptions`.

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
    from stoker.serving.options import ServerOptions  # noqa: PLC0415 - needs the libraries just looked for
    from stoker.serving.server import run  # noqa: PLC0415 - likewise

    places = (models,) if isinstance(models, str | PathLike) else models
    run(ServerOptions(places=tuple(Path(place) for place in places), **options), announce)


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
