from __future__ import annotations

import itertools

import pytest
import torch

from stoker.errors import NoDevice
from stoker.planning.model.cpu_times import place_of
from stoker.profiling.benchmark_calls import Call, OperandPool, prepare_call
from stoker.profiling.ceilings import Stopwatch, measure_anchors, stopwatch_for
from stoker.profiling.micro_benchmark import (
    _ON_ALL_CORES,
    _ON_ONE_CORE,
    _take_turn,
    _Timed,
    _timed,
    benchmark_calls,
    measure_operations,
)
from stoker.profiling.tracing.operations import operation_of
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


@pytest.mark.slow
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


def test_operands_of_a_call_do_not_overlap() -> None:
    """Three of up to a quarter of the pool each, wherever the first begins: a GPU refuses to write to others."""
    pool = OperandPool("cpu", 2**14)
    for size in (100, 1024, 700, 64, 1000) * 9:
        cuts = [pool.scratch(size), pool.scratch(1024), pool.scratch(size)]
        places = sorted((cut.data_ptr(), cut.nbytes) for cut in cuts)
        assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(places))


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_budget_holds_on_a_machine_that_is_too_slow() -> None:
    """With a clock that runs a second a reading, one call is timed and the rest left out."""
    readings = itertools.count()
    measured = measure_operations(CPU, threads=1, budget_s=1, clock=lambda: float(next(readings)), calls=small_calls())
    assert len(measured.timings) == 1


def test_a_slow_machine_times_fewer_calls_and_all_of_them_twice() -> None:
    """What only one turn measures is off by a factor of two now and then; a second a reading, and time for some."""
    readings, calls = itertools.count(), small_calls() * 100
    watch = stopwatch_for(CPU, lambda: float(next(readings)))
    timed = _timed(calls, OperandPool("cpu", 2**20), watch, deadline_s=1500.0, pace=None)
    assert 0 < len(timed) < len(calls)
    assert all(len(one.turns) >= 2 for one in timed)


def test_of_the_host_the_quieter_look_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at before and after the operations; a burst makes one of them too long."""
    looks = iter([{"forward": 5e-6, "update": 1e-4}, {"forward": 3e-6, "update": 9e-4}])
    monkeypatch.setattr("stoker.profiling.micro_benchmark.host_seconds", lambda _clock, _device: next(looks))
    measured = measure_operations(CPU, threads=1, budget_s=1e6, calls=small_calls())
    assert measured.host_s == {"forward": 3e-6, "update": 1e-4}


def of_bytes(num_bytes: int, flops: int = 0) -> Operation:
    """An operation on so many."""
    return Operation(name="relu", inputs=(), outputs=(), flops=flops, bytes_read=num_bytes, bytes_written=0)


SMALL, LARGE, PRODUCT = of_bytes(1000), of_bytes(2**24), of_bytes(2**24, flops=10**9)


def test_a_disturbed_turn_does_not_count() -> None:
    """Of three turns the middle one counts, of fewer the best: a burst of other work in one changes nothing."""
    assert _Timed(None, SMALL, [3.0, 100.0, 2.0]).seconds == 3.0
    assert _Timed(None, SMALL, [100.0, 2.0]).seconds == 2.0
    assert _Timed(None, SMALL, [4.0]).seconds == 4.0


def test_a_small_call_counts_by_how_long_it_takes_over_and_over_and_after_others() -> None:
    """A geometric mean, of the median of its passes; without passes, as on a GPU, its turns alone."""
    passes = [9.0, 8.0, 100.0]
    assert _Timed(None, SMALL, [4.0], passes, _ON_ALL_CORES).seconds == pytest.approx(6.0)
    assert _Timed(None, SMALL, [4.0], passes, _ON_ONE_CORE).seconds == pytest.approx(4.0**0.7 * 9.0**0.3)
    assert _Timed(None, SMALL, [4.0], [], _ON_ALL_CORES).seconds == 4.0


def test_a_call_that_moves_many_bytes_counts_by_its_passes_alone() -> None:
    """In an update they are out of the caches; in a loop of its own they would not be. A large product is not moved."""
    assert _Timed(None, PRODUCT, [4.0], [9.0], _ON_ALL_CORES).seconds == 4.0
    assert _Timed(None, LARGE, [4.0], [9.0, 8.0, 100.0], _ON_ALL_CORES).seconds == 9.0
    assert _Timed(None, LARGE, [4.0], [], _ON_ONE_CORE).seconds == 4.0


def test_a_large_call_that_was_not_passed_by_is_left_out() -> None:
    """Time was over: its one turn shows page faults. A small one has its turn at ease, and a GPU has no passes."""
    assert not _Timed(None, LARGE, [4.0], [], _ON_ALL_CORES).is_usable
    assert _Timed(None, LARGE, [4.0], [5.0], _ON_ALL_CORES).is_usable
    assert _Timed(None, SMALL, [4.0], [], _ON_ALL_CORES).is_usable
    assert _Timed(None, LARGE, [4.0]).is_usable


@pytest.mark.slow
@pytest.mark.parametrize(
    ("threads", "turns_and_passes"),
    [
        (2, {"small": (3, 6), "large": (1, 6), "product": (3, 6)}),
        (1, {"small": (3, 6), "large": (3, 0), "product": (3, 0)}),
    ],
)
def test_calls_are_made_as_often_as_counts(
    threads: int, turns_and_passes: dict[str, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over and over, after others, or both; on one thread what is large is not made among the others."""
    kept: list[_Timed] = []
    monkeypatch.setattr(_Timed, "seconds", property(lambda one: kept.append(one) or 1.0))
    large = Call(_ATEN.relu.default, lambda pool: ((pool.random(2**18),), {}))
    product = Call(_ATEN.mm.default, lambda pool: ((pool.random(512, 512), pool.random(512, 512)), {}))
    measured = measure_operations(CPU, threads=threads, budget_s=1e6, calls=[small_calls()[1], large, product])
    assert len(measured.timings) == 3
    names = ("small", "large", "product")
    found = dict(zip(names, sorted(kept, key=lambda one: (one.operation.flops, one.operation.bytes_read)), strict=True))
    assert {name: (len(one.turns), len(one.passes)) for name, one in found.items()} == turns_and_passes


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


@pytest.mark.slow
def test_calls_of_the_benchmark_stand_where_traces_look_for_them() -> None:
    """Each kind of call runs on this CPU, and its operation has a family and a place of finite sizes."""
    calls = {call.function: call for call in benchmark_calls("cpu", 2.0**24)}
    calls.pop(_ATEN.zeros.default)
    measured = measure_operations(CPU, threads=1, budget_s=1e6, calls=list(calls.values()))
    families = {place_of(timing.operation).family for timing in measured.timings}
    assert len(measured.timings) == len(calls)
    assert families == {
        "product",
        "convolution",
        "attention",
        "recurrent",
        "elementwise",
        "rows",
        "images",
        "tables",
        "optimizer",
    } | ({"depthwise"} & families)


def test_a_gpus_warming_calls_are_waited_for() -> None:
    """A turn begins with an idle device: its first reading is of one call, not of those that were submitted before."""
    queued_s, clock_s = [0.0], [0.0]

    def finish() -> None:
        clock_s[0] += queued_s[0]
        queued_s[0] = 0.0

    call = small_calls()[0]
    pool = OperandPool("cpu", 2**16)
    watch = Stopwatch(lambda: clock_s[0], finish, calls_last_s=5e-3)
    caller, (args, keywords), result = prepare_call(call, pool)
    caller.most_kept, plain = 4, caller.call.function

    def submitted(*args: object, **keywords: object) -> object:
        queued_s[0] += 2e-3
        return plain(*args, **keywords)

    caller.call = Call(submitted, call.arguments)  # type: ignore[arg-type]
    timed = _Timed(caller, operation_of(call.function, args, keywords, result))
    _take_turn(timed, watch, None)
    assert timed.turns == pytest.approx([2e-3])
