from __future__ import annotations

import itertools

import pytest
import torch

from stoker.errors import NoDevice
from stoker.planning.time.cpu_families import place_of
from stoker.profiling.anchors import measure_anchors
from stoker.profiling.micro_benchmark import _Timed, measure_operations
from stoker.profiling.operations import Call, benchmark_calls
from stoker.records import Device, from_json, to_json
from stoker.records.hardware import MicroBenchmark
from stoker.records.trace import Operation
from stoker.units import GIB

CPU = Device(name="cpu", kind="cpu", model="some CPU", cores=1, memory_bytes=GIB, fast_dtypes=("fp32",))
_ATEN = torch.ops.aten


def small_calls() -> list[Call]:
    """A product and a function of each element."""
    return [
        Call(_ATEN.mm.default, lambda pool: ((pool.random(24, 16), pool.random(16, 8)), {})),
        Call(_ATEN.relu.default, lambda pool: ((pool.random(100),), {})),
    ]


@pytest.fixture(autouse=True)
def _small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.profiling.micro_benchmark.POOL_BYTES", 2**16)


def test_each_call_becomes_an_operation_with_its_time() -> None:
    """Shapes and FLOPs are those of the call; the record survives its way to disk."""
    measured = measure_operations(CPU, threads=1, budget_s=1e6, calls=small_calls())
    operations = {timing.operation.name: timing.operation for timing in measured.timings}
    assert operations.keys() == {"mm", "relu"}
    assert operations["mm"].flops == 2 * 24 * 16 * 8
    assert all(timing.seconds > 0 for timing in measured.timings)
    assert measured.threads == 1
    assert measured.host_s.keys() == {"forward", "backward", "optimizer", "update"}
    assert measured.launch_s > 0
    assert measured.anchors_s.keys() == measure_anchors(threads=1, turns=1)[0].keys()
    assert from_json(to_json(measured), MicroBenchmark) == measured


def test_settings_and_generators_are_as_before() -> None:
    """Threads, the mode of gradients and what PyTorch draws next do not depend on having measured."""
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with torch.no_grad():
        measure_operations(CPU, threads=1, budget_s=1e6, calls=small_calls())
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_the_budget_holds_on_a_machine_that_is_too_slow() -> None:
    """With a clock that runs a second a reading, one call is timed and the rest left out."""
    readings = itertools.count()
    measured = measure_operations(CPU, threads=1, budget_s=1, clock=lambda: float(next(readings)), calls=small_calls())
    assert len(measured.timings) == 1


def test_a_disturbed_turn_does_not_count() -> None:
    """Of three turns the middle one counts, of fewer the best: a burst of other work in one changes nothing."""
    assert _Timed(None, None, [3.0, 100.0, 2.0]).seconds == 3.0
    assert _Timed(None, None, [100.0, 2.0]).seconds == 2.0
    assert _Timed(None, None, [4.0]).seconds == 4.0


def of_bytes(num_bytes: int, flops: int = 0) -> Operation:
    """An operation on so many."""
    return Operation(name="relu", inputs=(), outputs=(), flops=flops, bytes_read=num_bytes, bytes_written=0)


def test_a_small_call_counts_by_how_long_it_takes_over_and_over_and_after_others() -> None:
    """The geometric mean, of the median of its passes; without passes, as on a GPU, its turns alone."""
    small = of_bytes(1000)
    assert _Timed(None, small, [4.0], [9.0, 8.0, 100.0], is_on_cpu=True).seconds == pytest.approx(6.0)
    assert _Timed(None, small, [4.0], [], is_on_cpu=True).seconds == 4.0


def test_a_call_that_moves_many_bytes_counts_by_its_passes_alone() -> None:
    """In an update they are out of the caches; in a loop of its own they would not be. A large product is not moved."""
    assert _Timed(None, of_bytes(2**24, flops=10**9), [4.0], [9.0], is_on_cpu=True).seconds == 4.0
    assert _Timed(None, of_bytes(2**24), [4.0], [9.0, 8.0, 100.0], is_on_cpu=True).seconds == 9.0
    assert _Timed(None, of_bytes(2**24), [4.0], []).seconds == 4.0


def test_a_large_call_that_was_not_passed_by_is_left_out() -> None:
    """Time was over: its one turn shows page faults. A small one has its turn at ease, and a GPU has no passes."""
    assert not _Timed(None, of_bytes(2**24), [4.0], is_on_cpu=True).is_usable
    assert _Timed(None, of_bytes(2**24), [4.0], [5.0], is_on_cpu=True).is_usable
    assert _Timed(None, of_bytes(1000), [4.0], is_on_cpu=True).is_usable
    assert _Timed(None, of_bytes(2**24), [4.0]).is_usable


def test_every_call_is_made_after_others_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With threads of a CPU small calls have turns and passes; a large one is not made over and over."""
    kept: list[_Timed] = []
    monkeypatch.setattr(_Timed, "seconds", property(lambda one: kept.append(one) or 1.0))
    large = Call(_ATEN.relu.default, lambda pool: ((pool.random(2**18),), {}))
    measure_operations(CPU, threads=2, budget_s=1e6, calls=[*small_calls(), large])
    small = [one for one in kept if not one.is_traffic]
    [big] = [one for one in kept if one.is_traffic]
    assert len(small) == 2
    assert all(len(one.passes) == 9 and len(one.turns) == 3 for one in small)
    assert len(big.passes) == 9
    assert len(big.turns) == 1


def test_one_thread_counts_by_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made after others there, and what is large is timed, and kept, all the same."""
    kept: list[_Timed] = []
    monkeypatch.setattr(_Timed, "seconds", property(lambda one: kept.append(one) or 1.0))
    large = Call(_ATEN.relu.default, lambda pool: ((pool.random(2**18),), {}))
    measured = measure_operations(CPU, threads=1, budget_s=1e6, calls=[*small_calls(), large])
    assert len(measured.timings) == 3
    assert all(len(one.turns) == 3 and not one.passes for one in kept)


@pytest.mark.parametrize(("threads", "budget_s"), [(0, 1.0), (1, 0.0)])
def test_senseless_arguments_are_refused(threads: int, budget_s: float) -> None:
    """No threads, no time."""
    with pytest.raises(ValueError, match="at least 1"):
        measure_operations(CPU, threads=threads, budget_s=budget_s)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_told() -> None:
    """A GPU on a machine without one."""
    gpu = Device(name="cuda:0", kind="cuda", model="NVIDIA L4", cores=58, memory_bytes=GIB, fast_dtypes=("fp32",))
    with pytest.raises(NoDevice, match="cannot use"):
        measure_operations(gpu)


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_every_family_that_is_forecast_is_timed(device_kind: str) -> None:
    """No two calls lists differ from run to run, and each family of the model of a CPU has calls of its own."""
    one, other = (benchmark_calls(device_kind, 2.0**36) for _ in range(2))
    assert [call.function for call in one] == [call.function for call in other]
    names = {call.function.overloadpacket.__name__ for call in one}
    assert {"mm", "bmm", "convolution", "convolution_backward", "native_layer_norm", "_fused_adamw_", "relu"} <= names
    assert any("attention" in name for name in names)
    assert ("zeros" in names) == (device_kind == "cpu")


def test_calls_of_the_benchmark_stand_where_traces_look_for_them() -> None:
    """Each kind of call runs on this CPU, and its operation has a family and a place of finite sizes."""
    calls = {call.function: call for call in benchmark_calls("cpu", 2.0**24)}
    calls.pop(_ATEN.zeros.default)
    measured = measure_operations(CPU, threads=1, budget_s=1e6, calls=list(calls.values()))
    families = {place_of(timing.operation).family for timing in measured.timings}
    assert len(measured.timings) == len(calls)
    assert families == {
        "product", "convolution", "attention", "recurrent", "elementwise", "rows", "images", "tables", "optimizer",
    } | ({"depthwise"} & families)  # fmt: skip
