from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from stoker.loading.order import generator_states, restore_generators, seed_generators, seed_torch

KEYS = st.integers(0, 2**64 - 1)


def drawn() -> list[float]:
    """A draw from each global generator, one that comes in pairs included."""
    numpy = [float(np.random.random()), float(np.random.normal())]  # noqa: NPY002 - the generator that is seeded
    return [random.random(), random.gauss(0, 1), *numpy, float(torch.rand((), dtype=torch.float64))]


@given(KEYS, KEYS)
@example(0, 2**32)
def test_a_key_fixes_all_draws(key: int, other: int) -> None:
    """Of Python, NumPy and torch; keys that differ in the 32 bits that NumPy and torch take give others."""
    seed_generators(key)
    first = drawn()
    seed_generators(key)
    assert drawn() == first
    if other % 2**32 != key % 2**32:
        seed_generators(other)
        assert drawn()[-1] != first[-1]


def test_seeding_torch_leaves_the_others() -> None:
    """Python's and NumPy's run on."""
    seed_generators(1)
    whole = [*drawn()[:-1], *drawn()[:-1]]
    seed_generators(1)
    first = drawn()[:-1]
    seed_torch(5)
    assert first + drawn()[:-1] == whole


@pytest.mark.parametrize("num_draws", [0, 1, 2, 700])
def test_states_put_back_continue_the_draws(num_draws: int) -> None:
    """At any point, also between the two draws of a pair, and after the generators have refilled themselves."""
    seed_generators(3)
    for _ in range(num_draws):
        drawn()
    states = generator_states()
    expected = drawn()[:-1]
    seed_generators(4)
    restore_generators(states)
    assert drawn()[:-1] == expected
