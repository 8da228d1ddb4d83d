from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.predicting.batched_inference import batches, cut_back, stack

SIZES = st.lists(st.tuples(st.integers(1, 6)), max_size=40)


@given(SIZES, st.integers(1, 7), st.booleans())
def test_every_row_is_in_one_batch(sizes: list[tuple[int, ...]], most: int, is_padded: bool) -> None:
    """None is lost or doubled, no batch is too large, and rows rise in size from batch to batch."""
    cut = batches(sizes, most, is_padded=is_padded)
    assert sorted(row for batch in cut for row in batch) == list(range(len(sizes)))
    assert all(1 <= len(batch) <= most for batch in cut)
    in_order = [sizes[row] for batch in cut for row in batch]
    assert in_order == sorted(in_order)


@given(SIZES, st.integers(1, 7))
def test_without_padding_a_batch_has_one_size(sizes: list[tuple[int, ...]], most: int) -> None:
    """Samples that cannot be filled up share a batch only with their like."""
    assert all(len({sizes[row] for row in batch}) == 1 for batch in batches(sizes, most, is_padded=False))


def test_rows_of_one_size_stay_in_order() -> None:
    """Where nothing varies, batches are the rows as they come."""
    assert batches([()] * 5, 2, is_padded=True) == ((0, 1), (2, 3), (4,))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(-3, 3))
def test_what_is_stacked_can_be_taken_apart(lengths: list[int], pad: int) -> None:
    """Each sample comes back whole, and the rest of its row is the padding."""
    samples = [np.arange(10, 10 + length) for length in lengths]
    stacked = stack(samples, pad)
    for row, sample in enumerate(samples):
        assert cut_back(stacked[row], ("tokens",), {"tokens": len(sample)}).tolist() == sample.tolist()
        assert (stacked[row, len(sample) :] == pad).all()


def test_only_dimensions_of_inputs_are_cut_back() -> None:
    """An output's dimension that no input has stays as long as it is."""
    assert cut_back(np.zeros((3, 5, 2)), ("tokens", "boxes", 2), {"tokens": 1}).shape == (1, 5, 2)
