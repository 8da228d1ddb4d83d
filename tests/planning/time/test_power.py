import pytest

from stoker.planning.time.power import PowerModel, has_stacked_memory
from tests.planning.time.gpu_devices import gpu


def test_a_small_board_cannot_hold_its_clock_and_a_large_one_can() -> None:
    """An L4 of 72 W sustains less than 0.6 of its fp32 rate, an H100 of 700 W all of it."""
    small = PowerModel.of(gpu(compute_capability="8.9", power_w=72.0))
    large = PowerModel.of(gpu(compute_capability="9.0", power_w=700.0))
    assert small.sustained_share(23e12, "fp32") < 0.6
    assert large.sustained_share(52e12, "fp32") == 1.0


def test_the_same_chip_under_a_lower_limit_is_slower() -> None:
    """An A100 at 250 W sustains some 0.9 of what it does at 400 W, as measured."""
    shares = [PowerModel.of(gpu(power_w=watts)).sustained_share(18.2e12, "fp32") for watts in (250.0, 400.0)]
    assert shares[1] == 1.0
    assert shares[0] == pytest.approx(0.9, abs=0.03)


def test_without_a_known_limit_nothing_is_throttled() -> None:
    """Where nobody knows the limit, the full clock is assumed."""
    assert PowerModel.of(gpu(power_w=None)).sustained_share(1e15, "fp32") == 1.0


def test_energy_grows_with_work_and_stops_at_the_limit() -> None:
    """Idle is the floor, work adds to it, and no work takes more than the limit allows in its time."""
    power = PowerModel.of(gpu())
    idle = power.energy_j(1.0, {}, 0.0)
    some = power.energy_j(1.0, {"fp32": 5e12}, 1e11)
    assert 0 < idle < some < 400.0
    assert power.energy_j(1.0, {"fp32": 1e15}, 0.0) == 400.0


def test_what_memory_a_chip_has_follows_from_its_capability() -> None:
    """HBM for data-centre chips, GDDR for the rest, RTX 50 among them."""
    stacked = [has_stacked_memory(gpu(compute_capability=one)) for one in ("7.0", "8.0", "9.0", "10.0", "10.3")]
    assert all(stacked)
    assert not any(has_stacked_memory(gpu(compute_capability=one)) for one in ("6.1", "7.5", "8.6", "8.9", "12.0"))
