"""Forecasts of plans under a layout: the work of each process, messages between them, and the part that nothing hides.

An update takes as long as its slowest process computes, plus the messages that nothing hides. A process executes the
trace of its part of a batch, as the axes of the layout divide it (`stoker.layouts`).

On a CPU layouts also cost Python, hooks and DTensor's dispatch; on a GPU the host runs ahead and most of this is
hidden, so it is left out. Constants were measured by `bench/many/overheads.py` under PyTorch 2.13 on one x86-64 core,
on models that are not used to test forecasts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from stoker.imports import collector_paused
from stoker.layouts import axes_of
from stoker.layouts.base import DividedUpdate, Traffic
from stoker.layouts.local_state import OptimizerFootprint, RankState, held_parts, rank_state
from stoker.planning.model.communication import (
    LinksOf,
    MessageTime,
    loss_traffic,
    message_times,
    num_meetings,
    waited_for,
)
from stoker.planning.model.optimizer_states import full_states, stored_share
from stoker.planning.model.run_forecast import Extents, Needs, TracedForecasts, Traces
from stoker.planning.model.shared_cpu import ContendedTimes, UncontendedTimes
from stoker.planning.model.synced_batch_norm import (
    SMALL_KERNELS,
    WORK_PER_NORM,
    batch_norms_of,
    norm_traffic,
    statistics_kernel,
    synced_norm_work,
)
from stoker.planning.model.update_time import OperationTimes, UpdateTime
from stoker.records import (
    Breakdown,
    Calibration,
    Estimate,
    Forecast,
    Hardware,
    Layout,
    Plan,
    Profile,
    Share,
    Trace,
    TraceSettings,
)
from stoker.records.profile import ModelParts

HardwareOf = Callable[[int | None], Hardware]


COPIES_AND_HOOKS = "the layout's copies and hooks"
"""Copies into and out of messages; on a CPU also Python, hooks and DTensor's dispatch."""
_BOARDS_DIFFER = 0.015
"""Standard deviation of the rates of equal GPUs under their power limits [fraction]. Source: S. Bekman, "Machine
Learning Engineering", accelerators: devices of a node differ by 5 % and more between the fastest and the slowest."""
_WAITING_SPREAD = 2.0
"""Uncertainty of the time that GPUs wait for each other (a factor)."""


def _of_slowest(count: int) -> float:
    """How much longer the slowest of `count` equal devices takes than the mean [fraction] (Blom 1958)."""
    return _BOARDS_DIFFER * NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class LayoutUpdate:
    """One update over a layout.

    `compute_s` is the slowest process's arithmetic, with the turns in which stages wait (`bubble_s`); `overhead_s` is
    the layout's copies and hooks, `messages` those between processes, `waiting_s` the time that processes wait for each
    other: on one CPU at messages, on GPUs for the slowest of them.
    """

    compute_s: float
    bubble_s: float
    overhead_s: float
    messages: tuple[MessageTime, ...]
    waiting_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """Time of messages that is not hidden [s]."""
        return sum(one.exposed_s for one in self.messages)

    @property
    def total_s(self) -> float:
        """Time of the update [s]."""
        return self.compute_s + self.overhead_s + self.exposed_s + self.waiting_s


def local_profile(profile: Profile, layout: Layout) -> Profile:
    """The facts of one process's part of a job: its samples of a batch, and of each group."""
    batch = min(profile.batch, profile.num_train)
    coupling = profile.coupling
    if coupling.group is not None and layout.sample_parts > 1:
        coupling = dataclasses.replace(coupling, group=math.ceil(coupling.group / layout.sample_parts))
    return dataclasses.replace(
        profile,
        batch=math.ceil(batch / layout.sample_parts),
        coupling=coupling,
        can_offload=profile.can_offload and layout.world_size == 1,
    )


class LayoutNeeds:
    """Memory and operations of updates under a layout, of one process of each kind of work; the same on every device.

    Args:
        layout: of the processes.
        parts: the model's parameters.
        traces: traces of updates in one process.
        is_local_sgd: processes make their own updates and exchange weights after an interval (`Job(sync=…)`); exchanges
            are not in the forecast of an update.
    """

    def __init__(
        self,
        layout: Layout,
        parts: ModelParts,
        traces: Callable[[TraceSettings], Trace],
        *,
        is_local_sgd: bool = False,
    ) -> None:
        self.layout, self.parts, self.is_local_sgd = layout, parts, is_local_sgd
        self.axes = () if is_local_sgd else axes_of(layout)
        self.whole: Traces = lambda settings: traces(full_states(settings))
        self.undivided = Needs(traces)
        # Of processes that do the same work one trace is enough.
        self.of_ranks = {rank: Needs(functools.partial(self._rank_trace, rank=rank)) for rank in self._uneven_ranks()}
        self._states: dict[tuple[TraceSettings, int], RankState] = {}

    def state(self, settings: TraceSettings, rank: int) -> RankState:
        """The state that a process keeps from update to update."""
        if (settings, rank) not in self._states:
            moments = self.moments(settings)
            self._states[settings, rank] = rank_state(self.parts, self.layout, rank, moments)
        return self._states[settings, rank]

    def moments(self, settings: TraceSettings) -> OptimizerFootprint:
        """What the optimiser keeps of the whole model."""
        full = OptimizerFootprint.of(self.whole(settings), self.parts)
        return dataclasses.replace(full, like=full.like * stored_share(settings.optimizer_states, settings.precision))

    def _uneven_ranks(self) -> list[int]:
        """One process of each kind of work."""
        ranks = [0]
        for axis in self.axes:
            distance = self.layout.group(axis.name)[1]
            places = axis.representatives(self.parts, self.layout)
            ranks = [rank + place * distance for rank in ranks for place in places]
        return ranks

    @collector_paused()
    def _rank_trace(self, settings: TraceSettings, rank: int) -> Trace:
        """The trace of process number `rank`."""
        trace, parts = self.whole(settings), self.parts
        for axis in self.axes:
            trace = axis.trace_of(trace, parts, self.layout, rank)
            parts = axis.held(parts, self.layout, rank)
        return trace


class LayoutForecasts(TracedForecasts):
    """Forecasts of plans for one layout; memory is that of the process that needs the most.

    Plans are those of one process: `micro_batch` are samples in a process, `threads` those of a process.

    Args:
        needs: memory and operations of updates under the layout.
        profile: the job's facts.
        hardware: the device of a process, by the number of threads on a CPU.
        extents: the run's extents at a rate of all processes together [samples/s].
        links_of: links of groups of processes.
        calibrations: forecasts and measurements of earlier runs on this device.
        held_bytes: memory of a process before it trains [bytes].
        fetch_s: time in which one process fetches a sample that is not in memory [s].
    """

    def __init__(
        self,
        needs: LayoutNeeds,
        profile: Profile,
        hardware: HardwareOf,
        extents: Callable[[float], Extents],
        links_of: LinksOf,
        *,
        calibrations: Sequence[Calibration] = (),
        held_bytes: int = 0,
        fetch_s: float = 0.0,
    ) -> None:
        self.layout, self.parts, self._is_local_sgd = needs.layout, needs.parts, needs.is_local_sgd
        self._axes, self._of_layout, self._ranks = needs.axes, needs, needs.of_ranks
        self._links_of = links_of
        super().__init__(
            profile,
            hardware,
            self._ranks[0],
            extents,
            calibrations=calibrations,
            held_bytes=held_bytes,
            fetch_s=fetch_s / self.layout.sample_parts,
        )
        self._local = local_profile(profile, self.layout)
        self._spread: dict[Plan, tuple[LayoutUpdate, UpdateTime]] = {}
        self._saved: dict[tuple[str, str], float] = {}
        self._residents: dict[Plan, float] = {}
        self._untraced: dict[Plan, Sequence[tuple[Needs, int]]] = {}

    def spread(self, plan: Plan) -> LayoutUpdate:
        """Parts of an update's time."""
        return self._of(plan)[0]

    def update(self, plan: Plan) -> UpdateTime:
        """The time of one update, messages and waiting included."""
        return self._of(plan)[1]

    def forecast(self, plan: Plan) -> Forecast:
        """Time and memory of the whole run; memory is that of one process."""
        spread = self.spread(plan)
        exposed, hidden = spread.exposed_s, sum(one.seconds for one in spread.messages) - spread.exposed_s
        spreads = [self._links_of(*self.layout.group(one.traffic.axis)).spread for one in spread.messages]
        factor, basis = max(spreads, default=1.0), self._links_of(self.layout.world_size, 1).basis
        exposed_s, hidden_s = (
            Estimate(value=value, low=value / factor, high=value * factor, unit="s", basis=basis)
            for value in (exposed, max(0.0, hidden))
        )
        return dataclasses.replace(
            super().forecast(plan),
            exposed_s=exposed_s,
            hidden_s=hidden_s,
            communication_bytes=sum(one.traffic.num_bytes for one in spread.messages),
        )

    def state(self, plan: Plan, rank: int = 0) -> RankState:
        """The state that a process keeps from update to update."""
        return self._of_layout.state(self._settings(plan), rank)

    def least_bytes(self, plan: Plan, moments: OptimizerFootprint) -> int:
        """Memory of a device below which no update under `plan` can be [bytes], without a trace of the layout.

        State and message buffers of the first process, without activations.
        """
        held = held_parts(self.parts, self.layout, 0)
        return rank_state(self.parts, self.layout, 0, moments).total + self._message_bytes(plan, held)

    def messages_s(self, plan: Plan, trace: Trace, passes: int) -> float:
        """Time of all messages between processes in an update [s], hidden or not, roughly.

        Args:
            plan: the settings.
            trace: of the whole model, from which messages between layers are taken.
            passes: number of passes; messages between layers are as large as their parts of the batch, however few
                samples the trace is of.
        """
        samples = -(-self._local.batch // trace.settings.micro_batch)
        few, total_s = min(passes, samples), 0.0
        for axis in self._axes:
            update = DividedUpdate(
                layout=self.layout,
                parts=self.parts,
                held=held_parts(self.parts, self.layout, 0),
                passes=passes,
                trace=lambda: trace,
                gathered_share=self._gathered_share(plan),
            )
            is_of_parameters = axis.name in ("shards", "replicas")  # whose sizes do not grow with the micro-batch
            sent = axis.traffic(update if is_of_parameters else dataclasses.replace(update, passes=few))
            by_sample = sent if is_of_parameters else axis.traffic(dataclasses.replace(update, passes=samples))
            for number, (few_samples, all_samples) in enumerate(zip(sent, by_sample, strict=True)):
                one, scale = few_samples, all_samples.times / few_samples.times
                if one.axis == "data" and not is_of_parameters:  # parameters that experts gather
                    one, scale = axis.traffic(update)[number], 1.0
                links = self._links_of(*self.layout.group(one.axis))
                total_s += one.times * sum(links.seconds(one.collective, size * scale) for size in one.sizes)
        return total_s

    def _saved_bytes(self, plan: Plan) -> float:
        """Largest number of bytes that one process writes at a checkpoint; processes with equal parts take turns.

        A site that makes updates of its own writes all of its state, with the shared weights and their momentum.
        """
        kind = plan.optimizer_implementation, plan.optimizer_states  # the settings of a plan that change the state
        if kind in self._saved:
            return self._saved[kind]
        layout, settings = self.layout, self._settings(plan)
        whole = self._of_layout.undivided.kept(settings)
        if self._is_local_sgd:
            saved: float = whole + 3 * self.parts.trained_bytes
        else:
            moments = self._of_layout.moments(settings)
            states = [rank_state(self.parts, layout, rank, moments) for rank in self._ranks]
            total = sum(one.num_bytes for one in self.parts.parameters) + moments.like * self.parts.trained_bytes
            share = max(state.parameters + state.optimizer for state in states) / max(1, total)
            saved = whole * min(1.0, share) / layout.num_copies
        self._saved[kind] = saved
        return saved

    def breakdown(self, plan: Plan) -> Breakdown:
        """Parts of memory and time of an update in the first process, with messages that are not hidden."""
        traced, spread = super().breakdown(plan), self.spread(plan)
        messages = ((message.traffic.what, message.exposed_s) for message in spread.messages)
        parts = (
            *messages,
            ("stages waiting", spread.bubble_s),
            (COPIES_AND_HOOKS, spread.overhead_s),
            ("waiting for the other processes", spread.waiting_s),
        )
        added = [Share(what=what, value=value) for what, value in parts if value > 0]
        buffers = self._message_bytes(plan, held_parts(self.parts, self.layout, 0))
        memory = [Share(what="communication buffers", value=float(buffers))] if buffers else []
        return dataclasses.replace(
            traced,
            peak_bytes=tuple(sorted((*traced.peak_bytes, *memory), key=lambda share: -share.value)),
            step_s=tuple(sorted((*traced.step_s, *added), key=lambda share: -share.value)),
        )

    def traffic(self, plan: Plan) -> tuple[Traffic, ...]:
        """Messages between processes in an update."""
        if self._is_local_sgd:
            return ()
        update = self._divided_update(plan)
        sharing = {axis.name for axis in self.layout.mesh if axis.shares_batch}
        traffic = [loss_traffic()]
        for axis in self._axes:
            if axis.name in sharing:
                traffic += axis.traffic(update)
        if self._has_synced_norms:
            traffic += norm_traffic(update.trace(), self.layout.data_size, update.passes)
        for axis in self._axes:
            if axis.name not in sharing:
                traffic += axis.traffic(update)
        return waited_for(traffic) if self._is_on_cpu else tuple(traffic)

    def _divided_update(self, plan: Plan) -> DividedUpdate:
        return DividedUpdate(
            layout=self.layout,
            parts=self.parts,
            held=held_parts(self.parts, self.layout, 0),
            passes=self._micro_batches(plan),
            trace=functools.partial(self._of_layout.whole, self._settings(plan)),
            gathered_share=self._gathered_share(plan),
        )

    @property
    def _is_on_cpu(self) -> bool:
        return self._hardware.device.kind == "cpu"

    @property
    def _has_synced_norms(self) -> bool:
        return self.layout.data_size > 1 and self._profile.coupling.kind == "batch_norm"

    def _of(self, plan: Plan) -> tuple[LayoutUpdate, UpdateTime]:
        if plan in self._spread:
            return self._spread[plan]
        passes = self._micro_batches(plan)
        hardware, times = self._times_with(plan.threads)
        updates = [self._update_by(plan, needs, hardware, times) for needs in self._ranks.values()]
        slowest = max(updates, key=lambda one: one.step_s.value)
        step_s = slowest.step_s.value
        turn_s = (slowest.forward_s + slowest.backward_s) / passes
        bubble_s = turn_s * self._num_idle_turns(passes)
        traffic = self.traffic(plan)
        messages = message_times(
            traffic,
            self.layout,
            self._links_of,
            forward_s=slowest.forward_s,
            backward_s=slowest.backward_s,
            passes=passes,
        )
        host_s = norms_s = 0.0
        if self._is_on_cpu:  # on a GPU it is hidden
            host_s = sum(axis.overhead_s(self.parts, self.layout, passes) for axis in self._axes)
        host_s += sum(axis.copies_s(traffic, self.layout, times.seconds) for axis in self._axes)
        if self._has_synced_norms:  # their work on top of PyTorch's own batch norms
            work, count = (synced_norm_work, WORK_PER_NORM) if self._is_on_cpu else (statistics_kernel, SMALL_KERNELS)
            works = map(work, batch_norms_of(self._of_layout.whole(self._settings(plan))))
            norms_s = count * passes * sum(times.seconds(one) for one in works)
        overhead, meetings = host_s + norms_s, num_meetings(traffic)
        wait_s = meetings * self._links_of(self.layout.world_size, 1).wait_s((step_s + overhead) / max(1, meetings))
        if not self._is_on_cpu:
            shares = [axis.waiting_share(self.layout) for axis in self._axes]
            wait_s += step_s * (sum(shares) + _of_slowest(self.layout.world_size))
        spread = LayoutUpdate(
            compute_s=step_s + bubble_s,
            bubble_s=bubble_s,
            overhead_s=overhead,
            messages=messages,
            waiting_s=wait_s,
        )
        self._spread[plan] = spread, self._with_messages(slowest, spread, passes)
        return self._spread[plan]

    def _with_messages(self, slowest: UpdateTime, spread: LayoutUpdate, passes: int) -> UpdateTime:
        """The slowest process's update with messages and waiting, which are less certain than its arithmetic."""
        own, value = slowest.step_s, spread.total_s
        waited_s = 0.0 if self._is_on_cpu else spread.waiting_s
        added_s = value - own.value - waited_s
        links = [self._links_of(*self.layout.group(one.traffic.axis)) for one in spread.messages]
        factor = max((one.spread for one in links), default=1.0)
        low = own.low + added_s / factor + waited_s / _WAITING_SPREAD
        high = own.high + added_s * factor + waited_s * _WAITING_SPREAD
        basis = "unknown" if any(one.basis == "unknown" for one in links) else own.basis
        waits = 1 + self._num_idle_turns(passes) / passes
        return dataclasses.replace(
            slowest,
            step_s=Estimate(value=value, low=min(low, value), high=max(high, value), unit="s", basis=basis),
            forward_s=slowest.forward_s * waits,
        )

    def _times_with(self, threads: int) -> tuple[Hardware, OperationTimes]:
        hardware, times = super()._times_with(threads)
        slowdown = self._links_of(self.layout.world_size, 1).slowdown
        return hardware, ContendedTimes(times, slowdown) if slowdown and isinstance(times, UncontendedTimes) else times

    def _num_idle_turns(self, passes: int) -> float:
        return sum(axis.num_idle_turns(self.layout, passes) for axis in self._axes)

    @property
    def _kinds(self) -> Sequence[Needs]:
        """As `TracedForecasts._kinds`."""
        return tuple(self._ranks.values())

    def _processes(self, plan: Plan) -> Sequence[tuple[Needs, int]]:
        """As `TracedForecasts._processes`, one process of each kind of work."""
        if plan not in self._untraced:
            self._untraced[plan] = [
                (needs, self._untraced_bytes(plan, rank) + self._data_bytes(plan, needs))
                for rank, needs in self._ranks.items()
            ]
        return self._untraced[plan]

    def _untraced_bytes(self, plan: Plan, rank: int) -> int:
        """Memory that no trace of a process has [bytes]: message buffers; where work is uneven, state and waiting."""
        held = held_parts(self.parts, self.layout, rank)
        untraced = self._message_bytes(plan, held)
        if len(self._ranks) == 1:
            return untraced
        trace, update = self._ranks[rank].trace(self._settings(plan)), self._divided_update(plan)
        untraced += self.state(plan, rank).total
        return untraced + sum(axis.bucket_bytes(held) + axis.waiting_bytes(trace, update, rank) for axis in self._axes)

    def _message_bytes(self, plan: Plan, parts: ModelParts) -> int:
        """Memory of messages in one process [bytes]."""
        share = self._gathered_share(plan)
        return sum(
            axis.message_bytes(parts, self.layout, is_on_cpu=self._is_on_cpu, gathered_share=share)
            for axis in self._axes
        )

    def _gathered_share(self, plan: Plan) -> float:
        """Size of a gathered parameter over that of its master."""
        return 0.5 if self._settings(plan).gathered_in == "bf16" else 1.0

    def _resident(self, plan: Plan) -> float:
        """Memory of the process that needs the most [bytes], with the copy that its checkpoint is written from."""
        if plan in self._residents:
            return self._residents[plan]
        settings, passes = self._settings(plan), self._micro_batches(plan)
        copied = self.state(plan)
        self._residents[plan] = max(
            self._held_bytes
            + copied.parameters
            + copied.optimizer
            + self._untraced_bytes(plan, rank)
            + needs.resident(settings, passes, plan.malloc)
            for rank, needs in self._ranks.items()
        )
        return self._residents[plan]
