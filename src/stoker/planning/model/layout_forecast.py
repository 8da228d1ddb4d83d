"""Forecasts of plans under a layout: what one process does, what all tell each other, and what of that shows.

An update takes as long as its slowest process computes, plus the messages that nothing hides. A process computes what
the trace of its part of a batch does, with what shards, tensor groups and stages leave of it (`rank_traces`). Stages
take `m` micro-batches in m + s - 1 turns of the slowest of s (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

What layouts cost a process on a CPU besides arithmetic and messages: Python, hooks, DTensor's dispatch.

On a GPU the host runs ahead and most of this is hidden; it is left out there. Constants are what
`bench/many/overheads.py` found under PyTorch 2.13 on one x86-64 core, on models that forecasts are not held to.
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
from stoker.planning.model.search_space import trace_settings
from stoker.planning.model.shared_cpu import ContendedTimes, UncontendedTimes
from stoker.planning.model.update_time import OperationTimes, UpdateTime
from stoker.records import (
    Breakdown,
    Calibration,
    Coupling,
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

    `compute_s` is the slowest process's arithmetic, with the turns in which stages wait, `bubble_s`, and what layouts
    cost besides, `overhead_s`; `messages` what is told, `waiting_s` how long processes on one CPU wait for each other
    at messages.
    """

    compute_s: float
    bubble_s: float
    overhead_s: float
    messages: tuple[MessageTime, ...]
    waiting_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """What of all messages shows [s]."""
        return sum(one.exposed_s for one in self.messages)

    @property
    def total_s(self) -> float:
        """The whole update [s]."""
        return self.compute_s + self.overhead_s + self.exposed_s + self.waiting_s


def local_profile(profile: Profile, layout: Layout) -> Profile:
    """The facts of the part of a job that one process of a layout has: its samples of a batch, and of each group."""
    batch = min(profile.batch, profile.num_train)
    coupling = profile.coupling
    if coupling.group is not None and layout.data_size > 1:
        coupling = _divided(coupling, layout.data_size)
    return dataclasses.replace(profile, batch=math.ceil(batch / layout.data_size), coupling=coupling)


def _divided(coupling: Coupling, parts: int) -> Coupling:
    group = coupling.group or 1
    return dataclasses.replace(coupling, group=math.ceil(group / parts))


class LayoutForecasts(TracedForecasts):
    """Forecasts of plans for one layout; what is said of memory is said of the process that needs the most.

    Plans are those of one process: `micro_batch` are samples in a process, `threads` those of a process.

    Args:
        layout: over how many processes, and how.
        profile: the job's facts.
        parts: the model's parameters.
        hardware: the device of a process, by the number of threads that compute on a CPU.
        traces: gives traces of updates in one process.
        extents: how much there is to do, at so many samples per second of all processes together.
        links_of: what groups of processes reach.
        calibrations: forecasts and measurements of earlier runs on this device.
        held_bytes: what a process holds before it trains [bytes].
        fetch_s: what one process takes to fetch a sample that is not in memory [s].
        is_apart: processes make updates of their own, and come together after an interval (`Job(sync=…)`): what they
            then tell each other is not in the forecast of an update.
        cuts: first blocks of all stages but the first; evenly spread if None.
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
        self._local, self._whole, self._links_of = local_profile(profile, layout), traces, links_of
        self._stages = [Needs(functools.partial(self._rank_trace, stage=stage)) for stage in range(layout.stages)]
        super().__init__(
            profile, hardware, self._stages[0], extents, calibrations=calibrations, held_bytes=held_bytes,
            fetch_s=fetch_s / layout.data_size,
        )  # fmt: skip
        self._spread: dict[Plan, tuple[LayoutUpdate, UpdateTime]] = {}
        self._whole_needs = Needs(traces)
        self._saved: dict[str, float] = {}

    def spread(self, plan: Plan) -> LayoutUpdate:
        """What an update is made of."""
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

    def _with_layout(self, plan: Plan) -> Plan:
        return dataclasses.replace(plan, layout=self.layout, captured=False)

    def _saved_bytes(self, plan: Plan) -> float:
        """Of the whole state the part that a process holds, of which those that hold the same write in turns.

        A site that makes updates of its own writes all of its state, with what all share and their momentum.
        """
        implementation = plan.optimizer_implementation  # of a plan's settings the state follows from this alone
        if implementation not in self._saved:
            self._saved[implementation] = self._part_saved(self._settings(plan))
        return self._saved[implementation]

    def _part_saved(self, settings: TraceSettings) -> float:
        layout, whole = self.layout, self._whole_needs.kept(settings)
        if self._is_apart:
            return whole + 3 * self.parts.trained_bytes
        moments = OptimizerFootprint.of(self._whole(settings), self.parts)
        each = layout.data_size * layout.tensor
        held = [rank_state(self.parts, layout, stage * each, moments, self._cuts) for stage in range(layout.stages)]
        parameters = sum(one.num_bytes for one in self.parts.parameters)
        all_of_it = parameters + moments.like * self.parts.trained_bytes
        share = max(one.parameters + one.optimizer for one in held) / max(1, all_of_it)
        return whole * min(1.0, share) / layout.replicas

    def breakdown(self, plan: Plan) -> Breakdown:
        """Where bytes and time of an update go in the first process, messages that show among them."""
        found, spread = super().breakdown(plan), self.spread(plan)
        told = [Share(what=one.traffic.what, value=one.exposed_s) for one in spread.messages if one.exposed_s > 0]
        beside = (
            ("stages waiting", spread.bubble_s), ("the layout's own work", spread.overhead_s),
            ("waiting for the other processes", spread.waiting_s),
        )  # fmt: skip
        waiting = [Share(what=what, value=value) for what, value in beside if value > 0]
        buffers = self._buffers(of_stage(self.parts, 0, self.layout.stages, self._cuts))
        memory = [Share(what="communication buffers", value=float(buffers))] if buffers else []
        return dataclasses.replace(
            found,
            peak_bytes=tuple(sorted((*found.peak_bytes, *memory), key=lambda share: -share.value)),
            step_s=tuple(sorted((*found.step_s, *told, *waiting), key=lambda share: -share.value)),
        )

    def traffic(self, plan: Plan) -> tuple[Traffic, ...]:
        """What processes tell each other in an update."""
        layout, passes = self.layout, self._micro_batches(plan)
        if self._is_apart:
            return ()
        mine = of_stage(self.parts, 0, layout.stages, self._cuts)
        found: list[Traffic] = [loss_traffic()]
        if layout.shards > 1:
            found += sharded_traffic(mine, layout, passes)
        elif layout.replicas > 1:
            is_alone = layout.world_size == layout.replicas
            found += (replicated_traffic if is_alone else summed_after)(mine.parameters)
        if layout.data_size > 1 and self._profile.coupling.kind == "batch_norm":
            found += self._norm_traffic(plan, passes)
        if layout.tensor > 1:
            found += self._tensor_traffic(plan, passes)
        if layout.stages > 1:
            num_bytes = boundary_bytes(self._whole(self._settings(plan)), self.parts)
            turns = 2 * (passes + layout.stages - 1)
            # In each turn of two messages one stage waits, for what its neighbour has just made.
            found.append(Traffic(what="activations handed on", collective="point-to-point", axis="stages",
                                 sizes=(num_bytes,), times=turns, stops=0.5))  # fmt: skip
        return waited_for(found) if self._is_on_cpu else tuple(found)

    def _norm_traffic(self, plan: Plan, passes: int) -> list[Traffic]:
        """Of batch norms over several processes: statistics forward, the sums of two gradients backward."""
        channels = [one.inputs[0].shape[1] for one in batch_norms_of(self._whole(self._settings(plan)))]
        everyone = tuple(4 * (2 * count + 1) * self.layout.data_size for count in channels)
        sums = tuple(8 * count for count in channels)
        return [
            Traffic(what="batch statistics gathered", collective="all-gather", axis="data", sizes=everyone,
                    times=passes),
            Traffic(what="gradients of batch statistics", collective="all-reduce", axis="data", sizes=sums,
                    times=passes),
        ]  # fmt: skip

    @property
    def _is_on_cpu(self) -> bool:
        return self._hardware.device.kind == "cpu"

    def _norms_s(self, plan: Plan) -> float:
        """What batch norms over several processes compute on top of PyTorch's own, in an update [s]."""
        if self.layout.data_size == 1 or self._profile.coupling.kind != "batch_norm":
            return 0.0
        _, times = self._times_with(plan.threads)
        works = map(synced_norm_work, batch_norms_of(self._whole(self._settings(plan))))
        return SYNCED_NORM_WORK * self._micro_batches(plan) * sum(times.seconds(one) for one in works)

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
        if plan not in self._spread:
            self._spread[plan] = self._made(plan)
        return self._spread[plan]

    def _made(self, plan: Plan) -> tuple[LayoutUpdate, UpdateTime]:
        passes, stages = self._micro_batches(plan), self.layout.stages
        updates = [self._update_of(plan, needs) for needs in self._stages]
        slowest = max(updates, key=lambda one: one.step_s.value)
        step_s = slowest.step_s.value
        turn_s = (slowest.forward_s + slowest.backward_s) / passes
        bubble_s = turn_s * (stages - 1)
        messages = tuple(
            message_time(one, self.layout, self._links_of, forward_s=slowest.forward_s, backward_s=slowest.backward_s,
                    passes=passes)
            for one in self.traffic(plan)
        )  # fmt: skip
        overhead = self._host_s(plan) + self._norms_s(plan)
        spread = LayoutUpdate(
            compute_s=step_s + bubble_s, bubble_s=bubble_s, overhead_s=overhead, messages=messages,
            waiting_s=self._waiting_s(plan, step_s + overhead),
        )  # fmt: skip
        return spread, self._with_messages(slowest, spread, passes)

    def _host_s(self, plan: Plan) -> float:
        """What a process of the layout does on a CPU besides arithmetic, in an update [s]; on a GPU it is hidden."""
        if not self._is_on_cpu:
            return 0.0
        found = overhead_s(self.parts, self.layout, self._micro_batches(plan))
        return found + shard_copies_s(self.traffic(plan), self.layout.shards, self._times_with(plan.threads)[1])

    def _waiting_s(self, plan: Plan, work_s: float) -> float:
        """How long processes wait for each other at messages in an update, each of which works so long [s]."""
        meetings = num_meetings(self.traffic(plan))
        return meetings * self._links_of(self.layout.world_size, 1).wait_s(work_s / max(1, meetings))

    def _with_messages(self, slowest: UpdateTime, spread: LayoutUpdate, passes: int) -> UpdateTime:
        """The slowest process's update with what is beside its arithmetic, which is the less certain."""
        own, value = slowest.step_s, spread.total_s
        beside = value - own.value
        links = [self._links_of(*group_of(self.layout, one.traffic.axis)) for one in spread.messages]
        factor = max((one.spread for one in links), default=1.0)
        low, high = own.low + beside / factor, own.high + beside * factor
        basis = "unknown" if any(one.basis == "unknown" for one in links) else own.basis
        waits = 1 + (self.layout.stages - 1) / passes
        return dataclasses.replace(
            slowest,
            step_s=Estimate(value=value, low=min(low, value), high=max(high, value), unit="s", basis=basis),
            forward_s=slowest.forward_s * waits,
        )

    def _update_of(self, plan: Plan, needs: Needs) -> UpdateTime:
        """Arithmetic of one process."""
        hardware, times = self._times_with(plan.threads)
        return self._update_by(plan, needs, hardware, times)

    def _times_with(self, threads: int) -> tuple[Hardware, OperationTimes]:
        hardware, times = super()._times_with(threads)
        slowdown = self._links_of(self.layout.world_size, 1).slowdown
        return hardware, ContendedTimes(times, slowdown) if slowdown and isinstance(times, UncontendedTimes) else times

    def _rank_trace(self, settings: TraceSettings, stage: int) -> Trace:
        """What one process does and holds."""
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
        """Of the stage whose processes need the most."""
        settings, passes = self._settings(plan), self._micro_batches(plan)
        found = []
        for stage, needs in enumerate(self._stages):
            peak, beside = needs.peak(settings, passes), self._beside(plan, stage) + self._data_bytes(plan)
            found.append((float(peak.allocated + beside), float(peak.reserved + beside)))
        return max(found, key=lambda one: one[1])

    def _beside(self, plan: Plan, stage: int) -> int:
        """What no trace of a process shows [bytes]: buffers of messages, and of stages state and what waits."""
        layout = self.layout
        mine = of_stage(self.parts, stage, layout.stages, self._cuts)
        found = self._buffers(mine)
        if layout.stages == 1:
            return found
        state = self.state(plan, rank=stage * layout.data_size * layout.tensor).total
        trace = self._stages[stage].trace(self._settings(plan))
        kept = sum(one.num_bytes for one in trace.storages if one.category == "activation")
        kept //= trace.settings.parts
        passes = self._micro_batches(plan)
        waiting = min(passes, layout.stages - stage) if layout.schedule == "1f1b" else passes
        buckets = buckets_bytes(mine) if layout.replicas > 1 else 0
        return found + state + buckets + kept * (waiting - 1)

    def _buffers(self, mine: ModelParts) -> int:
        """What messages between processes take in one of them [bytes]."""
        return (gloo_buffers if self._is_on_cpu else communication_buffers)(mine, self.layout)

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - lives as long as one planning
    def _resident(self, plan: Plan) -> float:
        """Of the process that needs the most; the copy that a checkpoint is written from is of its own part."""
        settings, passes = self._settings(plan), self._micro_batches(plan)
        copied = self.state(plan)
        return max(
            self._held_bytes + copied.parameters + copied.optimizer + self._beside(plan, stage)
            + needs.resident(settings, passes, plan.malloc)
            for stage, needs in enumerate(self._stages)
        )  # fmt: skip

    def _micro_batches(self, plan: Plan) -> int:
        """How many a process takes in an update."""
        return math.ceil(self._local.batch / plan.micro_batch)

    def _settings(self, plan: Plan) -> TraceSettings:
        return trace_settings(plan, self._local, self._hardware.compute_capability or "")


_REPLICATED_PASS_S, _REPLICATED_PARAMETER_S = 2.6e-4, 2.4e-5
"""Of DistributedDataParallel: a pass, and each parameter in an update [s]."""
_SHARDED_S, _SHARDED_GROUP_S, _KEPT_GROUP_S, _SHARDED_PARAMETER_S = 5e-4, 2.1e-3, 1.7e-3, 3e-5
"""Of `fully_shard`: an update; in each pass each group, which lets go of its parameters or keeps them; and each
parameter in an update [s]."""
_TENSOR_S, _TENSOR_LAYER_S, _SEQUENCE_LAYER_S = 3e-3, 4.5e-4, 7.9e-4
"""Of DTensor: an update, and in each pass a divided layer, without or with divided sequences [s]."""
_STAGE_S = 1.2e-3
"""Of a pipeline's schedule: an update [s]."""


def overhead_s(parts: ModelParts, layout: Layout, passes: int) -> float:
    """What a process of a layout takes beside arithmetic and messages in an update [s]."""
    num_parameters = sum(one.is_trained for one in parts.parameters) / layout.stages
    found = _STAGE_S if layout.stages > 1 else 0.0
    if layout.shards > 1:
        groups = passes * (1 + len(parts.blocks)) / layout.stages
        found += _SHARDED_S + groups * (_SHARDED_GROUP_S if layout.reshard else _KEPT_GROUP_S)
        found += num_parameters * _SHARDED_PARAMETER_S
    elif layout.replicas > 1:
        found += passes * _REPLICATED_PASS_S + num_parameters * _REPLICATED_PARAMETER_S
    if layout.tensor > 1:
        found += _TENSOR_S + passes * len(parts.divided) * (_SEQUENCE_LAYER_S if layout.sequence else _TENSOR_LAYER_S)
    return found


def shard_copies_s(traffic: Sequence[Traffic], shards: int, times: OperationTimes) -> float:
    """What `fully_shard` copies into and out of the tensors that it gathers and scatters, in an update [s].

    Of what is gathered a process's own part goes in and all of it comes out, of what is scattered all goes in; what
    comes out is used where it lies. Source: `foreach_all_gather`, `foreach_all_gather_copy_out` and `foreach_reduce` in
    torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
    """
    shares = {"all-gather": (1 / shards, 1.0), "reduce-scatter": (1.0,)}
    return sum(
        one.times * times.seconds(_copied(size * share))
        for one in traffic if one.axis == "shards"
        for size in one.sizes for share in shares[one.collective]
    )  # fmt: skip


def _copied(num_bytes: float) -> Operation:
    """A copy of so many bytes, as the elementwise operation that takes as long."""
    shape = TensorShape(shape=(max(1, round(num_bytes / 4)),), dtype="fp32")
    return Operation(name="mul", inputs=(shape,), outputs=(shape,), flops=0, bytes_read=shape.numel * 4,
                     bytes_written=shape.numel * 4)  # fmt: skip
