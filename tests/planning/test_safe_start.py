"""The start under a safe plan: what its guess leaves behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from stoker.planning import safe_start


def test_a_guess_leaves_no_second_model_beside_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step refers to itself, and would wait for the collector while the run takes its own weights and gradients."""
    made: list[weakref.ref[Any]] = []

    class Referring:
        def __init__(self) -> None:
            self.itself = self
            made.append(weakref.ref(self))

    monkeypatch.setattr(safe_start, "_passed", lambda *_: Referring() and None)
    nothing: Any = None
    gc.disable()
    try:
        assert safe_start._guessed(nothing, nothing, nothing, 1) is None
    finally:
        gc.enable()
    [left] = made
    assert left() is None
