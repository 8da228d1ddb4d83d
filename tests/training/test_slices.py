"""The time that a process may take: when it saves and leaves, and what it says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stoker.errors import BadJob
from stoker.planning.model.slices import LEAVING_S, expected_slices, length_in_s, reserve_s
from stoker.records import Estimate
from stoker.training.slices import Slice, process_age_s
from stoker.units import epochs, seconds


def at(now_s: float, *, ends_at: float = 100.0, save_s: float = 3.0) -> Slice:
    """A slice of 100 s, `now_s` after its beginning."""
    return Slice(100.0, ends_at, save_s, clock=lambda: now_s)


def test_a_slice_is_over_once_an_update_and_a_save_have_no_room_left() -> None:
    """By the measured save: at 100 - 2 x 3 - 2 x 5 - the end of the process, and not before."""
    last_s = 100.0 - 2 * 3.0 - 2 * 5.0 - LEAVING_S
    assert not at(last_s - 0.1).is_over(updates_s=5.0)
    assert at(last_s + 0.1).is_over(updates_s=5.0)


def test_what_is_due_before_the_next_chance_counts() -> None:
    """An evaluation, and the upload of a mirror."""
    slice_ = at(70.0)
    assert not slice_.is_over(updates_s=1.0)
    assert slice_.is_over(updates_s=1.0, evaluate_s=20.0)
    slice_.upload_s = lambda: 25.0
    assert slice_.is_over(updates_s=1.0)


def test_the_longest_save_counts() -> None:
    """A disk that was slow once may be slow again."""
    slice_ = at(80.0)
    slice_.saved(9.0)
    slice_.saved(1.0)
    assert slice_.save_s == 9.0
    assert slice_.is_over(updates_s=0.1)


def test_the_end_says_how_many_slices_are_left_and_whether_they_are_long_enough() -> None:
    """At this slice's pace, rounded up; a slice that mostly started is named."""
    now = [40.0]
    slice_ = Slice(100.0, 100.0, clock=lambda: now[0])
    slice_.trained_from(1000)
    slice_.trained_from(1300)
    now[0] = 98.0
    assert slice_.left_after(1500, 3200) == (4, "")
    now[0] = 60.0
    left, advice = slice_.left_after(1000, 3200)
    assert left is None
    assert "20%" in advice


def test_another_process_of_the_machine_has_the_same_end() -> None:
    """It is given as text, to the last bit."""
    slice_ = Slice(2999.9, 12345.678901234567)
    assert Slice.parse(str(slice_)) == slice_


def test_the_time_counts_from_the_start_of_the_process() -> None:
    """Before any import; a second slice in one process counts from its own beginning."""
    script = (
        "import time; time.sleep(0.3); from stoker.training.slices import Slice\n"
        "first = Slice.begin(10.0).left_s; second = Slice.begin(10.0).left_s\n"
        "print(first, second)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, second = map(float, done.stdout.split())
    assert first < 9.71
    assert second > 9.9
    assert process_age_s() > 0.3


@pytest.mark.parametrize("wrong", ["soon", "0s", "-5min", epochs(1), 0.0, float("nan")])
def test_what_is_no_time_is_refused(wrong: object) -> None:
    """A word, nothing, and a length of training in another unit."""
    with pytest.raises(BadJob):
        length_in_s(wrong)


def test_lengths_are_given_with_units() -> None:
    """As text, as a duration, as seconds."""
    assert [length_in_s(length) for length in ("50min", seconds(3000), 3000)] == [3000.0] * 3


def test_a_forecast_says_how_many_slices() -> None:
    """With the interval of the forecast; a guess says that it is one, one slice that it is enough."""
    total = Estimate(value=9000.0, low=8000.0, high=11000.0, unit="s", basis="roofline")
    assert expected_slices(total, 3000.0, 200.0, is_guess=True).startswith("slices of 50 min: 4 (3 to 4), a guess")
    assert expected_slices(total, 20000.0, 200.0).endswith("one is enough")
    assert reserve_s(save_s=0.0, updates_s=0.0) == LEAVING_S
