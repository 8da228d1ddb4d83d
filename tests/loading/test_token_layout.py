from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.loading.token_batches import TokenBudget, TokenLayout

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=90)
LONG = st.lists(st.integers(1, 4000), min_size=1, max_size=60)  # counted in steps of more than one token
ROOM = st.integers(0, 200)
WINDOWS = st.one_of(st.none(), st.integers(1, 6))


def batches_of(layout: TokenLayout, epoch: int) -> list[np.ndarray]:
    """The samples of each batch of an epoch."""
    return np.split(layout.samples(epoch), layout.cursors(epoch)[1:-1])


@settings(max_examples=150, deadline=None)
@given(st.one_of(LENGTHS, LONG), ROOM, st.booleans(), WINDOWS, st.integers(0, 3))
def test_an_epoch_has_every_sample_once_in_batches_within_their_tokens(
    lengths: list[int], room: int, is_padded: bool, window: int | None, epoch: int
) -> None:
    """No batch is empty or over its tokens, padding counted where it is to be."""
    array, most = np.array(lengths), max(lengths) + room
    layout = TokenLayout(array, TokenBudget(most, is_padded, window), seed=3)
    batches = batches_of(layout, epoch)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    for batch in batches:
        held = array[batch]
        assert 0 < (len(held) * held.max() if is_padded else held.sum()) <= most


@settings(max_examples=100, deadline=None)
@given(LENGTHS, ROOM, st.booleans(), WINDOWS)
def test_every_epoch_has_as_many_updates(lengths: list[int], room: int, is_padded: bool, window: int | None) -> None:
    """So that a run's length is known before it begins."""
    layout = TokenLayout(np.array(lengths), TokenBudget(max(lengths) + room, is_padded, window), seed=0)
    for epoch in range(4):
        cursors = layout.cursors(epoch)
        assert len(cursors) == len(layout.sizes) + 1
        assert (cursors[0], cursors[-1]) == (0, len(lengths))
        assert sorted(np.diff(cursors)) == sorted(layout.sizes)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, ROOM, WINDOWS, st.lists(st.integers(0, 8), min_size=1, max_size=8))
def test_an_epoch_is_the_same_whatever_was_asked_before(
    lengths: list[int], room: int, window: int | None, asked: list[int]
) -> None:
    """A run that goes on in another process takes the order that it began with."""
    cut = TokenBudget(max(lengths) + room, False, window)
    one, other = TokenLayout(np.array(lengths), cut, seed=5), TokenLayout(np.array(lengths), cut, seed=5)
    for epoch in asked:
        one.samples(epoch), one.cursors(epoch)
    np.testing.assert_array_equal(one.samples(asked[0]), other.samples(asked[0]))
    np.testing.assert_array_equal(one.cursors(asked[0]), other.cursors(asked[0]))


def test_samples_of_one_length_meet_others_in_each_epoch() -> None:
    """Only which lengths share a batch is fixed, not who does."""
    lengths = np.repeat(np.arange(5, 25), 30)
    layout = TokenLayout(lengths, TokenBudget(200, window=4), seed=1)
    partners = [next(set(one.tolist()) for one in batches_of(layout, epoch) if 300 in one) for epoch in (0, 1)]
    assert len(partners[0] & partners[1]) <= 3
    assert not np.array_equal(layout.cursors(0), layout.cursors(1))


def test_samples_of_all_different_lengths_meet_others_too() -> None:
    """Lengths within a step trade places."""
    layout = TokenLayout(np.arange(8000, 8600), TokenBudget(90_000), seed=1)
    partners = [next(set(one.tolist()) for one in batches_of(layout, epoch) if 300 in one) for epoch in (0, 1)]
    assert len(partners[0] & partners[1]) <= 3


def test_batches_are_nearly_full() -> None:
    """Counting in steps, and cutting where the next sample is too much, costs little."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5, 0.6, 20_000).astype(np.int64), 10, 2000)
    for window in (None, 50):
        layout = TokenLayout(lengths, TokenBudget(16_384, window=window), seed=0)
        assert lengths.sum() / (len(layout.sizes) * 16_384) > 0.97


def test_bucketed_batches_hardly_pad() -> None:
    """Sorted windows put like lengths together, also where two windows meet."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 500, 20_000)
    padding = []
    for window in (None, 5, 50):
        layout = TokenLayout(lengths, TokenBudget(8192, window=window), seed=0)
        held = [lengths[one] for one in batches_of(layout, 0)]
        padding.append(1 - lengths.sum() / sum(len(one) * one.max() for one in held))
    unsorted, few, many = padding
    assert unsorted > 0.3
    assert 0.2 > few > many
    assert many < 0.05


def test_counting_padding_fills_batches_with_it() -> None:
    """Samples times the longest come near the number of tokens, and stay within."""
    lengths = np.random.default_rng(0).integers(10, 500, 20_000)
    layout = TokenLayout(lengths, TokenBudget(8192, is_padded=True, window=50), seed=0)
    taken = [len(one) * lengths[one].max() for one in batches_of(layout, 0)]
    assert max(taken) <= 8192
    assert np.mean(taken) > 0.93 * 8192
