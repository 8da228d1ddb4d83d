"""Forecasts from traces: how the figures of one update become those of a run, and which settings are asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from stoker.planning.model import run_forecast
from stoker.planning.model.memory import resident_peak
from stoker.planning.model.run_forecast import Extents, Needs, TracedForecasts
from stoker.planning.model.workspaces import context_bytes
from stoker.records import (
    Calibration,
    Device,
    Hardware,
    Malloc,
    Occurrence,
    Operation,
    Plan,
    Profile,
    Trace,
    TraceSettings,
)
from tests.planning.memory.traces import storage, trace_of
from tests.planning.trials import CPU, GPU, profile

MIB = 2**20
FACTS = profile(num_train=1000, num_valid=200, num_test=100, batch=64, parameter_bytes=10**6)
RUN = Extents(total_samples=10_000, total_updates=160, evaluations=5)
PLAN = Plan(device="cuda:0", micro_batch=64)


class FixedTimes:
    """Every operation takes a millisecond, exactly."""

    def seconds(self, _operation: Operation) -> float:
        """Of one execution [s]."""
        return 1e-3

    def relative_error(self, _operation: Operation) -> float:
        """None."""
        return 0.0


class Traces:
    """An update of three operations for each micro-batch; 16 MiB for each sample live from forward to backward."""

    def __init__(self) -> None:
        self.asked: list[TraceSettings] = []

    def __call__(self, settings: TraceSettings) -> Trace:
        self.asked.append(settings)
        kept = 16 * settings.micro_batch * MIB
        whole = trace_of(
            [
                storage(10 * MIB, -1, None, "parameter"),
                *(storage(kept, 3 * i, 3 * i + 2) for i in range(settings.parts)),
            ],
            target=settings.target,
            capability=settings.capability,
            parts=settings.parts,
        )
        occurrences = [
            Occurrence(operation=0, phase="backward" if i == 2 else "forward", part=part, module=0, source=0)
            for part in range(settings.parts)
            for i in range(3)
        ]
        return dataclasses.replace(whole, settings=settings, occurrences=tuple(occurrences))


@pytest.fixture(autouse=True)
def fixed_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model of a device: what an operation takes is known."""
    monkeypatch.setattr(run_forecast, "operation_times", lambda _hardware, **_: FixedTimes())


def hardware(device: Device = GPU) -> Hardware:
    """A device of which little is known."""
    capability = "8.0" if device.kind == "cuda" else None
    return Hardware(device=device, dense_flops={}, bandwidth_bytes_per_s=None, compute_capability=capability)


def forecasts(
    traces: Traces | None = None, device: Device = GPU, facts: Profile = FACTS, **known: Any
) -> TracedForecasts:
    """Of jobs with FACTS on a device."""
    return TracedForecasts(facts, lambda _threads: hardware(device), Needs(traces or Traces()), lambda _: RUN, **known)


def test_a_run_is_its_updates_evaluations_and_checkpoints() -> None:
    """Two operations forward and one backward; evaluation takes the forward's share for each sample."""
    found = forecasts().forecast(PLAN)
    update = forecasts().update(PLAN)
    assert found.step_s == update.step_s
    assert update.forward_s == pytest.approx(2e-3)
    training = 10_000 / 64 * found.step_s.value  # the last update of an epoch is smaller
    evaluation = update.forward_s / 64 * (5 * 200 + 100)
    checkpoints = (5 + training / PLAN.checkpoint_every_s) * found.checkpoint_s.value
    assert found.total_s.value == pytest.approx(training + evaluation + checkpoints)
    assert found.samples_per_s.value == pytest.approx(64 / found.step_s.value)
    assert found.evaluate_s.value == pytest.approx(update.forward_s / 64 * 200)
    assert (found.total_samples, found.total_updates) == (10_000, 160)


@pytest.mark.parametrize(("micro_batch", "count"), [(64, 1), (16, 4), (10, 7)])
def test_an_update_has_as_many_micro_batches_as_it_takes(micro_batch: int, count: int) -> None:
    """The last may be smaller. Two are traced, and all of them are timed."""
    known = Traces()
    update = forecasts(known).update(dataclasses.replace(PLAN, micro_batch=micro_batch))
    assert update.forward_s == pytest.approx(count * 2e-3)
    assert known.asked[-1].parts == (1 if count == 1 else 2)


def test_a_data_set_smaller_than_the_batch_is_one_update() -> None:
    """Its micro-batches are those of its samples."""
    small = forecasts(facts=dataclasses.replace(FACTS, num_train=32))
    plan = dataclasses.replace(PLAN, micro_batch=16)
    assert small.update(plan).forward_s == pytest.approx(2 * 2e-3)
    step_s = small.forecast(plan).step_s.value
    assert small.forecast(plan).samples_per_s.value == pytest.approx(32 / step_s)


def test_memory_grows_with_the_micro_batch_and_decides_what_fits() -> None:
    """On a GPU what its allocator holds and the context are compared with what the device has."""
    small_gpu = dataclasses.replace(GPU, memory_bytes=round(context_bytes().value) + 600 * MIB)
    about = forecasts(device=small_gpu)
    needed = [about.needed_bytes(dataclasses.replace(PLAN, micro_batch=size)) for size in (16, 32, 64)]
    assert needed == sorted(set(needed))
    odds = [about.probability_it_fits(dataclasses.replace(PLAN, micro_batch=size)) for size in (16, 32, 64)]
    assert odds == sorted(odds, reverse=True)
    assert odds[0] > 0.9
    assert odds[-1] < 0.1
    found = about.forecast(PLAN)
    assert found.probability_it_fits == odds[-1]
    assert found.reserved_bytes is not None
    assert found.peak_bytes.value >= (10 + 16 * 64) * MIB
    assert about.needed_bytes(PLAN) == pytest.approx(found.reserved_bytes.value + context_bytes().value)


def test_a_plan_fits_if_its_probability_says_so() -> None:
    """At every limit of memory; between 50 and 76 MiB the allocator has to give back what it only caches."""
    storages = [
        storage(20 * MIB, -1, None, "parameter"),
        storage(12 * MIB, 0, 1),
        storage(14 * MIB, 0, 1),
        storage(30 * MIB, 2, 2),
    ]

    def about(room: int) -> TracedForecasts:
        def traces(settings: TraceSettings) -> Trace:
            return dataclasses.replace(trace_of(storages), settings=settings)

        device = dataclasses.replace(GPU, memory_bytes=round(context_bytes().value) + room * MIB)
        return TracedForecasts(FACTS, lambda _threads: hardware(device), Needs(traces), lambda _: RUN)

    unlimited, answers = about(10_000).needed_bytes(PLAN), set()
    for room in range(40, 120, 4):
        known = about(room)
        probability, gives_back = known.probability_it_fits(PLAN), known.needed_bytes(PLAN) < unlimited
        for sure in (0.1, 0.5, 0.9):
            answer = about(room).fits(PLAN, sure)
            assert answer == (probability >= sure), (room, sure)
            answers.add((answer, gives_back))
    assert answers == {(False, False), (False, True), (True, True), (True, False)}


def test_a_device_of_unknown_memory_is_taken_to_be_large_enough() -> None:
    """There is nothing better known."""
    assert forecasts(device=dataclasses.replace(GPU, memory_bytes=0)).probability_it_fits(PLAN) == 1.0


def test_on_a_cpu_the_process_counts() -> None:
    """With what it held before; nothing is reserved."""
    plan = Plan(device="cpu", micro_batch=64)
    found, more = (forecasts(device=CPU, held_bytes=held).forecast(plan) for held in (0, 500 * MIB))
    assert found.reserved_bytes is None
    assert more.peak_bytes.value == pytest.approx(found.peak_bytes.value + 500 * MIB)


def test_earlier_errors_widen_or_narrow_the_interval() -> None:
    """Runs that took a fifth more memory than forecast raise the upper end, and the odds fall."""

    def calibration(measured: float) -> Calibration:
        return Calibration(
            device_model=GPU.model,
            torch_version="2.13.0",
            run="a run",
            quantity="peak_bytes",
            forecast=1.0,
            measured=measured,
            at="2026-11-21T12:00:00+00:00",
            basis="datasheet",
        )

    exact, over = (forecasts(calibrations=(calibration(ratio),) * 15) for ratio in (1.0, 1.2))
    assert over.forecast(PLAN).peak_bytes.high > exact.forecast(PLAN).peak_bytes.high
    assert exact.forecast(PLAN).peak_bytes.basis == "calibrated"
    assert forecasts().forecast(PLAN).peak_bytes.basis == "datasheet"


def test_threads_choose_the_hardware() -> None:
    """A CPU's figures are those of the threads that the plan computes with, each asked for once."""
    asked: list[int | None] = []

    def with_threads(threads: int | None) -> Hardware:
        asked.append(threads)
        return hardware(CPU)

    about = TracedForecasts(FACTS, with_threads, Needs(Traces()), lambda _: RUN)
    for micro_batch in (64, 32):
        for threads in (4, 2):
            about.update(Plan(device="cpu", micro_batch=micro_batch, threads=threads))
    assert asked.count(4) == asked.count(2) == 1


def test_a_budget_of_seconds_is_turned_into_samples_by_the_rate() -> None:
    """Extents are asked for at the forecast's own rate."""
    rates: list[float] = []

    def extents(rate: float) -> Extents:
        rates.append(rate)
        return RUN

    found = TracedForecasts(FACTS, lambda _: hardware(), Needs(Traces()), extents).forecast(PLAN)
    assert rates == [found.samples_per_s.value]


def test_a_trace_is_replayed_once() -> None:
    """Whichever devices and plans ask: tf32 computes on the tensors of fp32."""
    known = Traces()
    needs = Needs(known)
    for precision in ("fp32", "tf32"):
        about = TracedForecasts(FACTS, lambda _: hardware(), needs, lambda _: RUN)
        about.needed_bytes(dataclasses.replace(PLAN, precision=precision))
    assert len(known.asked) == 1


def test_batches_copied_ahead_are_on_the_gpu() -> None:
    """This update's and the next, in place of copies of micro-batches; the allocator holds those of queued updates."""

    class WithInputs(Traces):
        """A MiB of inputs for each sample."""

        def __call__(self, settings: TraceSettings) -> Trace:
            trace = super().__call__(settings)
            inputs = [storage(settings.micro_batch * MIB, -1, None, "input") for _ in range(settings.parts)]
            return dataclasses.replace(trace, storages=(*trace.storages, *inputs))

    about = forecasts(WithInputs(), facts=dataclasses.replace(FACTS, data_bytes=1000))

    def added(loader: str, **changes: Any) -> tuple[float, float]:
        workers = 2 if loader == "workers" else 0
        plans = [
            dataclasses.replace(PLAN, loader=one, num_workers=count, **changes)
            for one, count in ((loader, workers), ("inline", 0))
        ]
        found, plain = map(about.forecast, plans)
        assert found.reserved_bytes is not None
        assert plain.reserved_bytes is not None
        return (
            found.peak_bytes.value - plain.peak_bytes.value,
            found.reserved_bytes.value - plain.reserved_bytes.value,
        )

    fast = {"precision": "bf16", "memory_format": "channels_last"}
    for loader in ("memory", "workers"):
        assert added(loader, **fast) == (2 * 64 * MIB, 5 * 64 * MIB)
        assert added(loader, micro_batch=16, **fast) == (2 * 64 * MIB, 5 * 64 * MIB)
        assert added(loader) == (64 * MIB, 4 * 64 * MIB)  # autograd keeps the first convolution's input as it is
    assert added("device") == (1000, 1000)


def test_malloc_is_replayed_once_for_plans_of_the_same_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads and loaders ask for the same memory; another setting of malloc gets it in another way."""
    replays: list[str] = []

    def replay(trace: Trace, malloc: Malloc, *given: Any, **named: Any) -> float:
        replays.append(malloc)
        return resident_peak(trace, malloc, *given, **named)

    monkeypatch.setattr(run_forecast, "resident_peak", replay)
    about = forecasts(device=CPU)
    for changed in ({"threads": 1}, {"threads": 2}, {"loader": "inline"}, {"malloc": "mapped"}):
        about.needed_bytes(dataclasses.replace(PLAN, device="cpu", **changed))
    assert replays == ["default", "mapped"]


def test_samples_that_have_to_be_fetched_take_their_time() -> None:
    """Before an update where the trainer fetches them, during it where workers do, which may be slower."""
    step_s = forecasts().forecast(PLAN).step_s.value
    inline, few, many = (
        forecasts(fetch_s=1e-3).forecast(dataclasses.replace(PLAN, loader=loader, num_workers=workers)).step_s.value
        for loader, workers in (("inline", 0), ("workers", 4), ("workers", 64))
    )
    assert inline == pytest.approx(step_s + 64e-3)
    assert few == pytest.approx(64e-3 / 4)
    assert many == pytest.approx(step_s)


@pytest.mark.parametrize(("loader", "workers"), [("inline", 0), ("workers", 4)])
def test_an_evaluation_fetches_its_samples_itself(loader: Any, workers: int) -> None:
    """One after the other, with or without workers for training: that is part of the run's time."""
    plan = dataclasses.replace(PLAN, loader=loader, num_workers=workers)
    found, forward_s = forecasts(fetch_s=1e-3).forecast(plan), forecasts().update(plan).forward_s
    assert found.evaluate_s.value == pytest.approx((forward_s / 64 + 1e-3) * 200)
    in_memory = forecasts().forecast(plan)
    training = 10_000 / 64 * (found.step_s.value - in_memory.step_s.value)
    evaluating = (5 * 200 + 100) * 1e-3
    assert found.total_s.value - in_memory.total_s.value == pytest.approx(training + evaluating, rel=1e-3)


def test_the_breakdown_tells_the_moment_and_the_lines() -> None:
    """Bytes by what they are for; time by operation."""
    found = forecasts().breakdown(PLAN)
    assert {share.what for share in found.peak_bytes} >= {"parameter", "activation"}
    assert found.peak_at.startswith("in the forward pass, train_me.py:")
    assert any(share.what == "relu, forward" and share.where == "train_me.py:1" for share in found.step_s)


def test_the_copy_that_a_checkpoint_is_written_from_is_part_of_a_cpus_peak() -> None:
    """Ten MiB of weights more than what malloc is replayed to hold; on a GPU the copy is the host's."""
    plan = dataclasses.replace(PLAN, device="cpu")
    here = forecasts(device=CPU, held_bytes=5 * MIB)
    trace = Traces()(TraceSettings(target="cpu", capability="", micro_batch=64))
    without = resident_peak(trace, "default", 5 * MIB, micro_batches=1)
    assert here.needed_bytes(plan) == pytest.approx(without + 10 * MIB)


def compile_calibration(measured: float) -> Calibration:
    """Compiling was forecast to take 10 s, and took this long."""
    return Calibration(
        device_model=GPU.model,
        torch_version="2.13.0",
        run="a run",
        quantity="compile_s",
        forecast=10.0,
        measured=measured,
        at="2026-11-21T12:00:00+00:00",
        basis="datasheet",
    )


def test_compiling_is_part_of_the_total_with_its_interval() -> None:
    """Once; an update is fused, and no surer for it."""
    plain, compiled = (forecasts().forecast(dataclasses.replace(PLAN, compile=wanted)) for wanted in (False, True))
    assert plain.compile_s is None
    assert compiled.compile_s is not None
    beside = compiled.total_s.value - compiled.compile_s.value
    assert beside / plain.total_s.value == pytest.approx(compiled.step_s.value / plain.step_s.value, rel=0.02)
    assert compiled.total_s.high > beside + compiled.compile_s.high


def test_compiling_takes_as_long_as_it_took_before() -> None:
    """On this device; then the interval is that of what was seen."""
    plan = dataclasses.replace(PLAN, compile=True)
    first = forecasts().forecast(plan).compile_s
    known = forecasts(calibrations=tuple(map(compile_calibration, (15.0, 20.0, 30.0)))).forecast(plan).compile_s
    assert known.value == pytest.approx(2 * first.value)
    assert (known.low, known.high) == (pytest.approx(2 / 1.5 * first.value), pytest.approx(3 * first.value))
    assert (first.basis, known.basis) == ("datasheet", "calibrated")
