"""What an update changes before its weights move, and how it is put back."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from stoker.stepping.buffers import SMALL_BYTES, Buffers
from stoker.training.recovery import Generators, UpdateSnapshot

LARGE = SMALL_BYTES // 4 + 1
"""Numbers in a buffer that is not copied each time."""


class Holder(nn.Module):
    """A module with one buffer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(size))
        self.register_buffer("absent", None)
        self.register_buffer("fleeting", torch.zeros(1), persistent=False)


def in_place(module: Holder) -> None:
    """Change the buffer where it is."""
    module.kept += 1


def replaced(module: Holder) -> None:
    """Put another tensor in its place."""
    module.kept = module.kept + 1


@pytest.mark.parametrize("change", [in_place, replaced])
@pytest.mark.parametrize("size", [3, LARGE])
def test_buffers_are_as_they_were(size: int, change: Callable[[Holder], None]) -> None:
    """However the model changes them, again and again, and those that are not saved too."""
    module = Holder(size)
    buffers = Buffers(module)
    for times in range(4):
        buffers.keep()
        for _ in range(2):
            change(module)
            module.fleeting += 1
            assert buffers.restore()
            assert module.kept[0] == module.fleeting[0] == times
        change(module)
        module.fleeting += 1


def test_batch_statistics_are_as_they_were() -> None:
    """PyTorch changes them without counting up their versions."""
    norm = nn.BatchNorm1d(2)
    buffers = Buffers(nn.Sequential(norm))
    buffers.keep()
    norm(torch.randn(4, 2) + 3)
    assert buffers.restore()
    assert (norm.running_mean == 0).all()
    assert norm.num_batches_tracked == 0


def test_a_large_constant_is_not_kept_twice_and_says_so_when_it_moves_after_all() -> None:
    """After two updates without a change its copy goes; what changes later cannot be put back, and is reported."""
    module = Holder(LARGE)
    buffers = Buffers(module)
    for _ in range(3):
        buffers.keep()
        assert buffers.restore()
    module.kept += 1
    assert not buffers.restore()
    buffers.keep()
    module.kept += 1
    assert buffers.restore()
    assert module.kept[0] == 1


def test_generators_are_as_they_were() -> None:
    """Python's and NumPy's, drawn from in each update."""
    generators = Generators()
    for _ in range(5):
        generators.keep()
        drawn = random.random(), np.random.random()  # noqa: NPY002 - the generator that users draw from
        generators.restore()
        assert (random.random(), np.random.random()) == drawn  # noqa: NPY002


def test_generators_that_nobody_draws_from_are_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them takes as long as a small model's forward pass."""
    calls = []
    state = random.getstate
    monkeypatch.setattr(random, "getstate", lambda: calls.append(1) or state())
    before = UpdateSnapshot(nn.Linear(1, 1))
    for _ in range(63):
        before.keep()
    assert len(calls) == 2
    assert before.restore()


def test_where_updates_are_skipped_generators_are_always_put_back() -> None:
    """Another thread may draw from them now and then, which must not end the run."""
    before = UpdateSnapshot(nn.Linear(1, 1), always=True)
    for _ in range(5):
        before.keep()
    random.random()
    before.keep()
    following = random.random()
    assert before.restore()
    assert random.random() == following


def test_generators_drawn_from_after_an_old_copy_are_not_put_back() -> None:
    """The draw may be of an earlier update, which is not made again: its draws must not come twice."""
    before = UpdateSnapshot(nn.Linear(1, 1))
    for _ in range(5):
        before.keep()
    drawn = random.random()
    before.keep()
    assert not before.restore()
    assert random.random() != drawn
