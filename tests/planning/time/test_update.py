from __future__ import annotations

import math
from dataclasses import replace

import pytest

from stoker.planning.model.update_time import counted, operation_times, update_time
from stoker.records import Occurrence, Operation, Pace, Storage, Trace, TraceSettings
from stoker.testing import fake_device
from tests.planning.time.cpu_points import elementwise, hardware, product, unmeasured

MM, RELU, ADD, STEP = (
    product(64, 64, 64),
    elementwise("relu", 4096),
    elementwise("add", 4096),
    elementwise("adam", 1000),
)
SECONDS = {"mm": 4e-3, "relu": 1e-3, "add": 3e-3, "adam": 2e-3}


class FixedTimes:
    """Every operation takes what the table says, known to a tenth."""

    def seconds(self, operation: Operation) -> float:
        return SECONDS[operation.name]

    def relative_error(self, operation: Operation) -> float:
        return 0.1


def trace(parts: int = 1, storages: tuple[Storage, ...] = ()) -> Trace:
    """An update: forward mm, relu and add, backward mm, for each part; then the optimiser."""
    occurrences = []
    for part in range(parts):
        occurrences += [Occurrence(operation=i, phase="forward", part=part, module=0, source=1) for i in (0, 1, 2)]
        occurrences.append(Occurrence(operation=0, phase="backward", part=part, module=0, source=1))
    occurrences.append(Occurrence(operation=3, phase="optimizer", part=parts - 1, module=0, source=0))
    return Trace(
        settings=TraceSettings(target="cpu", capability="", micro_batch=8, parts=parts),
        operations=(MM, RELU, ADD, STEP),
        occurrences=tuple(occurrences),
        storages=storages,
        events=(),
        modules=("",),
        sources=("", "train_me.py:7"),
    )


QUIET_HOST = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0, "update": 0.0}
PARAMETER = Storage(num_bytes=4, category="parameter", born=-1, died=None)


def test_on_a_cpu_operations_follow_each_other() -> None:
    """Forward 8 ms, backward 4 ms, the optimiser 2 ms."""
    time = update_time(counted(trace()), FixedTimes(), hardware(**QUIET_HOST))
    assert time.step_s.value == pytest.approx(14e-3)
    assert time.forward_s == pytest.approx(8e-3)
    assert time.step_s.basis == "calibrated"
    assert time.power_w is None
    assert time.compile_s is None


def test_the_host_comes_on_top() -> None:
    """For each operation forward and backward, for each parameter, and once."""
    measured = hardware(forward=1e-3, backward=2e-3, optimizer=5e-3, update=0.1)
    time = update_time(counted(trace(storages=(PARAMETER, PARAMETER))), FixedTimes(), measured)
    assert time.step_s.value == pytest.approx(14e-3 + 3 * 1e-3 + 2e-3 + 2 * 5e-3 + 0.1)


@pytest.mark.parametrize("micro_batches", [2, 5])
def test_the_second_micro_batch_stands_for_all_others(micro_batches: int) -> None:
    """Micro-batches cost what they do each, the optimiser once."""
    time = update_time(counted(trace(parts=2), micro_batches), FixedTimes(), hardware(**QUIET_HOST))
    assert time.step_s.value == pytest.approx(micro_batches * 12e-3 + 2e-3)
    assert time.forward_s == pytest.approx(micro_batches * 8e-3)


def test_all_that_was_timed_takes_as_many_times_as_long_as_the_machine_does_now() -> None:
    """Operations as well as the host's part: at half the pace an update takes twice as long."""
    measured = hardware(forward=1e-3, backward=2e-3, optimizer=5e-3, update=0.1)
    slower = replace(measured, pace=Pace(factor=2.0, deviation=0.0))
    then, now = (
        update_time(counted(trace(storages=(PARAMETER,))), operation_times(one), one).step_s.value
        for one in (measured, slower)
    )
    assert now == pytest.approx(2 * then)


def test_the_interval_is_that_of_the_operations_and_the_machine() -> None:
    """Known to a tenth each: mm, 8 of 14 ms in both passes, errs as one, the others by themselves; and a drift."""
    step = update_time(counted(trace()), FixedTimes(), hardware(**QUIET_HOST)).step_s
    deviation = math.hypot(0.8 / 14, 0.1 / 14, 0.3 / 14, 0.2 / 14, 0.05)
    assert step.high / step.value == pytest.approx(math.exp(1.2816 * deviation))
    assert step.value / step.low == pytest.approx(step.high / step.value)


def test_kinds_of_operations_that_changed_unalike_widen_the_interval() -> None:
    """One pace for all is then less certain; the value is the pace's all the same."""
    measured = hardware(**QUIET_HOST)
    alike, unalike = (
        update_time(
            counted(trace()), FixedTimes(), replace(measured, pace=Pace(factor=1.0, deviation=deviation))
        ).step_s
        for deviation in (0.0, 0.2)
    )
    assert unalike.value == alike.value
    assert unalike.high / unalike.value > 1.15 * alike.high / alike.value


def test_compiling_joins_chains_and_is_less_certain() -> None:
    """Relu and add become one kernel as long as the longer; the interval widens, and compiling takes time once."""
    eager, compiled = (
        update_time(counted(trace()), FixedTimes(), hardware(**QUIET_HOST), is_compiled=is_compiled)
        for is_compiled in (False, True)
    )
    assert eager.step_s.value - compiled.step_s.value == pytest.approx(1e-3)
    assert compiled.step_s.high / compiled.step_s.value > math.exp(1.2816 * 0.2)
    assert eager.step_s.high / eager.step_s.value < math.exp(1.2816 * 0.1)
    assert compiled.compile_s is not None
    assert compiled.compile_s.value > 1.0


def test_capturing_takes_time_for_each_operation_of_the_passes() -> None:
    """Once; a pass of twice as many micro-batches takes twice as long, and what is not captured nothing."""
    one, two = (
        update_time(counted(trace(), micro_batches), FixedTimes(), hardware(**QUIET_HOST), is_captured=True).compile_s
        for micro_batches in (2, 4)
    )
    assert one is not None
    assert two is not None
    assert two.value == pytest.approx(2 * one.value)
    assert update_time(counted(trace()), FixedTimes(), hardware(**QUIET_HOST)).compile_s is None


def test_on_a_gpu_the_host_runs_ahead() -> None:
    """A phase takes as long as the longer of device and host: forward the device, backward the host."""
    measured = hardware(**QUIET_HOST)
    assert measured.benchmark is not None
    gpu = unmeasured(
        device=fake_device(kind="cuda"), power_w=300.0, dense_flops={"fp32": 1e13}, bandwidth_bytes_per_s=1e12
    )
    time = update_time(counted(trace()), FixedTimes(), gpu)
    assert 14e-3 <= time.step_s.value < 16e-3
    slow_host = update_time(counted(trace()), FastTimes(), gpu)
    assert slow_host.step_s.value > 4 * 5e-6
    assert time.power_w is not None
    assert 0 < time.power_w.low <= time.power_w.value <= 300.0


class FastTimes(FixedTimes):
    """A device that needs next to no time."""

    def seconds(self, operation: Operation) -> float:
        return 1e-9


def test_a_host_that_was_measured_takes_the_place_of_the_usual_one() -> None:
    """Small operations on a GPU take what their host takes to start them: ten times as slow, ten times as long."""
    gpu = unmeasured(
        device=fake_device(kind="cuda"), power_w=300.0, dense_flops={"fp32": 1e13}, bandwidth_bytes_per_s=1e12
    )
    slow_host = {"forward": 7e-5, "backward": 6e-5, "optimizer": 6e-5, "update": 3e-3}
    usual, slow = (
        update_time(counted(trace()), FastTimes(), one, loader="device").step_s.value
        for one in (gpu, replace(gpu, host_s=slow_host))
    )
    assert slow == pytest.approx(10 * usual, rel=0.01)


def test_shares_name_operations_and_lines_and_add_up() -> None:
    """The largest first, each with the user's line; together they are the update."""
    time = update_time(counted(trace()), FixedTimes(), hardware(forward=1e-3, backward=0.0, optimizer=0.0, update=1e-3))
    assert (time.shares[0].what, time.shares[0].where) == ("mm, forward", "train_me.py:7")
    assert sum(share.value for share in time.shares) == pytest.approx(time.step_s.value)
    assert [share.value for share in time.shares] == sorted((share.value for share in time.shares), reverse=True)
