"""Plan a job over several devices: the legal layouts, the best plan under each by forecast, and the devices' links."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from stoker.devices import (
    Place,
    attached_devices,
    cache_key,
    installed_torch,
    load_between,
    planned_devices,
    sample_cpu,
)
from stoker.devices.cluster import NODE_DEVICES, catalogue_links, unmeasured_links
from stoker.devices.hardware import with_similar_figures
from stoker.devices.malloc import resident_bytes
from stoker.errors import BadJob, DoesNotFit, NoDevice
from stoker.jobs import Job
from stoker.layouts import axes_of
from stoker.layouts.context import is_worthwhile
from stoker.layouts.local_state import OptimizerFootprint
from stoker.layouts.rules import JobTraits, compile_problem, compiles, layout_problem
from stoker.loading.fields import Content
from stoker.planning.explanation import describe_messages, describe_stand_in, explain, why_slower
from stoker.planning.model.layout_forecast import LayoutForecasts, local_profile
from stoker.planning.model.optimizer_states import block_problem, full_states, stored_share
from stoker.planning.model.run_forecast import complete_breakdown
from stoker.planning.model.search_space import (
    execution_settings,
    layouts_of,
    precisions,
    saving_memory,
    trace_settings,
)
from stoker.planning.plan_ranking import LEAST_GAIN, SURE_ENOUGH, compiled, in_fp8, rank
from stoker.planning.planner import Planner, measured_hardware, price_assumptions, with_costs
from stoker.planning.resolved_job import users_code
from stoker.planning.slow_links import recommend
from stoker.profiling.links import measure_links
from stoker.records import Candidate, Decision, Device, Hardware, Layout, Plan, Profile, Rejection, Trace
from stoker.records.hardware import Links
from stoker.stepping.layouts import data_problem, model_problem
from stoker.stepping.layouts.compatibility import traits_of
from stoker.stepping.layouts.context_locality import num_tokens
from stoker.stepping.torch_optimizers import build_optimizer, needs_closure
from stoker.store import cache_root
from stoker.store.record_caches import links_cache
from stoker.units import format_bytes


def on_many(planner: Planner, place: Place, only: Plan | None = None) -> Decision:
    """The plan under each layout of a job at a place of several devices, the best first; with `only`, that plan.

    Raises:
        BadJob: the job cannot use several devices, or `only` does not suit it.
        DoesNotFit: it fits under no layout.
    """
    notes: tuple[str, ...] = ()
    if place.device.kind == "cuda" and (similar := with_similar_figures(place.hardware)) is not None:
        hardware, entry = similar
        place = dataclasses.replace(place, hardware=hardware)
        notes = (f"{place.device.model} is not in the catalogue: planned by the figures of {entry.title}",)
    started, layouts = time.perf_counter(), LayoutCandidates(planner, place)
    ranked, rejected = layouts.ranked() if only is None else ((layouts.given(only),), ())
    price = planner.price_at(place)
    chosen, *others = (with_costs(place, c, layouts.forecasts(c.plan.layout), price) for c in ranked)
    forecasts, own = layouts.forecasts(chosen.plan.layout), without_layout(chosen.plan)
    best, slower, lost = forecasts.spread(own), [], []
    for other in others:
        ratio = other.forecast.seconds_per_sample / chosen.forecast.seconds_per_sample
        slower.append(dataclasses.replace(other, why=f"{ratio:.2f}x the time"))
        update = layouts.forecasts(other.plan.layout).spread(without_layout(other.plan))
        lost.append(Rejection(device=other.device, plan=other.plan, reason=why_slower(update, best, ratio)))
    device = dataclasses.replace(place.device, memory_bytes=place.memory_bytes_each)
    return Decision(
        device=place.name,
        candidates=(dataclasses.replace(chosen, why="the fastest layout" if others else chosen.why), *slower),
        rejected=(*lost, *rejected),
        explanation=(
            *planner.prepared.notes,
            *notes,
            *explain(chosen, layouts.profile, device, (), ()),
            *describe_messages(best, [layouts.links(place.count, 1)]),
            *layouts.of_lockstep(chosen),
            *layouts.of_context(chosen, others),
            *describe_stand_in(forecasts, own),
            price_assumptions(chosen),
        ),
        took_s=time.perf_counter() - started,
        breakdown=complete_breakdown(forecasts.breakdown(own), chosen.forecast, is_cpu=place.device.kind == "cpu"),
    )


_MOST_PRODUCTS = 3
"""Products of two and three axes that are planned in full, of those that fit."""

_SLOW = 1.5
"""A layout is not planned in full if it is estimated to take so many times as long as the best one found."""

_LEAST_GAIN_OF_CUT = 0.07
"""A layout that divides the tokens of samples is taken where it is faster by more than this share, which is the mean
error of forecasts on published steps, or where no other fits. A judgement: no published step is of such a layout."""

_LEAST_GAIN_OF_DIVISION = 0.18
"""Over several machines a layout that divides the model (a tensor group, stages) is taken where it is faster by more
than this share, by estimate and by forecast, or where none fits that shares the batch alone. Forecasts of published
steps in stages are so much too fast (docs/forecast-accuracy.md)."""

_CHUNKS = (2, 4)
"""Chunks in each process of stages that are considered."""

_USUAL_PASSES = 2
"""Micro-batches of an update in estimates that order layouts; of stages so many times their number."""
_REACHED = 0.5
"""Share of the datasheet's rate in estimates that order layouts [fraction]."""

_MOST_REJECTED = 24
"""Rejected layouts that a decision keeps."""


@dataclass(frozen=True, kw_only=True)
class LayoutRules:
    """Rules for the layouts of a job, checked before anything is spent. `model` is on the meta device.

    `tensor_devices` are the most of a tensor group: those of a machine, or that share its links. `contents` gives a
    batch of each set of data, whose shapes decide whether samples can be divided.
    """

    job: Job
    model: nn.Module
    profile: Profile
    tensor_devices: int = NODE_DEVICES
    contents: Callable[[], Sequence[Content]] | None = None

    def problem_with(self, layout: Layout) -> str | None:
        """Why a layout is not legal, with the numbers and what would be; None if it is."""
        problem = layout_problem(layout, self._traits) or self._of_model(layout)
        if problem is not None:
            return problem
        return (self._of_parts(layout) if layout.cuts_samples else None) or self._of_stages(layout)

    def _of_model(self, layout: Layout) -> str | None:
        """Why the model cannot be divided along one of the axes, each of which is asked once for each size."""
        for axis in axes_of(layout):
            alone = axis.of_size(Layout(sequence=layout.sequence), layout.group(axis.name)[0])
            if axis.name == "stages":
                alone = dataclasses.replace(alone, chunks=layout.chunks)
            if alone not in self._undivided:
                self._undivided[alone] = model_problem(self.model, alone)
            if (problem := self._undivided[alone]) is not None:
                return problem
        return None

    @functools.cached_property
    def _undivided(self) -> dict[Layout, str | None]:
        return {}

    def _of_parts(self, layout: Layout) -> str | None:
        """Why the model cannot be given parts of samples; None if it can, or if samples are not known."""
        if not self.profile.has_one_shape:
            return f"samples differ in length, and not each length can be divided into {layout.context} parts"
        if self.contents is not None and layout.context not in self._cut:
            problems = (data_problem(self.job, self.model, each, layout) for each in self.contents())
            self._cut[layout.context] = next(filter(None, problems), None)
        return self._cut.get(layout.context)

    def _of_stages(self, layout: Layout) -> str | None:
        """Why stages cannot pass on what the next ones need; None if they can, or if samples are not known."""
        if layout.stages == 1 or self.contents is None:
            return None
        content = self.contents()[0]
        return data_problem(self.job, self.model, content, Layout(stages=layout.stages, chunks=layout.chunks))

    @functools.cached_property
    def _cut(self) -> dict[int, str | None]:
        return {}

    @functools.cached_property
    def _traits(self) -> JobTraits:
        profile = self.profile
        return traits_of(
            self.job,
            self.model,
            closure_optimizer=self._with_closure,
            coupling=profile.coupling,
            batch=min(profile.batch, profile.num_train),
            tensor_devices=self.tensor_devices,
        )

    @functools.cached_property
    def _with_closure(self) -> str | None:
        """Name of the job's optimiser if it computes the loss within its step, else None."""
        with contextlib.suppress(Exception):  # if it cannot be built on the outline, the run says why
            optimizer = build_optimizer(self.job, self.model, Plan(device="cpu", micro_batch=1))
            return type(optimizer).__name__ if needs_closure(optimizer) else None
        return None


class _Found(NamedTuple):
    """Candidates, rejections, and the errors of layouts that do not fit."""

    candidates: list[Candidate]
    rejected: list[Rejection]
    unfit: list[DoesNotFit]


class LayoutCandidates:
    """The layouts of a job at a place of several devices, each with its forecasts."""

    def __init__(self, planner: Planner, place: Place) -> None:
        self.planner, self.place, self._divided = planner, place, planner.divided_job
        self._forecasts: dict[Layout, LayoutForecasts] = {}
        self._links: dict[tuple[int, int], Links] = {}
        self._estimates: dict[Layout, float] = {}
        self._lacking: dict[Layout, str | None] = {}
        self._hardware_each = functools.cache(functools.partial(_hardware_each, place))
        self._favourite: Plan | None = None

    @functools.cached_property
    def rules(self) -> LayoutRules:
        """The rules that layouts of the job must keep."""
        prepared = self.planner.prepared
        cluster = self.place.cluster
        most = max(cluster.node_devices, cluster.domain_devices)
        return LayoutRules(
            job=prepared.job,
            model=prepared.model,
            profile=self.profile,
            tensor_devices=most,
            contents=lambda: self._divided.contents,
        )

    @functools.cached_property
    def _is_long(self) -> bool:
        """Whether layouts that divide the tokens of samples are tried where others fit, too."""
        batch = min(self.profile.batch, self.profile.num_train)
        return self._tokens is not None and is_worthwhile(self._tokens, batch, self.place.count)

    @functools.cached_property
    def _tokens(self) -> int | None:
        """Tokens of a sample; None if samples have no such dimension."""
        tokens = num_tokens(self._divided.contents[0])
        return tokens if isinstance(tokens, int) else None

    @property
    def profile(self) -> Profile:
        """The job's facts, for such devices."""
        return self.planner.profile_at(self.place)

    def forecasts(self, layout: Layout) -> LayoutForecasts:
        """Forecasts of plans under a layout."""
        if layout not in self._forecasts:
            planner, place = self.planner, self.place
            self._forecasts[layout] = LayoutForecasts(
                self._divided.needs(layout),
                self.profile,
                self._hardware_each,
                planner.extents,
                self.links,
                calibrations=planner.calibrations(place),
                held_bytes=resident_bytes() if place.device.kind == "cpu" else 0,
                fetch_s=planner.fetch_s,
            )
        return self._forecasts[layout]

    def links(self, size: int, stride: int) -> Links:
        """Links within groups of processes: as measured here, or by the catalogue."""
        place, key = self.place, (size, stride)
        if key not in self._links:
            kept = None
            if place.is_here:
                kept = kept_links(place, size) or kept_links(place, place.count)
            if kept is not None:
                self._links[key] = kept
            elif place.is_shared:
                self._links[key] = unmeasured_links(size)
            else:
                self._links[key] = catalogue_links(place.entry, size, stride, place.cluster)
        return self._links[key]

    def ranked(self) -> tuple[tuple[Candidate, ...], tuple[Rejection, ...]]:
        """The best plan under each layout, fastest first, and why other layouts are rejected.

        Layouts of one axis come first. Products of two and three are planned if none of these fits, or over several
        machines, where shards within a few of them may send less: the most promising ones, by a bound on memory and an
        estimate of time that need no trace of the layout, until enough of them fit.

        Raises:
            BadJob: no layout is legal, or the model cannot be traced.
            DoesNotFit: none fits.
        """
        found = _Found([], [], [])
        products = self._consider_single(found)
        is_cuda, cluster = self.place.device.kind == "cuda", self.place.cluster
        machine = max(cluster.node_devices, cluster.domain_devices)
        is_cut = any(one.plan.layout.cuts_samples for one in found.candidates)
        if not found.candidates or (is_cuda and (self.place.count > cluster.domain_devices or is_cut)):
            most = len(found.candidates) + (_MOST_PRODUCTS if is_cuda else len(products))
            sharing = [one for one in found.candidates if one.plan.layout.sample_parts == self.place.count]
            favourite = without_layout(min(sharing, key=_seconds_per_sample).plan) if sharing else None
            promising = self._promising(products, found)
            if favourite is not None:  # first those with room for it: others save memory, which takes time and traces
                promising = [
                    layout
                    for layout in promising
                    if len(found.candidates) >= most or not self._add_like(favourite, layout, found)
                ]
            for layout in promising:
                if len(found.candidates) < most:
                    self._consider(layout, found)
        candidates, rejected, unfit = found.candidates, found.rejected, found.unfit
        if (problem := vars(self).get("_not_in_bf16")) is not None:
            plan = dataclasses.replace(self._least_on(self.place.device), layout=self._all_shards)
            rejected.insert(0, Rejection(device=self.place.name, plan=plan, reason=problem))
        if candidates:
            ordered = _in_order(candidates, is_over_machines=is_cuda and self.place.count > machine)
            return ordered, tuple(rejected[:_MOST_REJECTED])
        if unfit:
            raise DoesNotFit(f"on {self.place.name} under any layout: {unfit[0].message}", remedy=unfit[0].remedy)
        reasons = "; ".join(dict.fromkeys(f"{r.plan.layout.in_words()}: {r.reason}" for r in rejected[:4]))
        raise BadJob(f"{self.place.count} devices cannot share this job. {reasons}", remedy="Use one device.")

    def _consider_single(self, found: _Found) -> list[Layout]:
        """Consider the layouts of one axis; returns products.

        Those that divide the tokens of samples are left out where samples are short, unless no other fits.
        """
        products: list[Layout] = []

        def consider(layouts: Iterable[Layout]) -> None:
            for layout in layouts:
                if len(layout.divided) > 1:
                    products.append(layout)
                else:
                    self._consider(layout, found)

        known = [one for one in layouts_of(self.place.count) if one.experts == 1 or self._has_experts]
        left = [one for one in known if one.cuts_samples and not self._is_long]
        consider(one for one in known if one not in left)
        if not found.candidates and self._tokens is not None:
            consider(left)
        return products

    @functools.cached_property
    def _has_experts(self) -> bool:
        """Whether layouts of experts are tried, or reported as impossible; not for models without experts."""
        return any(
            name.rpartition(".")[2] == "experts" or isinstance(getattr(module, "num_experts", None), int)
            for name, module in self.planner.prepared.model.named_modules()
        )

    def _add_like(self, favourite: Plan, layout: Layout, found: _Found) -> bool:
        """Add `favourite` under another layout of the same parts of a batch, if it fits there for sure."""
        if layout.sample_parts < self.place.count:
            return False
        forecasts = self.forecasts(layout)
        if not layout.has_fp8:
            favourite = _without_fp8(favourite)
        if compile_problem(favourite, layout) is not None:
            favourite = dataclasses.replace(favourite, compile=False)
        if not forecasts.fits(favourite, SURE_ENOUGH):
            return False
        found.candidates.append(
            Candidate(
                device=self.place.name,
                plan=dataclasses.replace(favourite, layout=layout),
                forecast=forecasts.forecast(favourite),
                memory_bytes=self.place.memory_bytes_each,
                is_here=self.place.is_here,
                why="by forecast",
            )
        )
        return True

    def _promising(self, layouts: Sequence[Layout], found: _Found) -> list[Layout]:
        """Layouts that are legal and may fit, the fastest by estimate first; the others are added to the rejected."""
        if self.place.device.kind != "cuda":
            return list(layouts)
        fastest_s = min((self._estimate_s(one.plan.layout) for one in found.candidates), default=None)
        estimates: dict[Layout, float] = {}
        for layout in layouts:
            if self._is_as_fast_along_the_sequence(layout):
                continue
            illegal = self.rules.problem_with(layout)
            gains = illegal is None and self._may_gain(layout, fastest_s)
            lacking = self._lacks(layout) if gains else None
            problem = illegal or lacking
            if problem is None and gains:
                estimates[layout] = self._estimate_s(layout)
                continue
            problem = problem or "not faster by more than forecasts err than the fastest along one axis, by estimate"
            plan = Plan(device=self.place.device.torch_name, micro_batch=1, layout=layout)
            found.rejected.append(Rejection(device=self.place.name, plan=plan, reason=problem))
            if lacking is not None:
                found.unfit.append(DoesNotFit(lacking, remedy="Take more devices, or ones with more memory."))
        return sorted(estimates, key=lambda one: estimates[one])

    def _may_gain(self, layout: Layout, fastest_s: float | None) -> bool:
        """Whether a product is worth planning in full.

        `fastest_s` is the shortest estimate of a layout along one axis that fits [s]; None if none does.
        """
        if fastest_s is None or layout.data_size == layout.world_size:
            return True
        limit_s = (1 - _LEAST_GAIN_OF_DIVISION) * fastest_s
        # Messages, and all that needs them, are counted last.
        return self._arithmetic_s(layout) < limit_s and self._estimate_s(layout) < limit_s

    def _is_as_fast_along_the_sequence(self, layout: Layout) -> bool:
        """Whether a product of three axes is left out for the one that divides sequences too.

        That sends as much, and needs less memory.
        """
        if layout.tensor == 1 or layout.sequence or len(layout.divided) < 3:
            return False
        return self.rules.problem_with(dataclasses.replace(layout, sequence=True)) is None

    def _estimate_s(self, layout: Layout) -> float:
        """Time of an update by its arithmetic, turns that stages wait, and all messages, to compare layouts [s]."""
        if layout not in self._estimates:
            self._estimates[layout] = self._estimated_s(layout)
        return self._estimates[layout]

    def _estimated_s(self, layout: Layout) -> float:
        messages_s = self.forecasts(layout).messages_s(
            self._least_plan, self._least_trace, self._estimated_passes(layout)
        )
        return self._arithmetic_s(layout) + messages_s

    def _estimated_passes(self, layout: Layout) -> int:
        """Micro-batches of an update in estimates."""
        return min(local_profile(self.profile, layout).batch, _USUAL_PASSES * layout.stages)

    def _arithmetic_s(self, layout: Layout) -> float:
        """Time of an update by its arithmetic, with turns that stages wait [s]."""
        rates = self.place.hardware.dense_flops
        settings = self._least_trace.settings
        flops = (
            self._least_trace.flops / (settings.micro_batch * settings.parts) * self.profile.batch / layout.world_size
        )
        arithmetic_s = flops / (_REACHED * rates.get("bf16", rates.get("fp16", rates["fp32"])))
        return arithmetic_s * (1 + (layout.stages - 1) / layout.chunks / self._estimated_passes(layout))

    def _consider(self, layout: Layout, found: _Found) -> None:
        """Add the best plan under a layout, or why there is none."""
        problem = self.rules.problem_with(layout)
        if problem is None:
            try:
                problem = self._is_slow(layout, found)
                if problem is None:
                    found.candidates.append(self.best(layout))
                    self._add_interleaved(found.candidates[-1], found)
                    return
            except DoesNotFit as error:
                found.unfit.append(error)
                problem = error.message
        plan = Plan(device=self.place.device.torch_name, micro_batch=1, layout=layout)
        found.rejected.append(Rejection(device=self.place.name, plan=plan, reason=problem))

    def _add_interleaved(self, candidate: Candidate, found: _Found) -> None:
        """Add a plan in stages with several chunks in each process, where that fits and is faster than with fewer."""
        layout, fastest = candidate.plan.layout, candidate
        if layout.stages == 1 or self.place.device.kind != "cuda":
            return
        for chunks in _CHUNKS:
            plan = dataclasses.replace(candidate.plan, layout=dataclasses.replace(layout, chunks=chunks))
            if self.rules.problem_with(plan.layout) is not None:
                break
            forecasts = self.forecasts(plan.layout)
            own = without_layout(plan)
            if not forecasts.fits(own, SURE_ENOUGH):
                break
            forecast = forecasts.forecast(own)
            if forecast.step_s.value >= fastest.forecast.step_s.value:
                break
            fastest = dataclasses.replace(candidate, plan=plan, forecast=forecast)
            found.candidates.append(fastest)

    def _is_slow(self, layout: Layout, found: _Found) -> str | None:
        """Why a layout is not worth planning after those found, by estimate; None if it may be."""
        if not found.candidates or self.place.device.kind != "cuda" or self._lacks(layout) is not None:
            return None
        best = min(found.candidates, key=_seconds_per_sample)
        # The estimates leave out launches and other time that all layouts take, which the forecast has.
        longer_s = self._estimate_s(layout) - self._estimate_s(best.plan.layout)
        ratio = 1 + longer_s / best.forecast.step_s.value
        if ratio < _SLOW:
            return None
        return f"about {ratio:.1f} times the time of {best.plan.layout.in_words()}, by its idle turns and messages"

    def _lacks(self, layout: Layout) -> str | None:
        """Why a layout cannot fit by its state and the least activations; None if it may."""
        memory_bytes = self.place.memory_bytes_each
        if self.place.device.kind != "cuda" or not memory_bytes:
            return None
        if layout in self._lacking:
            return self._lacking[layout]
        self._lacking[layout] = None
        activations = self._least_activations / (layout.tensor * layout.stages * layout.context)
        least = self.forecasts(layout).least_bytes(self._least_plan, self._moments) + activations
        if least >= memory_bytes:
            self._lacking[layout] = (
                f"parameters, gradients, optimiser state, message buffers and the least activations take "
                f"{format_bytes(least)} of each device; {self.place.device.model} has {format_bytes(memory_bytes)}"
            )
        return self._lacking[layout]

    @functools.cached_property
    def _least_plan(self) -> Plan:
        """The plan that needs the least memory of one process: a sample at a time, all blocks checkpointed."""
        return self._least_on(dataclasses.replace(self.place.device, fast_dtypes=self._fast_dtypes(self._all_shards)))

    def _least_on(self, device: Device) -> Plan:
        fastest = next(execution_settings(self.profile, device))
        fewest = [one for one in execution_settings(self.profile, device) if one.precision == fastest.precision]
        plan = min(fewest, key=lambda one: stored_share(one.optimizer_states, one.precision))
        *_, saving = saving_memory(plan, self.profile)
        return saving

    @property
    def _all_shards(self) -> Layout:
        return Layout(shards=self.place.count)

    def _fast_dtypes(self, layout: Layout) -> tuple[str, ...]:
        """The device's dtypes in which the model can be computed under a layout."""
        dtypes = self.place.device.fast_dtypes
        is_left_out = layout.gathered_in("bf16") is not None and self._not_in_bf16 is not None
        return tuple(dtype for dtype in dtypes if dtype != "bf16") if is_left_out else dtypes

    @functools.cached_property
    def _not_in_bf16(self) -> str | None:
        """Why the model cannot be computed in bf16 throughout, as under shards; None if it can, or if bf16 is not fast.

        Autocast, as under replicas, may do with it.
        """
        plan, local = self._least_on(self.place.device), local_profile(self.profile, self._all_shards)
        if self._all_shards.gathered_in(plan.precision) is None:
            return None
        capability = self.place.hardware.compute_capability or ""
        plan = dataclasses.replace(plan, micro_batch=_smallest(local))
        try:
            self.planner.needs.trace(trace_settings(plan, local, capability, self._all_shards))
        except BadJob as problem:
            return problem.message
        return None

    @functools.cached_property
    def _least_trace(self) -> Trace:
        """The trace of the whole model under that plan, with full optimiser states; all layouts are judged by it."""
        layout, capability = self._all_shards, self.place.hardware.compute_capability or ""
        local = local_profile(self.profile, layout)
        with users_code("the model or the loss", self.planner.prepared.entry):
            settings = trace_settings(self._least_of(local), local, capability, layout)
            return self.planner.needs.trace(full_states(settings))

    def _least_of(self, local: Profile) -> Plan:
        """That plan with the smallest micro-batch that is legal for one process's part of the job."""
        return dataclasses.replace(self._least_plan, micro_batch=_smallest(local))

    @functools.cached_property
    def _moments(self) -> OptimizerFootprint:
        full = OptimizerFootprint.of(self._least_trace, self._divided.parts(Layout()))
        plan = self._least_plan
        return dataclasses.replace(full, like=full.like * stored_share(plan.optimizer_states, plan.precision))

    @functools.cached_property
    def _least_activations(self) -> float:
        """What an update of that trace needs besides state [bytes]; 0 where samples are coupled, which need more."""
        if self.profile.coupling.kind != "separable":
            return 0.0
        by_category = self.planner.needs.peak(self._least_trace.settings, self._least_trace.settings.parts).by_category
        return by_category.get("activation", 0.0) + by_category.get("temporary", 0.0)

    def best(self, layout: Layout) -> Candidate:
        """The plan under a layout that is forecast to be the fastest.

        Raises:
            DoesNotFit: none fits.
        """
        place, forecasts, local = self.place, self.forecasts(layout), local_profile(self.profile, layout)
        if (problem := self._lacks(layout)) is not None:
            raise DoesNotFit(problem, remedy="Take more devices, or ones with more memory.")
        device = dataclasses.replace(
            place.device,
            cores=place.cores_each,
            memory_bytes=place.memory_bytes_each,
            fast_dtypes=self._fast_dtypes(layout),
        )
        if (favourite := self._favourite) is not None:
            # Slower precisions lost under the first layout, and fp32 is what remains. Faster ones did not fit there.
            known = precisions(device, self.profile.numerics)
            kept = {*itertools.takewhile(lambda one: one != favourite.precision, known), favourite.precision, "fp32"}
            dtypes = tuple(dtype for dtype in device.fast_dtypes if dtype in kept)
            device = dataclasses.replace(device, fast_dtypes=dtypes)
            if favourite.optimizer_states == "full":  # of others there is one implementation
                local = dataclasses.replace(local, optimizer_implementations=(favourite.optimizer_implementation,))
        for axis in axes_of(layout):
            local = axis.searched(local, layout)
        if block_problem(self._divided.parts(layout), layout) is not None:
            local = dataclasses.replace(local, numerics=tuple(one for one in local.numerics if one != "8bit-states"))
        least = self._least_of(local)
        # Gathered in bf16 a model needs no more than in any other precision: these need not be traced.
        is_gathered = place.device.kind == "cuda" and layout.gathered_in(least.precision) is not None
        if is_gathered and not forecasts.fits(least, SURE_ENOUGH):
            needed, there = format_bytes(forecasts.needed_bytes(least)), format_bytes(device.memory_bytes)
            raise DoesNotFit(
                f"a micro-batch of {least.micro_batch} needs about {needed} of each device; {device.model} has {there}",
                remedy="Take more devices, or ones with more memory.",
            )
        with users_code("the model or the loss", self.planner.prepared.entry):
            ranked = rank(local, device, forecasts, name=place.name, is_here=place.is_here, is_limited=place.is_limited)
        best = min((c for c in ranked if not c.plan.captured), key=_seconds_per_sample)
        if self._may_compile(layout):
            faster = [best, *compiled(best, local, forecasts, lambda plan: compile_problem(plan, layout) is None)]
            if layout.has_fp8:
                faster += in_fp8(faster, local, place.device, forecasts)
            best = min(faster, key=lambda one: one.forecast.total_s.value)
        self._favourite = self._favourite or _without_fp8(best.plan)
        plan = dataclasses.replace(best.plan, layout=layout)
        return dataclasses.replace(
            best, plan=plan, is_here=place.is_here, memory_bytes=device.memory_bytes, why="by forecast"
        )

    def _may_compile(self, layout: Layout) -> bool:
        """Whether compiled plans of a layout are considered: on GPUs, by forecast."""
        place, job = self.place, self.planner.prepared.job
        if place.device.kind != "cuda" or not compiles(layout) or job.step is not None:
            return False
        return not place.is_here or self.planner.cannot_compile(place) is None

    def of_lockstep(self, chosen: Candidate) -> tuple[str, ...]:
        """A line on the cost of lockstep over these links, and what `Job(sync=…)` saves; none if it costs little."""
        layout = chosen.plan.layout
        if not layout.is_replicated or self.planner.prepared.job.sync is not None:
            return ()
        step_s = self.forecasts(layout).spread(without_layout(chosen.plan)).compute_s
        links, gradient_bytes = self.links(layout.world_size, 1), self._divided.parts(layout).trained_bytes
        recommendation = recommend(links, gradient_bytes=gradient_bytes, step_s=step_s)
        return (recommendation.in_words(),) if recommendation.is_needed else ()

    def of_context(self, chosen: Candidate, others: Sequence[Candidate]) -> tuple[str, ...]:
        """A line on why the tokens of samples are divided; none if they are not."""
        layout, tokens = chosen.plan.layout, self._tokens
        if not layout.cuts_samples or tokens is None:
            return ()
        batch = min(self.profile.batch, self.profile.num_train)
        uncut = [one for one in others if not one.plan.layout.cuts_samples]
        if batch < layout.world_size:
            why = f"a batch has {batch} samples for {layout.world_size} devices"
        elif uncut:
            fastest = min(uncut, key=_seconds_per_sample)
            ratio = _seconds_per_sample(fastest) / _seconds_per_sample(chosen)
            why = f"{fastest.plan.layout.in_words()} takes {ratio:.2f} times as long"
        else:
            why = "whole samples do not fit"
        each = f"each device has {tokens // layout.context:,} of a sample's {tokens:,}"
        return (f"tokens: {each}, since {why}; attention gathers keys and values of the others",)

    def given(self, plan: Plan) -> Candidate:
        """A plan that the user gave, with its forecast.

        Raises:
            BadJob: its layout has another number of processes, or is not legal for the job.
        """
        layout, place = plan.layout, self.place
        if layout.world_size != place.count:
            count, name = layout.world_size, "here" if place.is_here or place.entry is None else place.entry.name
            words = "one process" if count == 1 else f"{count} processes ({layout.in_words()})"
            raise BadJob(
                f"the plan is for {words}, but --on {place.name} means {place.count}",
                remedy=f"Use --on {name if count == 1 else f'{count}x{name}'}, or another plan.",
            )
        problem = self.rules.problem_with(layout)
        if problem is None and plan.optimizer_states == "8bit":
            problem = block_problem(self._divided.parts(layout), layout)
        if problem is None and plan.compile:
            problem = compile_problem(plan, layout)
        if problem is not None:
            raise BadJob(f"{layout.in_words()}: {problem}")
        forecast = self.forecasts(layout).forecast(without_layout(plan))
        return Candidate(
            device=place.name,
            plan=plan,
            forecast=forecast,
            memory_bytes=place.memory_bytes_each,
            is_here=place.is_here,
            why="as asked",
        )


def _without_fp8(plan: Plan) -> Plan:
    """The plan whose precision goes with all layouts."""
    return dataclasses.replace(plan, precision="bf16") if plan.precision == "fp8" else plan


def _smallest(local: Profile) -> int:
    """The smallest micro-batch that is legal for one process's part of a job [samples]."""
    return min(local.coupling.legal_micro_batches(local.batch), default=local.batch)


def kept_links(place: Place, world_size: int) -> Links | None:
    """Links that `stoker doctor --on Nx…` measured here for so many processes; None if it did not."""
    build = installed_torch()
    if build is None:
        return None
    return links_cache(cache_root()).read(cache_key(place.device, build.version), f"{world_size} processes")


def _hardware_each(place: Place, threads: int | None) -> Hardware:
    """The device of one process; of a CPU that is here its share of the cores."""
    hardware = measured_hardware(place, threads or place.cores_each if place.device.kind == "cpu" else threads)
    device = dataclasses.replace(hardware.device, memory_bytes=place.memory_bytes_each)
    return dataclasses.replace(hardware, device=device)


def _in_order(candidates: list[Candidate], *, is_over_machines: bool = False) -> tuple[Candidate, ...]:
    """Fastest first; but a simpler layout stays first unless another is faster by more than the noise of a trial.

    One that divides the tokens of samples has to gain more over one that does not: its forecasts were never compared.
    So has, over several machines, one that divides the model over one that shares the batch alone.
    Over several machines also unless another is no slower and surer: it depends less on a network that is hardly known,
    as shards within machines do.
    """
    best = candidates[0]
    for candidate in candidates[1:]:
        is_first_cut = candidate.plan.layout.cuts_samples and not best.plan.layout.cuts_samples
        least_gain = _LEAST_GAIN_OF_CUT if is_first_cut else LEAST_GAIN
        is_first_division = is_over_machines and _divides_model(candidate) and not _divides_model(best)
        least_gain = _LEAST_GAIN_OF_DIVISION if is_first_division else least_gain
        is_faster = _seconds_per_sample(candidate) < (1 - least_gain) * _seconds_per_sample(best)
        is_surer = (
            not (is_first_cut or is_first_division)
            and _seconds_per_sample(candidate) <= _seconds_per_sample(best)
            and candidate.forecast.samples_per_s.low > best.forecast.samples_per_s.low
        )
        if is_faster or (is_over_machines and is_surer):
            best = candidate
    return (best, *sorted((c for c in candidates if c is not best), key=_seconds_per_sample))


def _divides_model(candidate: Candidate) -> bool:
    return candidate.plan.layout.data_size < candidate.plan.layout.world_size


def _seconds_per_sample(candidate: Candidate) -> float:
    return candidate.forecast.seconds_per_sample


def without_layout(plan: Plan) -> Plan:
    """The plan of one process, as `LayoutForecasts` takes it."""
    return dataclasses.replace(plan, layout=Layout())


def links_between(on: str, *, fresh: bool = False) -> tuple[Links, ...]:
    """The links of places such as `2xhere`, a CPU's processes or a machine's GPUs, as measured now or before.

    Links measured while other processes use the CPU are returned, but not kept.

    Args:
        on: places of several devices that are here; those of one device have no links.
        fresh: measure again what was measured before.

    Raises:
        NoDevice: a word is unknown, or names a device elsewhere.
        RunFailed: measuring fails.
    """
    places = [place for place in planned_devices(on, attached_devices()) if place.count > 1]
    for place in places:
        if not place.is_here:
            raise NoDevice(
                f"{place.name} is not here: its links cannot be measured.",
                remedy="Use --on 2xhere, or run the same command where they are.",
            )
    measured = []
    for place in places:
        links = None if fresh else kept_links(place, place.count)
        if links is None:
            before, is_cpu = sample_cpu(), place.device.kind == "cpu"
            links = measure_links(place.device, place.count, threads=place.cores_each if is_cpu else 1)
            after = sample_cpu()  # the processes that measured count as this one's own
            if before is None or after is None or load_between(before, after).is_quiet:
                key = cache_key(place.device, torch.__version__)
                links_cache(cache_root()).write(links, key, f"{links.world_size} processes")
        measured.append(links)
    return tuple(measured)
