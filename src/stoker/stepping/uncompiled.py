"""Passes of a compiled model that run uncompiled: of another size than the plan's micro-batch, or without gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

_UNCOMPILED = ContextVar("_UNCOMPILED", default=False)


def is_uncompiled() -> bool:
    """Whether compiled models run uncompiled now."""
    return _UNCOMPILED.get()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Within the context, compiled models run uncompiled; a region's first call is then still to come.

    A checkpointed block does so in its second pass, too, which comes after the context.
    """
    token = _UNCOMPILED.set(True)
    try:
        with torch.compiler.set_stance("force_eager"):  # for what the user has compiled
            yield
    finally:
        _UNCOMPILED.reset(token)
