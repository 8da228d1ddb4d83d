"""Forecasts of layouts: what one process computes, what shows of messages, and what it holds."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from stoker.planning.explanation import describe_message, describe_messages, why_slower
from stoker.planning.model import layout_forecast, run_forecast
from stoker.planning.model.layout_forecast import LayoutForecasts, LayoutNeeds, LayoutUpdate, local_profile
from stoker.planning.model.run_forecast import Extents, Needs, TracedForecasts
from stoker.planning.model.synced_batch_norm import norm_traffic, statistics_kernel
from stoker.records import Coupling, Hardware, Layout, Occurrence, Operation, Plan, TensorShape
from stoker.records.hardware import Links
from tests.planning.spreading import PARTS, links, trace
from tests.planning.trials import CPU, GPU, NORMS, profile

FACTS = profile(num_train=640, num_valid=0, num_test=0, batch=64, parameter_bytes=PARTS.trained_bytes)
RUN = Extents(total_samples=6400, total_updates=100, evaluations=0)
PLAN = Plan(device="cuda:0", micro_batch=32)
ON_CPU = dataclasses.replace(PLAN, device="cpu")


class ByFlops:
    """A FLOP takes a microsecond; what has none takes nothing."""

    def seconds(self, operation: Operation) -> float:
        """Of one execution [s]."""
        return 1e-6 * operation.flops

    def traffic_seconds(self, _operation: Operation) -> float:
        """Its bytes are there."""
        return 0.0

    def relative_error(self, _operation: Operation) -> float:
        """None."""
        return 0.0


@pytest.fixture(autouse=True)
def times_by_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model of a device: what an operation takes is known."""
    monkeypatch.setattr(run_forecast, "operation_times", lambda _hardware, **_: ByFlops())


def hardware(kind: str) -> Hardware:
    """A device of which little is known, with nothing but arithmetic."""
    device = GPU if kind == "cuda" else CPU
    return Hardware(device=device, dense_flops={}, bandwidth_bytes_per_s=None, compute_capability="8.0")


def forecasts(layout: Layout, kind: str = "cuda", known: Links | None = None, **changes: Any) -> LayoutForecasts:
    """Of jobs with FACTS."""
    found = links() if known is None else known
    facts = dataclasses.replace(FACTS, **changes)
    return LayoutForecasts(
        LayoutNeeds(layout, PARTS, trace),
        facts,
        lambda _threads: hardware(kind),
        lambda _rate: RUN,
        lambda _size, _stride: found,
    )


def alone(kind: str = "cuda") -> TracedForecasts:
    """Of one process."""
    return TracedForecasts(FACTS, lambda _threads: hardware(kind), Needs(trace), lambda _rate: RUN)


def compute_s(layout: Layout, plan: Plan = PLAN) -> float:
    """Of one process, waiting for others included [s]."""
    return forecasts(layout).spread(plan).compute_s


def test_two_replicas_compute_half_and_sum_the_rest() -> None:
    """An update of the half, and the gradients' bytes at a gigabyte a second, none hidden."""
    found = forecasts(Layout(replicas=2))
    spread, whole = found.spread(PLAN), alone().update(dataclasses.replace(PLAN, micro_batch=64)).step_s.value
    assert spread.compute_s == pytest.approx(whole / 2, rel=0.01)
    forecast = found.forecast(PLAN)
    assert forecast.exposed_s is not None
    assert forecast.exposed_s.value == pytest.approx(1e-9 * (PARTS.trained_bytes + 24 + 40))
    assert forecast.communication_bytes == PARTS.trained_bytes + 24 + 40
    # Two GPUs of a kind are not equally fast: both wait for the slower one.
    assert 0 < spread.waiting_s < 0.02 * spread.compute_s
    assert forecast.step_s.value == pytest.approx(spread.compute_s + forecast.exposed_s.value + spread.waiting_s)
    assert forecast.samples_per_s.value == pytest.approx(64 / forecast.step_s.value)


def test_devices_of_one_run_have_rates_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What sustains more alone is asked for as alone in one process, and as one of several in a layout."""
    asked: list[bool] = []

    def noted(_hardware: Hardware, *, is_alone: bool) -> ByFlops:
        asked.append(is_alone)
        return ByFlops()

    monkeypatch.setattr(run_forecast, "operation_times", noted)
    alone().update(PLAN)
    forecasts(Layout(replicas=2)).spread(PLAN)
    assert asked == [True, False]


def test_smaller_micro_batches_are_more_passes_of_the_same_arithmetic() -> None:
    """And as many sums of gradients: one."""
    small = dataclasses.replace(PLAN, micro_batch=8)
    layout = Layout(replicas=2)
    assert compute_s(layout, small) == pytest.approx(compute_s(layout), rel=0.02)
    assert forecasts(layout).forecast(small).communication_bytes == forecasts(layout).forecast(PLAN).communication_bytes


def test_a_tensor_group_computes_less_of_the_whole_batch() -> None:
    """The blocks' products in half: between a half and the whole."""
    whole = alone().update(dataclasses.replace(PLAN, micro_batch=64)).step_s.value
    half = compute_s(Layout(tensor=2), dataclasses.replace(PLAN, micro_batch=64))
    assert whole / 2 < half < whole
    assert [one.what for one in forecasts(Layout(tensor=2)).traffic(PLAN)][-1] == "partial outputs summed"
    sequence = forecasts(Layout(tensor=2, sequence=True)).traffic(PLAN)
    assert [one.collective for one in sequence[-2:]] == ["all-gather", "reduce-scatter"]


def test_stages_wait_for_each_other() -> None:
    """With m micro-batches m + 1 turns of the slower of two stages; more micro-batches wait less."""
    many, few = (dataclasses.replace(PLAN, micro_batch=size) for size in (8, 32))
    layout = Layout(stages=2)
    one, other = forecasts(layout).spread(many), forecasts(layout).spread(few)
    assert one.bubble_s == pytest.approx((one.compute_s - 1e-3) / 9, rel=0.15)
    assert other.bubble_s / other.compute_s == pytest.approx(1 / 3, rel=0.15)
    assert one.compute_s < other.compute_s


def test_company_slows_arithmetic_down() -> None:
    """Processes on one CPU share its memory."""
    together = forecasts(Layout(replicas=2), "cpu", links(slowdown=1.5)).update(ON_CPU)
    apart = forecasts(Layout(replicas=2), "cpu").update(ON_CPU)
    assert together.backward_s == pytest.approx(1.5 * apart.backward_s, rel=0.05)


def test_processes_on_one_cpu_wait_for_each_other_at_every_message() -> None:
    """Of shards all collectives, none of which arithmetic hides there; of replicas the end of an update."""
    waits = ((1e-9, 1.0),)
    known = {"cpu": links(overlap=1.0, waits=waits), "cuda": links(overlap=1.0)}
    on_cpu, on_gpu = (forecasts(Layout(shards=2), kind, known[kind]).spread(PLAN) for kind in known)
    assert on_cpu.waiting_s == 9
    assert on_cpu.exposed_s == pytest.approx(sum(one.seconds for one in on_cpu.messages))
    assert on_gpu.waiting_s < 0.02 * on_gpu.compute_s
    assert on_gpu.exposed_s < on_cpu.exposed_s
    # A stage hands on in 2 x 3 turns, and waits in half of them.
    assert forecasts(Layout(stages=2), "cpu", known["cpu"]).spread(ON_CPU).waiting_s == 1 + 3
    replicas = forecasts(Layout(replicas=2), "cpu", known["cpu"])
    assert replicas.spread(ON_CPU).waiting_s == 1
    assert replicas.update(ON_CPU).step_s.value == pytest.approx(replicas.spread(ON_CPU).total_s)
    assert replicas.breakdown(ON_CPU).step_s[0].what == "waiting for the other processes"
    assert "processes wait for each other at messages 1.0 s" in describe_messages(replicas.spread(ON_CPU), [])


def test_shards_hold_less_and_stages_too() -> None:
    """Whole copies need the most of a device."""
    needed = {
        layout: forecasts(layout).needed_bytes(PLAN)
        for layout in (Layout(replicas=2), Layout(shards=2), Layout(stages=2))
    }
    assert all(value > 0 for value in needed.values())
    state = {layout: forecasts(layout).state(PLAN).total for layout in needed}
    assert state[Layout(shards=2)] < 0.6 * state[Layout(replicas=2)]
    assert state[Layout(stages=2)] < 0.7 * state[Layout(replicas=2)]
    assert (
        forecasts(Layout(replicas=2), "cpu").needed_bytes(ON_CPU)
        > forecasts(Layout(replicas=2), "cpu").state(ON_CPU).total
    )


def test_each_process_is_charged_its_part_of_a_checkpoint() -> None:
    """Shards and stages divide the state, replicas write it once between them; a site writes all and what is shared."""

    def written(layout: Layout, **changes: Any) -> float:
        found = forecasts(layout, **changes)
        return found._saved_bytes(PLAN)

    whole = alone()._saved_bytes(PLAN)
    trained = PARTS.trained_bytes
    assert whole >= trained
    assert written(Layout(shards=2)) == pytest.approx(whole / 2, rel=0.1)
    assert written(Layout(replicas=2)) == pytest.approx(whole / 2, rel=0.01)
    assert written(Layout(replicas=2, shards=2)) == pytest.approx(whole / 4, rel=0.1)
    assert whole / 2 <= written(Layout(stages=2)) < 0.9 * whole
    apart = LayoutForecasts(
        LayoutNeeds(Layout(replicas=2), PARTS, trace, is_local_sgd=True),
        FACTS,
        lambda _threads: hardware("cuda"),
        lambda _rate: RUN,
        lambda _size, _stride: links(),
    )
    assert apart._saved_bytes(PLAN) == whole + 3 * trained


def test_batch_statistics_are_messages_too() -> None:
    """Of coupled samples; none here, since the toy has no norms, but their kinds are spoken of."""
    found = forecasts(Layout(replicas=2), coupling=NORMS).traffic(PLAN)
    assert {"batch statistics gathered", "gradients of batch statistics"} <= {one.what for one in found}
    separable = forecasts(Layout(replicas=2)).traffic(PLAN)
    assert not {one.what for one in separable} & {"batch statistics gathered"}


def test_norms_over_processes_add_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU passes over tensors; on GPUs, which read those as often as in one process, kernels on statistics."""
    work = Operation(name="mul", inputs=(), outputs=(), flops=1000, bytes_read=0, bytes_written=0)
    monkeypatch.setattr(layout_forecast, "batch_norms_of", lambda _trace: (work,))
    monkeypatch.setattr(layout_forecast, "synced_norm_work", lambda norm: norm)
    monkeypatch.setattr(layout_forecast, "statistics_kernel", lambda norm: norm)
    counts = layout_forecast.WORK_PER_NORM, layout_forecast.SMALL_KERNELS
    for kind, plan, added in (("cpu", ON_CPU, counts[0]), ("cuda", PLAN, counts[1])):
        with_norms, without = (
            forecasts(Layout(replicas=2), kind, coupling=coupling).spread(plan).overhead_s
            for coupling in (NORMS, FACTS.coupling)
        )
        assert with_norms - without == pytest.approx(1e-3 * added)


def test_statistics_are_gathered_by_a_sum_of_rows() -> None:
    """A mean, a variance and a count of each process, over all of them; kernels between go over one row."""
    image = TensorShape(shape=(8, 16, 4, 4), dtype="bf16")
    norm = Operation(
        name="native_batch_norm", inputs=(image,), outputs=(image,), flops=0, bytes_read=0, bytes_written=0
    )
    occurrence = Occurrence(operation=0, phase="forward", part=0, module=0, source=0)
    of_norm = dataclasses.replace(trace(), operations=(norm,), occurrences=(occurrence,))
    gathered, summed = norm_traffic(of_norm, 4, 3)
    assert (gathered.collective, gathered.num_bytes) == ("all-reduce", 3 * 4 * 4 * (2 * 16 + 1))
    assert (summed.collective, summed.num_bytes) == ("all-reduce", 3 * 8 * 16)
    assert statistics_kernel(norm).bytes_read == 4 * 16


def test_sites_that_train_apart_tell_each_other_nothing_in_an_update() -> None:
    """They come together after an interval."""
    found = LayoutForecasts(
        LayoutNeeds(Layout(replicas=2), PARTS, trace, is_local_sgd=True),
        FACTS,
        lambda _: hardware("cpu"),
        lambda _: RUN,
        lambda *_: links(waits=((1e-9, 1.0),)),
    )
    assert found.traffic(PLAN) == ()
    assert found.spread(PLAN).waiting_s == 0
    assert found.forecast(PLAN).communication_bytes == 0


def test_a_process_has_its_part_of_a_batch_and_of_each_group() -> None:
    """Rounded up: the largest part counts."""
    coupled = Coupling(kind="batch_norm", group=10, causes=("BatchNorm",), evidence="probed")
    local = local_profile(dataclasses.replace(FACTS, batch=30, coupling=coupled), Layout(replicas=4))
    assert (local.batch, local.coupling.group) == (8, 3)
    assert local_profile(FACTS, Layout(tensor=2)).batch == FACTS.batch


def test_the_breakdown_names_messages_and_waiting() -> None:
    """With the operations, the largest first."""
    shares = forecasts(Layout(stages=2), "cpu").breakdown(dataclasses.replace(ON_CPU, micro_batch=16)).step_s
    assert {"stages waiting", "activations handed on", "the layout's copies and hooks"} <= {one.what for one in shares}
    assert all(one.value >= other.value for one, other in itertools.pairwise(shares))


def test_words_tell_how_much_and_how_long() -> None:
    """Bytes, messages, time, what is hidden; what the links rest on; and what a layout loses by."""
    hidden = links(overlap=1.0)
    plan, found = dataclasses.replace(PLAN, micro_batch=4), forecasts(Layout(shards=2), known=hidden)
    spread = found.spread(plan)
    gathered = next(one for one in spread.messages if one.traffic.what == "parameters gathered")
    said = describe_message(gathered)
    assert said.startswith("parameters gathered, ")
    assert "in 24 messages" in said
    assert "of it hidden" in said
    lines = describe_messages(spread, [dataclasses.replace(hidden, note="assumed")])
    assert lines[-1] == "links: a wire, measured here; assumed"
    best, slower = forecasts(Layout(replicas=2)).spread(PLAN), forecasts(Layout(stages=2)).spread(PLAN)
    assert "more of stages waiting for each other" in why_slower(slower, best, 1.2)


def test_what_the_fastest_layout_loses_too_is_no_reason() -> None:
    """Parts count by how much longer they take than the fastest's, the largest first; of equal ones none is named."""
    best = LayoutUpdate(compute_s=5.0, bubble_s=1.0, overhead_s=0.5, messages=(), waiting_s=0.25)
    assert why_slower(best, best, 1.0) == "1.00x the time"
    slower = dataclasses.replace(best, compute_s=6.5, bubble_s=2.0, waiting_s=0.5)
    assert why_slower(slower, best, 1.26) == (
        "1.26x the time: 1.0 s more of stages waiting for each other, 500 ms more of computing, 250 ms more of "
        "processes waiting for each other at messages in an update"
    )


def test_communication_buffers_are_told_by_their_name() -> None:
    """Gathered blocks of shards are no data on the device; one process has none."""
    found = {share.what: share.value for share in forecasts(Layout(shards=2)).breakdown(PLAN).peak_bytes}
    assert found["communication buffers"] > 0
    assert [*found.values()] == sorted(found.values(), reverse=True)
    assert "communication buffers" not in [share.what for share in alone().breakdown(PLAN).peak_bytes]
