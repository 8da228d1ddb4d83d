from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from bench.many.relay import Line, _Lane
from bench.many.slow_link import BATCH, summary, verdict


@pytest.fixture
def card() -> Iterator[tuple[int, int]]:
    """Both ends of something that separates frames no more than a pipe does."""
    ends = os.pipe2(os.O_NONBLOCK)
    yield ends
    for end in ends:
        os.close(end)


def test_frames_arrive_late_and_one_after_the_other(card: tuple[int, int]) -> None:
    """Two frames of half a second each arrive a delay after they have passed, and are counted when they are sent."""
    lane = _Lane(card[1], Line(bytes_per_s=1000, delay_s=2.0))
    lane.take(b"a" * 500, now=10.0)
    lane.take(b"b" * 500, now=10.0)
    assert lane.num_bytes == 1000
    assert lane.deliver(12.4) == 12.5
    with pytest.raises(BlockingIOError):
        os.read(card[0], 1000)
    assert lane.deliver(12.5) == 13.0
    assert os.read(card[0], 1000) == b"a" * 500
    lane.deliver(13.0)
    assert os.read(card[0], 1000) == b"b" * 500


def test_a_line_that_is_full_loses_frames(card: tuple[int, int]) -> None:
    """What would wait for more than a second is lost, and not counted."""
    lane = _Lane(card[1], Line(bytes_per_s=1000, delay_s=0.0))
    for _ in range(10):
        lane.take(b"x" * 500, now=0.0)
    assert lane.num_bytes == 1500


def test_ratios_are_within_a_round_and_bytes_by_the_sample() -> None:
    """The slower site counts, one that is alone counts twice, and the medians are taken of rounds' ratios."""

    def segment(seconds: float, updates: int = 50, num_bytes: int = 0) -> dict[str, float]:
        return {"s": seconds, "updates": updates, "bytes": num_bytes}

    one = {
        "apart": [segment(5.0)],
        "alone": [segment(4.0)],
        "diloco": [segment(5.0, num_bytes=1600)],
        "lockstep": [segment(10.0, 10, 32000)],
    }
    other = {**one, "diloco": [segment(5.5)], "alone": [segment(0.0)]}
    found = summary(one, other)
    assert found["diloco_over_apart"]["median"] == pytest.approx(5.0 / 5.5)
    assert found["diloco_over_alone"]["median"] == pytest.approx(4.0 / 5.5)
    assert found["samples_per_s"]["lockstep"] == pytest.approx(BATCH)
    assert found["fewer_bytes"] == pytest.approx((32000 / 10) / (1600 / 50))
    sites = [{"loss": 2.02, "weights": 1.0, "bytes": 2000, "updates": 50}] * 2
    told = verdict({"speed": found, "diloco": sites, "lockstep": {"loss": 2.0}, "higher": {"loss": 2.04}})
    assert told["loss"] == pytest.approx(0.01)
    assert told["loss_beside_higher_rate"] == pytest.approx(2.02 / 2.04 - 1)
    assert told["fewer_bytes"] == pytest.approx((32000 / 10) / (2000 / 50))  # of all the learning, its start included
    assert told["sites_are_equal"]
