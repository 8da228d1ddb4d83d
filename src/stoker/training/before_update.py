"""What an update changes before its weights move, kept so that the update can be redone as if it had not begun.

What: buffers are copied, those of a model in one call; Python's and NumPy's generators are kept as they were (PyTorch's
are seeded before each micro-batch anyway). Weights, optimiser and average are not here: they change last.
Use when: before every update. Costs: half a microsecond for a model without buffers; 17 µs for the 24 buffers of eight
batch norms; for large buffers that change, their copy. Reading Python's and NumPy's generators takes 40 µs, so a model
that is not seen to draw from them has them read every 256 updates only.
Does not combine with: state that is no buffer (a plain attribute, a generator of the model's own), and large buffers
written to past PyTorch's version counter (`.data`).
"""

from __future__ import annotations

import random

import numpy as np
from torch import nn

from stoker.stepping.buffers import Buffers

_LOOK_EVERY = 256
"""Updates between two looks at generators that were not seen to be drawn from."""


class BeforeUpdate:
    """The state of a model's buffers and of the generators when `keep` was called last."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = Buffers(model)
        self._generators = Generators()

    def keep(self) -> None:
        """Remember the present state."""
        if self._buffers.are_there:
            self._buffers.keep()
        self._generators.keep()

    def restore(self) -> bool:
        """Put back what was kept; whether all of it could be."""
        self._generators.restore()
        return self._buffers.restore()


class Generators:
    """Python's and NumPy's global generators as they were."""

    def __init__(self) -> None:
        self._kept: tuple[object, object] | None = None
        self._are_drawn = False
        self._times = 0

    def keep(self) -> None:
        """Remember their states, each time if they are drawn from, else now and then."""
        self._times += 1
        if self._times % _LOOK_EVERY and self._times > 2 and not self._are_drawn:
            return
        before, self._kept = self._kept, _states()
        self._are_drawn = self._are_drawn or (before is not None and not _are_equal(before, self._kept))

    def restore(self) -> None:
        """Put back what was kept: where nothing had been drawn, that is what was before this update."""
        if self._kept is not None:
            python, numpy = self._kept
            random.setstate(python)  # type: ignore[arg-type]
            np.random.set_state(numpy)  # type: ignore[arg-type]  # noqa: NPY002 - the generator that users draw from


def _states() -> tuple[object, object]:
    return random.getstate(), np.random.get_state()  # noqa: NPY002 - as above


def _are_equal(one: tuple[object, object], other: tuple[object, object]) -> bool:
    (python, numpy), (pythons, numpys) = one, other
    assert isinstance(numpy, tuple)
    assert isinstance(numpys, tuple)
    return python == pythons and numpy[2:] == numpys[2:] and bool(np.array_equal(numpy[1], numpys[1]))
