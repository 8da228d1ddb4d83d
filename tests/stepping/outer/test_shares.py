from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadJob
from stoker.stepping.diloco import SiteSplit, site_shares


@given(
    speeds=st.lists(st.floats(0, 1e4), min_size=1, max_size=6),
    batch=st.integers(6, 500),
    group=st.integers(1, 8),
)
def test_shares_are_the_batch_in_whole_groups(speeds: list[float], batch: int, group: int) -> None:
    """They add up to the batch, each site has some, and only the last group may be cut short."""
    if math.ceil(batch / group) < len(speeds):
        with pytest.raises(BadJob, match="cannot be shared"):
            site_shares(speeds, batch, group)
        return
    found = site_shares(speeds, batch, group)
    assert sum(found) == batch
    assert min(found) >= 1
    assert all(one % group == 0 for one in found[:-1])


@given(speeds=st.lists(st.floats(1, 1e3), min_size=2, max_size=6))
def test_shares_are_in_proportion(speeds: list[float]) -> None:
    """Of a large batch each share is its site's speed over all of them, to within one sample."""
    for share, speed in zip(site_shares(speeds, 10**6), speeds, strict=True):
        assert abs(share - 10**6 * speed / sum(speeds)) <= 1


def test_a_site_that_was_not_measured_counts_as_the_mean() -> None:
    """Somebody who has just joined gets neither nothing nor everything."""
    assert site_shares([30.0, 10.0, 0.0], 60) == (30, 10, 20)
    assert site_shares([0.0, 0.0], 10) == (5, 5)


@given(
    given_shares=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    size=st.integers(1, 200),
    group=st.one_of(st.none(), st.integers(1, 8)),
    micro_batch=st.integers(1, 60),
)
def test_sites_take_a_batch_apart(given_shares: list[int], size: int, group: int | None, micro_batch: int) -> None:
    """What the sites pass through their models, one after the other, is the batch; groups stay whole."""
    sites = [SiteSplit(part, len(given_shares), group, shares=tuple(given_shares)) for part in range(len(given_shares))]
    taken = []
    for site in sites:
        held = site.held(size)
        (span,) = site.spans(size)
        assert span.start % (group or 1) == 0 or not span
        for one in site.passes(size, micro_batch):
            assert one.size <= micro_batch
            if one.counts:
                assert held[one.start] == one.first
                taken += held[one.start : one.stop]
    assert taken == list(range(size))
