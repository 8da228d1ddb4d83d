from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.loading.order import RandomStream, key_of, keys_of_samples, mix_keys

WORDS = st.integers(0, 2**64 - 1)


@given(st.sampled_from(RandomStream), st.lists(st.integers(-(2**63), 2**64), max_size=4))
def test_a_key_is_a_function_of_its_parts(stream: RandomStream, parts: list[int]) -> None:
    """64 bits, the same every time."""
    key = key_of(stream, *parts)
    assert 0 <= key < 2**64
    assert key == key_of(stream, *parts)


def test_keys_of_neighbouring_parts_are_all_different() -> None:
    """Seeds, epochs and indices count from zero; streams, orders of parts and numbers of parts do not collide."""
    keys = [key_of(stream, seed, epoch) for stream in RandomStream for seed in range(20) for epoch in range(20)]
    keys += [key_of(stream, seed) for stream in RandomStream for seed in range(20)]
    keys += [key_of(stream, seed, epoch, 0) for stream in RandomStream for seed in range(5) for epoch in range(5)]
    assert len(set(keys)) == len(keys)


@given(st.lists(WORDS, min_size=1, max_size=50, unique=True))
def test_mixing_is_a_bijection(words: list[int]) -> None:
    """No two keys become one."""
    assert len(set(mix_keys(np.array(words, dtype=np.uint64)).tolist())) == len(words)


@given(WORDS, st.lists(st.integers(0, 2**40), min_size=1, max_size=50, unique=True), st.data())
def test_each_sample_has_its_own_key_whatever_else_is_in_the_batch(
    key: int, indices: list[int], data: st.DataObject
) -> None:
    """Keys of a batch are the keys of its samples alone."""
    keys = keys_of_samples(key, np.array(indices))
    assert len(set(keys.tolist())) == len(indices)
    at = data.draw(st.integers(0, len(indices) - 1))
    assert keys_of_samples(key, np.array(indices[at : at + 1])).tolist() == keys[at : at + 1].tolist()


def test_half_of_all_bits_are_set() -> None:
    """Keys of consecutive samples look random: each bit is set in half of them, within five deviations."""
    keys = keys_of_samples(key_of(RandomStream.AUGMENT, 0, 0), np.arange(10_000))
    bits = (keys[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / 100
    neighbours = (bits[1:] == bits[:-1]).mean(axis=0)
    assert np.abs(neighbours - 0.5).max() < 5 * 0.5 / 100
