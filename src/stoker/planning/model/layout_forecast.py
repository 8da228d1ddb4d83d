"""Forecasts of plans under a layout: the work of each process, messages between them, and the part that nothing hides.

An update takes as long as its slowest process computes, plus the messages that nothing hides. A process executes the
trace of its part of a batch, as divided by shards, tensor groups and stages (`rank_traces`). Stages take `m`
micro-batches in m + s - 1 turns of the slowest of s (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

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

from stoker.planning.model.communication import (
    LinksOf,
    MessageTime,
    Traffic,
    group_of,
    loss_traffic,
    message_time,
    num_meetings,
    replicated_traffic,
    sharded_traffic,
    summed_after,
    waited_for,
)
from stoker.planning.model.rank_traces import (
    SYNCED_NORM_WORK,
    OptimizerFootprint,
    RankState,
    batch_norms_of,
    boundary_bytes,
    buckets_bytes,
    communication_buffers,
    even_cuts,
    gloo_buffers,
    of_blocks,
    of_stage,
    rank_state,
    synced_norm_work,
    tensor_sums,
    with_buckets,
    with_divided_layers,
    with_shards,
)
from stoker.planning.model.run_forecast import Extents, Needs, TracedForecasts
from stoker.planning.model.shared_cpu import ContendedTimes, UncontendedTimes
from stoker.planning.model.update_time import OperationTimes, UpdateTime
from stoker.records import (
    Breakdown,
    Calibration,
    Estimate,
    Forecast,
    Hardware,
    Layout,
    Operation,
    Plan,
    Profile,
    Share,
    TensorShape,
    Trace,
    TraceSettings,
)
from stoker.records.profile import ModelParts

HardwareOf = Callable[[int | None], Hardware]


@dataclass(frozen=True, kw_only=True)
class LayoutUpdate:
    """One update over a layout.

    `compute_s` is the slowest process's arithmetic, with the turns in which stages wait (`bubble_s`); `overhead_s` is
    the layout's own work, `messages` those between processes, `waiting_s` the time that processes on one CPU wait for
    each other at messages.
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
    if coupling.group is not None and layout.data_size > 1:
        coupling = dataclasses.replace(coupling, group=math.ceil(coupling.group / layout.data_size))
    return dataclasses.replace(profile, batch=math.ceil(batch / layout.data_size), coupling=coupling)


class LayoutForecasts(TracedForecasts):
    """Forecasts of plans for one layout; memory is that of the process that needs the most.

    Plans are those of one process: `micro_batch` are samples in a process, `threads` those of a process.

    Args:
        layout: of the processes.
        profile: the job's facts.
        parts: the model's parameters.
        hardware: the device of a process, by the number of threads on a CPU.
        traces: traces of updates in one process.
        extents: the run's extents at a rate of all processes together [samples/s].
        links_of: links of groups of processes.
        calibrations: forecasts and measurements of earlier runs on this device.
        held_bytes: memory of a process before it trains [bytes].
        fetch_s: time in which one process fetches a sample that is not in memory [s].
        is_apart: processes make updates of their own and exchange weights after an interval (`Job(sync=…)`); exchanges
            are not in the forecast of an update.
        cuts: first blocks of all stages but the first; evenly spaced if None.
    """

    def __init__(  # noqa: PLR0913 - each is a fact of its own
        self,
        layout: Layout,
        profile: Profile,
        parts: ModelParts,
        hardware: HardwareOf,
        traces: Callable[[TraceSettings], Trace],
        extents: Callable[[float], Extents],
        links_of: LinksOf,
        *,
        calibrations: Sequence[Calibration] = (),
        held_bytes: int = 0,
        fetch_s: float = 0.0,
        is_apart: bool = False,
        cuts: tuple[int, ...] | None = None,
    ) -> None:
        self.layout, self.parts, self._is_apart = layout, parts, is_apart
        self._cuts = cuts or even_cuts(len(parts.blocks), layout.stages)
        self._whole, self._links_of = traces, links_of
        self._stages = [Needs(functools.partial(self._rank_trace, stage=stage)) for stage in range(layout.stages)]
        super().__init__(
            profile, hardware, self._stages[0], extents, calibrations=calibrations, held_bytes=held_bytes,
            fetch_s=fetch_s / layout.data_size,
        )  # fmt: skip
        self._local = local_profile(profile, layout)
        self._spread: dict[Plan, tuple[LayoutUpdate, UpdateTime]] = {}
        self._whole_needs = Needs(traces)
        self._saved: dict[str, float] = {}

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
        spreads = [self._links_of(*group_of(self.layout, one.traffic.axis)).spread for one in spread.messages]
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
        """What a process keeps from update to update."""
        moments = OptimizerFootprint.of(self._whole(self._settings(plan)), self.parts)
        return rank_state(self.parts, self.layout, rank, moments, self._cuts)

    def _saved_bytes(self, plan: Plan) -> float:
        """Largest number of bytes that one process writes at a checkpoint; processes with equal parts take turns.

        A site that makes updates of its own writes all of its state, with the shared weights and their momentum.
        """
        implementation = plan.optimizer_implementation  # the only setting of a plan that changes the state
        if implementation in self._saved:
            return self._saved[implementation]
        layout, settings = self.layout, self._settings(plan)
        whole = self._whole_needs.kept(settings)
        if self._is_apart:
            saved: float = whole + 3 * self.parts.trained_bytes
        else:
            moments = OptimizerFootprint.of(self._whole(settings), self.parts)
            each = layout.data_size * layout.tensor
            states = [rank_state(self.parts, layout, n * each, moments, self._cuts) for n in range(layout.stages)]
            total = sum(one.num_bytes for one in self.parts.parameters) + moments.like * self.parts.trained_bytes
            share = max(state.parameters + state.optimizer for state in states) / max(1, total)
            saved = whole * min(1.0, share) / layout.replicas
        self._saved[implementation] = saved
        return saved

    def breakdown(self, plan: Plan) -> Breakdown:
        """Parts of memory and time of an update in the first process, with messages that are not hidden."""
        traced, spread = super().breakdown(plan), self.spread(plan)
        messages = ((message.traffic.what, message.exposed_s) for message in spread.messages)
        parts = (
            *messages, ("stages waiting", spread.bubble_s), ("the layout's own work", spread.overhead_s),
            ("waiting for the other processes", spread.waiting_s),
        )  # fmt: skip
        added = [Share(what=what, value=value) for what, value in parts if value > 0]
        buffers = self._buffers(of_stage(self.parts, 0, self.layout.stages, self._cuts))
        memory = [Share(what="communication buffers", value=float(buffers))] if buffers else []
        return dataclasses.replace(
            traced,
            peak_bytes=tuple(sorted((*traced.peak_bytes, *memory), key=lambda share: -share.value)),
            step_s=tuple(sorted((*traced.step_s, *added), key=lambda share: -share.value)),
        )

    def traffic(self, plan: Plan) -> tuple[Traffic, ...]:
        """Messages between processes in an update."""
        layout, passes = self.layout, self._micro_batches(plan)
        if self._is_apart:
            return ()
        parts, traffic = of_stage(self.parts, 0, layout.stages, self._cuts), [loss_traffic()]
        if layout.shards > 1:
            traffic += sharded_traffic(parts, layout, passes)
        elif layout.replicas > 1:
            is_only_axis = layout.world_size == layout.replicas
            traffic += (replicated_traffic if is_only_axis else summed_after)(parts.parameters)
        if self._has_synced_norms:  # statistics forward, the sums of two gradients backward
            channels = [norm.inputs[0].shape[1] for norm in batch_norms_of(self._whole(self._settings(plan)))]
            gathered = tuple(4 * (2 * count + 1) * layout.data_size for count in channels)
            summed = tuple(8 * count for count in channels)
            traffic += [
                Traffic(what="batch statistics gathered", collective="all-gather", axis="data", sizes=gathered,
                        times=passes),
                Traffic(what="gradients of batch statistics", collective="all-reduce", axis="data", sizes=summed,
                        times=passes),
            ]  # fmt: skip
        if layout.tensor > 1:
            traffic += self._tensor_traffic(plan, passes)
        if layout.stages > 1:
            num_bytes = boundary_bytes(self._whole(self._settings(plan)), self.parts)
            turns = 2 * (passes + layout.stages - 1)
            # In each turn of two messages one stage waits for the result of its neighbour.
            traffic.append(Traffic(what="activations handed on", collective="point-to-point", axis="stages",
                                   sizes=(num_bytes,), times=turns, stops=0.5))  # fmt: skip
        return waited_for(traffic) if self._is_on_cpu else tuple(traffic)

    @property
    def _is_on_cpu(self) -> bool:
        return self._hardware.device.kind == "cpu"

    @property
    def _has_synced_norms(self) -> bool:
        return self.layout.data_size > 1 and self._profile.coupling.kind == "batch_norm"

    def _tensor_traffic(self, plan: Plan, passes: int) -> list[Traffic]:
        forward, backward = tensor_sums(self._whole(self._settings(plan)), self.parts)
        sizes = (*forward, *backward)
        if not self.layout.sequence:
            return [Traffic(what="partial outputs summed", collective="all-reduce", axis="tensor", sizes=sizes,
                            times=passes)]  # fmt: skip
        return [
            Traffic(what="sequences gathered", collective="all-gather", axis="tensor", sizes=sizes, times=passes),
            Traffic(what="sequences scattered", collective="reduce-scatter", axis="tensor", sizes=sizes, times=passes),
        ]

    def _of(self, plan: Plan) -> tuple[LayoutUpdate, UpdateTime]:
        if plan in self._spread:
            return self._spread[plan]
        passes, stages = self._micro_batches(plan), self.layout.stages
        hardware, times = self._times_with(plan.threads)
        updates = [self._update_by(plan, needs, hardware, times) for needs in self._stages]
        slowest = max(updates, key=lambda one: one.step_s.value)
        step_s = slowest.step_s.value
        turn_s = (slowest.forward_s + slowest.backward_s) / passes
        bubble_s = turn_s * (stages - 1)
        traffic = self.traffic(plan)
        messages = tuple(
            message_time(one, self.layout, self._links_of, forward_s=slowest.forward_s, backward_s=slowest.backward_s,
                    passes=passes)
            for one in traffic
        )  # fmt: skip
        host_s = norms_s = 0.0
        if self._is_on_cpu:  # on a GPU it is hidden
            host_s = overhead_s(self.parts, self.layout, passes)
            host_s += shard_copies_s(traffic, self.layout.shards, times)
        if self._has_synced_norms:  # their work on top of PyTorch's own batch norms
            works = map(synced_norm_work, batch_norms_of(self._whole(self._settings(plan))))
            norms_s = SYNCED_NORM_WORK * passes * sum(times.seconds(one) for one in works)
        overhead, meetings = host_s + norms_s, num_meetings(traffic)
        wait_s = self._links_of(self.layout.world_size, 1).wait_s((step_s + overhead) / max(1, meetings))
        spread = LayoutUpdate(
            compute_s=step_s + bubble_s, bubble_s=bubble_s, overhead_s=overhead, messages=messages,
            waiting_s=meetings * wait_s,
        )  # fmt: skip
        self._spread[plan] = spread, self._with_messages(slowest, spread, passes)
        return self._spread[plan]

    def _with_messages(self, slowest: UpdateTime, spread: LayoutUpdate, passes: int) -> UpdateTime:
        """The slowest process's update with messages and waiting, which are less certain than its arithmetic."""
        own, value = slowest.step_s, spread.total_s
        added_s = value - own.value
        links = [self._links_of(*group_of(self.layout, one.traffic.axis)) for one in spread.messages]
        factor = max((one.spread for one in links), default=1.0)
        low, high = own.low + added_s / factor, own.high + added_s * factor
        basis = "unknown" if any(one.basis == "unknown" for one in links) else own.basis
        waits = 1 + (self.layout.stages - 1) / passes
        return dataclasses.replace(
            slowest,
            step_s=Estimate(value=value, low=min(low, value), high=max(high, value), unit="s", basis=basis),
            forward_s=slowest.forward_s * waits,
        )

    def _times_with(self, threads: int) -> tuple[Hardware, OperationTimes]:
        hardware, times = super()._times_with(threads)
        slowdown = self._links_of(self.layout.world_size, 1).slowdown
        return hardware, ContendedTimes(times, slowdown) if slowdown and isinstance(times, UncontendedTimes) else times

    def _rank_trace(self, settings: TraceSettings, stage: int) -> Trace:
        """The trace of one process of a stage."""
        layout, parts = self.layout, self.parts
        trace = self._whole(settings)
        if layout.stages > 1:
            trace = of_blocks(trace, parts, self._cuts, stage)
            parts = of_stage(parts, stage, layout.stages, self._cuts)
        if layout.tensor > 1:
            trace = with_divided_layers(trace, parts, layout)
        if layout.shards > 1:
            return with_shards(trace, parts, layout)
        has_buckets = layout.replicas == layout.world_size and not self._is_apart
        return with_buckets(trace) if has_buckets else trace

    def _device_bytes(self, plan: Plan) -> tuple[float, float]:
        """Peak and held memory of the stage whose processes need the most [bytes]."""
        settings, passes = self._settings(plan), self._micro_batches(plan)
        stages = []
        for stage, needs in enumerate(self._stages):
            peak, more = needs.peak(settings, passes), self._untraced_bytes(plan, stage) + self._data_bytes(plan)
            stages.append((float(peak.allocated + more), float(peak.reserved + more)))
        return max(stages, key=lambda allocated_reserved: allocated_reserved[1])

    def _untraced_bytes(self, plan: Plan, stage: int) -> int:
        """Memory that no trace of a process has [bytes]: message buffers; of stages state and waiting activations."""
        layout = self.layout
        parts = of_stage(self.parts, stage, layout.stages, self._cuts)
        buffers = self._buffers(parts)
        if layout.stages == 1:
            return buffers
        state = self.state(plan, rank=stage * layout.data_size * layout.tensor).total
        trace = self._stages[stage].trace(self._settings(plan))
        kept = sum(one.num_bytes for one in trace.storages if one.category == "activation")
        kept //= trace.settings.parts
        passes = self._micro_batches(plan)
        waiting = min(passes, layout.stages - stage) if layout.schedule == "1f1b" else passes
        buckets = buckets_bytes(parts) if layout.replicas > 1 else 0
        return buffers + state + buckets + kept * (waiting - 1)

    def _buffers(self, parts: ModelParts) -> int:
        """Memory of messages in one process [bytes]."""
        return (gloo_buffers if self._is_on_cpu else communication_buffers)(parts, self.layout)

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - lives as long as one planning
    def _resident(self, plan: Plan) -> float:
        """Memory of the process that needs the most [bytes], with the copy that its checkpoint is written from."""
        settings, passes = self._settings(plan), self._micro_batches(plan)
        copied = self.state(plan)
        return max(
            self._held_bytes + copied.parameters + copied.optimizer + self._untraced_bytes(plan, stage)
            + needs.resident(settings, passes, plan.malloc)
            for stage, needs in enumerate(self._stages)
        )  # fmt: skip


_REPLICATED_PASS_S, _REPLICATED_PARAMETER_S = 2.6e-4, 2.4e-5
"""Overhead of DistributedDataParallel: a pass, and each parameter in an update [s]."""
_SHARDED_S, _SHARDED_GROUP_S, _KEPT_GROUP_S, _SHARDED_PARAMETER_S = 5e-4, 2.1e-3, 1.7e-3, 3e-5
"""Overhead of `fully_shard`: an update; in each pass each group, which frees its parameters or keeps them; and each
parameter in an update [s]."""
_TENSOR_S, _TENSOR_LAYER_S, _SEQUENCE_LAYER_S = 3e-3, 4.5e-4, 7.9e-4
"""Overhead of DTensor: an update, and in each pass a divided layer, without or with divided sequences [s]."""
_STAGE_S = 1.2e-3
"""Overhead of a pipeline's schedule: an update [s]."""


def overhead_s(parts: ModelParts, layout: Layout, passes: int) -> float:
    """Time of a process without arithmetic and messages in an update [s]."""
    num_parameters = sum(one.is_trained for one in parts.parameters) / layout.stages
    seconds = _STAGE_S if layout.stages > 1 else 0.0
    if layout.shards > 1:
        groups = passes * (1 + len(parts.blocks)) / layout.stages
        seconds += _SHARDED_S + groups * (_SHARDED_GROUP_S if layout.reshard else _KEPT_GROUP_S)
        seconds += num_parameters * _SHARDED_PARAMETER_S
    elif layout.replicas > 1:
        seconds += passes * _REPLICATED_PASS_S + num_parameters * _REPLICATED_PARAMETER_S
    if layout.tensor > 1:
        seconds += _TENSOR_S + passes * len(parts.divided) * (_SEQUENCE_LAYER_S if layout.sequence else _TENSOR_LAYER_S)
    return seconds


def shard_copies_s(traffic: Sequence[Traffic], shards: int, times: OperationTimes) -> float:
    """Time of `fully_shard`'s copies into and out of the tensors that it gathers and scatters, in an update [s].

    A gather copies a process's own part in and everything out, a scatter everything in; its result is used in place.
    Source: `foreach_all_gather`, `foreach_all_gather_copy_out` and `foreach_reduce` in
    torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
    """

    def copy_s(num_bytes: float) -> float:  # as the elementwise operation that takes as long
        shape = TensorShape(shape=(max(1, round(num_bytes / 4)),), dtype="fp32")
        num = shape.numel * 4
        return times.seconds(
            Operation(name="mul", inputs=(shape,), outputs=(shape,), flops=0, bytes_read=num, bytes_written=num)
        )

    shares = {"all-gather": (1 / shards, 1.0), "reduce-scatter": (1.0,)}
    return sum(
        one.times * copy_s(size * share)
        for one in traffic if one.axis == "shards"
        for size in one.sizes for share in shares[one.collective]
    )  # fmt: skip
