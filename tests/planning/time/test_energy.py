import pytest

from stoker.planning.time.energy import energy_joules
from stoker.records import Estimate
from tests.planning.time.gpu_devices import addition, gpu, layer_norm, product


def lasting(seconds: float) -> Estimate:
    """An update's time."""
    return Estimate(value=seconds, low=0.9 * seconds, high=1.2 * seconds, unit="s", basis="datasheet")


def test_energy_lies_between_idling_and_the_limit() -> None:
    """Half a second on 400 W takes less than 200 J, more than an eighth of it, and the interval holds it."""
    energy = energy_joules([(product(4096, 4096, 4096), 10)], lasting(0.5), gpu())
    assert energy is not None
    assert 25 < energy.low < energy.value < energy.high <= 1.2 * 200
    assert (energy.unit, energy.basis) == ("J", "datasheet")


def test_more_work_in_the_same_time_takes_more() -> None:
    """FLOPs and bytes both add to it, as often as they are done."""
    done = [(product(2048, 2048, 2048), 1)]
    base, often, moved = (
        energy_joules(one, lasting(0.1), gpu()).value
        for one in (done, done * 3, [*done, (addition(10**8), 2), (layer_norm(8192, 1024), 2)])
    )
    assert often > base
    assert moved > base


def test_a_board_at_its_limit_is_surer() -> None:
    """Where the limit holds the power, energy is limit times time, and nearly as certain."""
    small = gpu(compute_capability="8.9", power_w=72.0)
    energy = energy_joules([(product(8192, 8192, 8192), 100)], lasting(4.0), small)
    assert energy.value == pytest.approx(72 * 4.0)
    assert energy.high <= 72 * 4.0 * 1.2


def test_without_a_limit_nobody_knows() -> None:
    """No power limit in the catalogue, no energy."""
    assert energy_joules([], lasting(1.0), gpu(power_w=None)) is None
