from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from stoker.jobs.run_length import Extent
from stoker.records import Position
from stoker.units import Duration, epochs, samples, seconds, updates

EXTENTS = st.builds(Extent, num_train=st.integers(1, 80), batch=st.integers(1, 100))
LENGTHS = st.one_of(
    st.builds(epochs, st.one_of(st.integers(1, 6), st.floats(0.02, 6), st.sampled_from([0.1, 0.3, 1.1, 1 / 3]))),
    st.builds(samples, st.one_of(st.integers(1, 400), st.floats(0.5, 400))),
    st.builds(updates, st.one_of(st.integers(1, 60), st.floats(0.5, 60))),
)


def walk(extent: Extent, num_updates: int) -> list[Position]:
    """Positions after 0, 1, ... updates, the way a plain loop over epochs and batches gets there."""
    position = Position()
    positions = [position]
    while len(positions) <= num_updates:
        size = min(extent.batch, extent.num_train - position.cursor)
        cursor = position.cursor + size
        ended = cursor == extent.num_train
        position = Position(
            epoch=position.epoch + ended,
            cursor=0 if ended else cursor,
            samples=position.samples + size,
            updates=position.updates + 1,
        )
        positions.append(position)
    return positions


def in_samples(extent: Extent, length: Duration) -> float:
    """A length in epochs or samples as a number of samples."""
    return length.value * (extent.num_train if length.unit == "epochs" else 1)


@given(EXTENTS, st.integers(0, 60))
def test_positions_are_those_of_a_plain_loop(extent: Extent, num_updates: int) -> None:
    """Where training is after any number of updates can be computed without walking there."""
    assert [extent.position(update) for update in range(num_updates + 1)] == walk(extent, num_updates)


@given(EXTENTS, st.integers(0, 60))
def test_a_batch_reaches_the_next_position_and_no_epoch_border_is_crossed(extent: Extent, update: int) -> None:
    """The batch at a position has as many samples as lie between it and the next, all of one epoch."""
    before, after = extent.position(update), extent.position(update + 1)
    size = extent.batch_at(before)
    assert 1 <= size <= extent.batch
    assert after.samples - before.samples == size
    assert before.cursor + size <= extent.num_train


@given(EXTENTS, LENGTHS)
def test_a_run_is_as_short_as_reaches_its_length(extent: Extent, length: Duration) -> None:
    """The last update reaches what was asked for; one fewer would not have."""
    total = extent.updates_in(length)
    assert total >= 1
    if length.unit == "updates":
        assert total - 1 < length.value <= total
    else:
        wanted = in_samples(extent, length)
        assert extent.position(total).samples >= wanted - 1e-5
        assert total == 1 or extent.position(total - 1).samples < wanted


@given(EXTENTS, st.integers(1, 20))
def test_whole_epochs_end_with_an_epoch(extent: Extent, count: int) -> None:
    """`epochs(n)` sees every sample n times, whatever the batch."""
    end = extent.position(extent.updates_in(epochs(count)))
    assert (end.epoch, end.cursor, end.samples) == (count, 0, count * extent.num_train)


@pytest.mark.parametrize(
    ("num_train", "length", "num_samples"), [(10, epochs(1.1), 11), (3, epochs(1 / 3), 1), (5, epochs(0.5), 3)]
)
def test_fractions_of_an_epoch_are_rounded_up_but_not_by_rounding_errors(
    num_train: int, length: Duration, num_samples: int
) -> None:
    """1.1 epochs of 10 samples are 11 samples, though 1.1 * 10 > 11 in floating point; half of 5 is 3."""
    extent = Extent(num_train, 1)
    assert extent.position(extent.updates_in(length)).samples == num_samples


@given(EXTENTS, LENGTHS, st.integers(1, 60))
@example(Extent(11, 10), samples(4), 4)  # the ragged update of an epoch lies within an interval
def test_evaluations_are_those_of_a_plain_loop(extent: Extent, every: Duration, total: int) -> None:
    """Their number is known beforehand: after each update in which an interval ends, and at the end."""
    positions = walk(extent, total)
    counts = [extent.intervals(every, position) for position in positions]
    ended = sum(before < after for before, after in itertools.pairwise(counts[:-1]))
    assert extent.evaluations(every, total) == ended + 1
    assert extent.evaluations_before(every, total) == ended


@given(EXTENTS, LENGTHS, st.integers(0, 60))
def test_intervals_are_whole_and_never_go_back(extent: Extent, every: Duration, update: int) -> None:
    """As many as fit into the way so far, up to rounding."""
    here = extent.position(update)
    done = here.updates if every.unit == "updates" else here.samples
    one = every.value if every.unit == "updates" else in_samples(extent, every)
    assume(one > 1e-3)
    count = extent.intervals(every, here)
    assert count <= done / one + 1e-3
    assert count + 1 > done / one - 1e-3
    assert count <= extent.intervals(every, extent.position(update + 1))


@given(st.integers(1, 12), st.integers(1, 30), st.integers(1, 5))
def test_tenths_of_an_epoch_end_with_the_epoch(parts: int, batches: int, batch: int) -> None:
    """The last interval of an epoch is not carried into the next one by a rounding error."""
    extent = Extent(batches * batch, batch)
    assert extent.intervals(epochs(1 / parts), extent.position(batches)) == parts


def test_seconds_are_no_number_of_samples() -> None:
    """They must have been turned into samples, once, from the forecast."""
    with pytest.raises(ValueError, match="3 seconds is no number of samples"):
        Extent(10, 2).updates_in(seconds(3))
