"""What checkpoints and failures take of a run."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.devices.hardware import MACHINES_RESTART_S
from stoker.planning.model.checkpoint_cost import (
    DISK_BYTES_PER_S,
    LEAST_LOST_SHARE,
    LINK_SHARE,
    ONCE_S,
    WRITING_ONCE_S,
    Saving,
    saving,
)
from stoker.records import Layout, Plan

SIZES, APART = st.floats(0, 1e12), st.floats(1, 1e5)
ONE = Plan(device="cpu", micro_batch=1)
H100S = Plan(device="cuda:0", micro_batch=1, device_mtbf_h=50_700.0, layout=Layout(shards=8))


def once(size: float, apart_s: float, plan: Plan = ONE) -> Saving:
    """A run with a checkpoint every `apart_s`."""
    plan = dataclasses.replace(plan, checkpoint_every_s=apart_s)
    return saving(plan, size, training_s=1e4, unsaved_s=1e4, evaluations=0)


def test_a_small_state_takes_what_every_checkpoint_takes() -> None:
    """Milliseconds, not the microseconds that its bytes take."""
    assert once(100e3, 30.0).one.value == pytest.approx(ONCE_S, rel=0.05)


def test_a_large_state_takes_what_its_copy_takes() -> None:
    """On a CPU two gigabytes a second; of a GPU a fifth of its link's rate."""
    assert once(20e9, 600.0).one.value == pytest.approx(10.0, rel=0.01)
    found = saving(H100S, 12e9, training_s=1e5, unsaved_s=1e5, evaluations=0, link_bytes_per_s=64e9)
    assert found.one.value == pytest.approx(12e9 / (LINK_SHARE * 64e9), rel=0.01)


def test_checkpoints_one_upon_another_wait_for_the_disk() -> None:
    """The one before has to be written first; eight devices of a machine write to one disk."""
    assert once(100e3, 1e-9).one.value == pytest.approx(ONCE_S + WRITING_ONCE_S, rel=0.05)
    close = saving(
        dataclasses.replace(H100S, device_mtbf_h=None, checkpoint_every_s=1.0),
        12e9,
        training_s=1e4,
        unsaved_s=1e4,
        evaluations=0,
        link_bytes_per_s=64e9,
    )
    assert close.one.value == pytest.approx(8 * 12e9 / DISK_BYTES_PER_S["cuda"], rel=0.01)


@given(SIZES, APART, APART)
def test_more_room_between_checkpoints_never_costs_more(size: float, one: float, other: float) -> None:
    """And the interval has the value in it."""
    near, far = sorted((one, other))
    assert once(size, far).one.value <= once(size, near).one.value
    found = once(size, near).one
    assert 0 < found.low <= found.value <= found.high


def test_the_interval_follows_from_the_rate_of_failures() -> None:
    """Where one is given; else it is the plan's. Eight H100 with 8 billion parameters save every quarter of an hour."""
    found = saving(H100S, 12e9, training_s=2e4, unsaved_s=2e4, evaluations=0, link_bytes_per_s=64e9)
    assert found.every_s == pytest.approx(940, rel=0.01)
    assert found.total_s < 0.002 * 2e4
    assert once(12e9, 77.0, dataclasses.replace(H100S, device_mtbf_h=None)).every_s == 77.0
    sooner = saving(dataclasses.replace(H100S, device_mtbf_h=100.0), 12e9, training_s=2e4, unsaved_s=2e4, evaluations=0)
    assert sooner.every_s < found.every_s


def test_failures_are_part_of_a_run_where_they_matter() -> None:
    """Half an interval's work and a restart each; nothing where that is less than a hundredth."""
    layout = Layout(replicas=2048, shards=8)
    many = dataclasses.replace(H100S, layout=layout)
    found = saving(many, 12e9, training_s=1e6, unsaved_s=1e6, evaluations=0, link_bytes_per_s=64e9)
    mtbf_s = 50_700 * 3600 / 16_384
    assert found.lost_s is not None
    expected = 1e6 / mtbf_s * (found.every_s / 2 + MACHINES_RESTART_S + 8 * 12e9 / DISK_BYTES_PER_S["cuda"])
    assert expected < found.lost_s < 1.02 * expected  # failures during work that is done again cost more
    assert found.lost_s >= LEAST_LOST_SHARE * 1e6
    assert found.total_s == pytest.approx(found.number * found.one.value + found.lost_s)
    assert saving(H100S, 12e9, training_s=1e6, unsaved_s=1e6, evaluations=0).lost_s is None


def test_what_a_failure_costs_depends_on_the_machines() -> None:
    """Four devices share a disk where machines have four; a machine that was taken away takes longest to replace."""
    often = dataclasses.replace(H100S, device_mtbf_h=12.0)

    def lost(size: float = 0.0, **changes: float | None) -> float:
        found = saving(often, size, training_s=1e6, unsaved_s=1e6, evaluations=0, **changes)
        assert found.lost_s is not None
        return found.lost_s

    alone, several, taken = lost(), lost(machine_devices=4), lost(restart_s=900.0)
    failures = 1e6 * 8 / (12 * 3600)  # more of them during restarts
    assert failures * 240 < several - alone < 1.1 * failures * 240
    assert failures * 840 < taken - alone < 1.2 * failures * 840
    disk_s = 12e9 / DISK_BYTES_PER_S["cuda"]
    assert lost(12e9) - lost(12e9, machine_devices=4, restart_s=60.0) > failures * 4 * disk_s
