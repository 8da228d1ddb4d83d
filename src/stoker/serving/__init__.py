"""Serving exported models: a repository, a batcher, and the Open Inference Protocol over HTTP and gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.imports import on_first_use

if TYPE_CHECKING:
    from stoker.serving import server as server

__getattr__ = on_first_use(__name__, __file__)
