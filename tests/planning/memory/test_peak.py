"""The peak: how much, when, for what, in which line."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.planning.model.caching_allocator import AllocatorSettings
from stoker.planning.model.memory import forecast_memory, replay, timeline_of
from stoker.records.trace import Storage
from tests.planning.memory.traces import operation, shaped, storage, trace_of

MIB = 1 << 20


def test_the_peak_is_told_by_category_and_line() -> None:
    """At occurrence 1 both activations live; parameters have no line, the lines alternate."""
    storages = [
        storage(4 * MIB, -1, None, "parameter"),
        storage(2 * MIB, 0, 1),
        storage(3 * MIB, 1, 1),
        storage(MIB, 2, 2, "gradient"),
    ]
    found = forecast_memory(trace_of(storages))
    assert (found.allocated, found.reserved) == (9 * MIB, 22 * MIB)
    assert found.before_update == 4 * MIB
    assert found.peak_at == 1
    assert [(share.what, share.where, share.value) for share in found.shares] == [
        ("parameter", "", 4 * MIB),
        ("activation", "train_me.py:2", 3 * MIB),
        ("activation", "train_me.py:1", 2 * MIB),
    ]
    assert found.by_category == {"activation": 5 * MIB, "parameter": 4 * MIB}


def test_of_equal_peaks_the_first_is_told() -> None:
    """Occurrences 0 and 2 need as much."""
    assert forecast_memory(trace_of([storage(MIB, 0, 0), storage(MIB, 2, 2)])).peak_at == 0


def test_on_a_cpu_nothing_is_cached() -> None:
    """What lives, rounded up to 64 bytes."""
    found = forecast_memory(trace_of([storage(100, -1, None, "parameter"), storage(1, 0, 0)], target="cpu"))
    assert (found.allocated, found.reserved, found.before_update) == (192, 192, 128)


def test_hidden_memory_counts_at_its_operation() -> None:
    """On a CPU a convolution's copies raise the peak, and are named."""
    shapes = [shaped(8, 64, 32, 32), shaped(128, 64, 3, 3)]
    convolution = operation("convolution", shapes, [shaped(8, 128, 32, 32)], stride=[1, 1])
    found = forecast_memory(trace_of([storage(8 * MIB, 0, 0)], operations=[convolution], target="cpu"))
    assert found.allocated == 8 * MIB + 4_194_304
    assert found.by_category["library workspace"] == 4_194_304


def test_the_peak_may_be_before_the_update() -> None:
    """An update that allocates nothing."""
    found = forecast_memory(trace_of([storage(MIB, -1, None, "parameter")]))
    assert (found.peak_at, found.allocated) == (-1, MIB)


def test_at_the_capacity_it_says_whether_it_fits() -> None:
    """40 MiB of activations and 20 of parameters: 60 are needed, and 59 do not suffice."""
    storages = [storage(20 * MIB, -1, None, "parameter"), storage(40 * MIB, 0, 1)]
    assert forecast_memory(trace_of(storages), AllocatorSettings(capacity=60 * MIB)).fits
    assert not forecast_memory(trace_of(storages), AllocatorSettings(capacity=59 * MIB)).fits


@st.composite
def lives(draw: st.DrawFn) -> list[Storage]:
    """Storages of all sizes; some live before the update, some outlive it."""
    found = []
    for _ in range(draw(st.integers(1, 25))):
        size, born = draw(st.integers(1, 30 * MIB)), draw(st.integers(-1, 10))
        died = draw(st.one_of(st.none(), st.integers(max(born, 0), 11)))
        found.append(storage(size, born, died, "activation" if born >= 0 else "parameter"))
    return found


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(lives())
def test_shares_add_up_to_what_lives(storages: list[Storage]) -> None:
    """On a CPU exactly to the peak; on CUDA blocks are at most as much larger as their unsplit rests."""
    on_cpu = forecast_memory(trace_of(storages, target="cpu"))
    assert sum(share.value for share in on_cpu.shares) == on_cpu.allocated
    on_cuda = forecast_memory(trace_of(storages))
    lived = sum(share.value for share in on_cuda.shares)
    assert lived <= on_cuda.allocated <= on_cuda.reserved
    # Memory lived at once is at most what lives during a second update begun while the first one's rest is still there.
    assert on_cuda.allocated <= 2 * lived + len(storages) * (MIB + 512)


@settings(deadline=None, max_examples=40)
@given(lives())
def test_what_was_reserved_at_most_is_enough(storages: list[Storage]) -> None:
    """With that capacity the same updates run without a failure; with less than what lives they do not."""
    timeline = timeline_of(trace_of(storages))
    free = replay(timeline)
    assert replay(timeline, AllocatorSettings(capacity=free.reserved)).failed_at is None
    assert replay(timeline, AllocatorSettings(capacity=free.allocated - 1)).failed_at is not None


def test_less_than_is_reserved_freely_may_do() -> None:
    """Cached segments of 12 and 14 MiB are returned for one of 30: 50 MiB do, where 76 are reserved without a limit."""
    storages = [
        storage(20 * MIB, -1, None, "parameter"),
        storage(12 * MIB, 0, 1),
        storage(14 * MIB, 0, 1),
        storage(30 * MIB, 2, 2),
    ]
    timeline = timeline_of(trace_of(storages))
    assert replay(timeline).reserved == 76 * MIB
    assert replay(timeline, AllocatorSettings(capacity=50 * MIB)).failed_at is None
    assert replay(timeline, AllocatorSettings(capacity=50 * MIB - 1)).failed_at is not None
    assert replay(timeline, AllocatorSettings(capacity=60 * MIB, expandable=True)).failed_at is None
