from __future__ import annotations

import pytest

import stoker
from stoker.planning.slow_links import MOST_EVERY, MOST_SHARE, recommend, rounded_up, stated_link
from stoker.records.hardware import Links

MBIT = 1e6 / 8


def slow(sites: int = 2) -> Links:
    """100 Mbit/s and 50 ms."""
    return stated_link(bytes_per_s=100 * MBIT, latency_s=0.05, sites=sites)


def test_what_lockstep_costs_is_the_rings_time() -> None:
    """40 MB of gradients between two sites: 40 MB there and back by halves, and two latencies."""
    found = recommend(slow(), gradient_bytes=40e6, step_s=0.5)
    assert found.sync_s == pytest.approx(40e6 / (100 * MBIT) + 2 * 0.05)
    assert found.slowdown[1] == pytest.approx(1 + found.sync_s / 0.5)
    assert found.slowdown[0] == pytest.approx(1 + (found.sync_s - 2 / 3 * 0.5) / 0.5)
    assert found.is_needed


@pytest.mark.parametrize("step_s", [0.01, 0.1, 2.0])
@pytest.mark.parametrize("sites", [2, 4])
def test_the_interval_keeps_exchanges_to_their_share(step_s: float, sites: int) -> None:
    """After so many updates an exchange takes no more than its share; in the background it ends in half of them."""
    found = recommend(slow(sites), gradient_bytes=4e6, step_s=step_s)
    assert found.exchange_s / (found.exchange_s + found.every * step_s) <= MOST_SHARE
    assert 2 * found.exchange_s <= found.overlapped_every * step_s + 1e-9
    assert found.overlap * step_s >= found.exchange_s


def test_the_interval_is_no_longer_than_it_must_be() -> None:
    """The next smaller round number would take more."""
    found = recommend(slow(), gradient_bytes=4e6, step_s=0.01)
    smaller = max(number for number in range(1, found.every) if rounded_up(number) == number)
    assert found.exchange_s / (found.exchange_s + smaller * 0.01) > MOST_SHARE


def test_no_interval_is_longer_than_published_ones() -> None:
    """Fewer bits come first, then exchanges during updates; the sentence says what would have been needed."""
    as_usual = recommend(slow(), gradient_bytes=4e6, step_s=0.01)
    assert (as_usual.compress, as_usual.is_in_background, as_usual.interval) == ("int8", False, as_usual.every)
    fewer_bits = recommend(slow(), gradient_bytes=100e6, step_s=0.03)
    assert (fewer_bits.compress, fewer_bits.is_in_background) == ("int4", False)
    assert fewer_bits.interval <= MOST_EVERY
    assert 'compress="int4"' in fewer_bits.in_words()
    large = recommend(slow(), gradient_bytes=32e9, step_s=2.0)  # eight billion parameters
    assert large.every > MOST_EVERY
    assert large.interval <= MOST_EVERY
    assert large.waiting_share == 0.0
    words = large.in_words()
    assert f"{large.every:,} updates between two, and published intervals end at about 500" in words
    assert f'stoker.DiLoCo(every=stoker.updates({large.interval}), overlap={large.overlap}, compress="int4")' in words
    assert "all during updates" in words
    assert "fragments=" in words


def test_where_even_that_is_not_enough_it_is_said() -> None:
    """Sites wait for most of the time, at the longest interval that is published; and the settings can be meant."""
    found = recommend(slow(), gradient_bytes=320e9, step_s=0.5)
    assert found.interval == MOST_EVERY
    assert 0.5 < found.waiting_share < 1
    assert f"but for {100 * found.waiting_share:.0f} % of the time" in found.in_words()
    sync = eval(found.settings, {"stoker": stoker})  # noqa: S307 - what the user is to write
    assert sync.interval(32) == MOST_EVERY


def test_a_fast_link_needs_none_of_it() -> None:
    """Where the backward pass hides the exchange, the sentence says that lockstep will do."""
    found = recommend(stated_link(bytes_per_s=50e9, latency_s=5e-6), gradient_bytes=4e6, step_s=0.1)
    assert not found.is_needed
    assert "need no updates of their own" in found.in_words()


def test_the_sentence_has_the_numbers() -> None:
    """Cost, factor, interval and bytes are in it."""
    found = recommend(slow(), gradient_bytes=4e6, step_s=0.1)
    words = found.in_words()
    assert "420 ms an update" in words
    assert "4.5 to 5.2 times as long as the 100 ms" in words
    assert f"stoker.DiLoCo(every=stoker.updates({found.every}))" in words
    assert f"{found.fewer_bytes:,.0f} times fewer bytes" in words
    assert found.fewer_bytes == pytest.approx(4 * found.every, rel=0.01)


@pytest.mark.parametrize("changed", [{"bytes_per_s": 0.0}, {"latency_s": -1.0}, {"sites": 1}])
def test_a_link_that_cannot_be_is_refused(changed: dict[str, float]) -> None:
    """With the numbers it was given."""
    with pytest.raises(ValueError, match="a link joins 2 sites or more"):
        stated_link(**{"bytes_per_s": 1e6, "latency_s": 0.01, **changed})  # type: ignore[arg-type]


def test_an_update_that_takes_no_time_is_refused() -> None:
    """There is no interval to recommend then."""
    with pytest.raises(ValueError, match=r"got 4000000\.0 bytes and 0\.0 s"):
        recommend(slow(), gradient_bytes=4e6, step_s=0.0)
