"""A job on several devices: its layouts beside each other, what they cost, and why the best is the best.

The layouts of a job over several devices: which are legal, and the best plan under each, by forecast.

What processes here reach between them: measured once, and kept for plans.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator

import torch
from torch.optim import Optimizer as TorchOptimizer

from stoker.devices import (
    PUE_DATA_CENTRE,
    PUE_HERE,
    Place,
    attached_devices,
    cache_key,
    cheapest,
    grid_of,
    installed_torch,
    load_between,
    planned_devices,
    sample_cpu,
)
from stoker.devices.interconnects import catalogue_links, unmeasured_links
from stoker.devices.malloc import resident_bytes
from stoker.errors import BadJob, DoesNotFit, NoDevice
from stoker.jobs import Optimizer
from stoker.jobs.optimizers import ScheduleFree
from stoker.planning.explanation import describe_messages, explain, why_slower
from stoker.planning.model.layout_forecast import LayoutForecasts, local_profile
from stoker.planning.model.objectives import co2_kg, cost_assumptions, cost_usd
from stoker.planning.model.run_forecast import complete_breakdown
from stoker.planning.model.search_space import LayoutRules, layouts_of
from stoker.planning.plan_ranking import LEAST_GAIN, rank
from stoker.planning.planner import Planner, calibrations_of, measured_hardware
from stoker.planning.resolved_job import users_code
from stoker.planning.slow_links import recommend
from stoker.profiling.job_profile import model_parts
from stoker.profiling.links import measure_links
from stoker.records import Candidate, Decision, Device, Hardware, Layout, Plan, Price, Profile, Rejection
from stoker.records.hardware import Links
from stoker.records.profile import ModelParts
from stoker.stepping.batch_norm import batch_norms
from stoker.stepping.layouts import stages
from stoker.stepping.layouts.compatibility import layout_problem
from stoker.stepping.layouts.tensor_plans import divided_dimensions, tensor_plan_problem
from stoker.stepping.torch_optimizers import build_optimizer, needs_closure
from stoker.store import cache_root
from stoker.store.record_caches import links_cache


def on_many(planner: Planner, place: Place, only: Plan | None = None) -> Decision:
    """The layouts of a job at a place of several devices, the best first; with `only`, that plan.

    Raises:
        BadJob: the job cannot be spread, or `only` does not go with it.
        DoesNotFit: it fits under no layout.
    """
    started, layouts = time.perf_counter(), LayoutCandidates(planner, place)
    ranked, rejected = layouts.ranked() if only is None else ((layouts.given(only),), ())
    candidates = tuple(_priced(layouts, one) for one in ranked)
    chosen, *others = candidates
    forecasts, own = layouts.forecasts(chosen.plan.layout), without_layout(chosen.plan)
    told = [dataclasses.replace(one, why=_time_ratio(one, chosen)) for one in others]
    lost = tuple(
        Rejection(device=one.device, plan=one.plan, reason=why_slower(
            layouts.forecasts(one.plan.layout).spread(without_layout(one.plan)), one.forecast, chosen.forecast
        ))
        for one in others
    )  # fmt: skip
    device = dataclasses.replace(place.device, memory_bytes=place.memory_bytes_each)
    lines = explain(chosen, layouts.profile, device, (), ())
    spread = forecasts.spread(own)
    messages = describe_messages(spread, [layouts.links(place.count, 1)])
    return Decision(
        device=place.name,
        candidates=(dataclasses.replace(chosen, why="the fastest layout" if others else chosen.why), *told),
        rejected=(*lost, *rejected),
        explanation=(*planner.prepared.notes, *lines, *messages, *layouts.of_lockstep(chosen), cost_assumptions(
            chosen.price, pue=PUE_HERE if place.is_here else PUE_DATA_CENTRE, grid=grid_of()
        )),
        took_s=time.perf_counter() - started,
        breakdown=complete_breakdown(forecasts.breakdown(own), chosen.forecast, is_cpu=place.device.kind == "cpu"),
    )  # fmt: skip


def _time_ratio(one: Candidate, chosen: Candidate) -> str:
    return f"{one.forecast.seconds_per_sample / chosen.forecast.seconds_per_sample:.2f}x the time"


def _priced(layouts: LayoutCandidates, candidate: Candidate) -> Candidate:
    """The candidate with what all devices together cost, draw and emit."""
    place, forecast = layouts.place, candidate.forecast
    each = None if place.is_here or place.entry is None else cheapest(place.entry.name)
    price: Price | None = None
    if each is not None:
        price = dataclasses.replace(each, usd_per_hour=each.usd_per_hour * place.count)
    pue = PUE_HERE if place.is_here else PUE_DATA_CENTRE
    energy = layouts.forecasts(candidate.plan.layout).energy_kwh(without_layout(candidate.plan), forecast, pue=pue)
    if energy is not None and not place.is_shared:
        energy = energy.scaled(place.count)
    return dataclasses.replace(
        candidate,
        price=price,
        forecast=dataclasses.replace(
            forecast, energy_kwh=energy, co2_kg=None if energy is None else co2_kg(energy, grid_of()),
            cost_usd=None if price is None else cost_usd(forecast.total_s, price),
        ),
    )  # fmt: skip


_MOST_TOLD = 24


class LayoutCandidates:
    """The layouts of a job at a place of several devices, each with its forecasts."""

    def __init__(self, planner: Planner, place: Place) -> None:
        self.planner, self.place = planner, place
        self._forecasts: dict[Layout, LayoutForecasts] = {}
        self._links: dict[tuple[int, int], Links] = {}
        self._favourite: Plan | None = None

    @functools.cached_property
    def terms(self) -> LayoutRules:
        """What the job demands of layouts."""
        return LayoutRules(
            profile=self.profile, alone=_why_not_divisible(self.planner),
            whole_copies="sites that come together after an interval (sync=…) hold whole models"
            if self._is_apart else None,
            objection=functools.partial(_objection, self.planner),
        )  # fmt: skip

    @property
    def _is_apart(self) -> bool:
        return self.planner.prepared.job.sync is not None

    @property
    def profile(self) -> Profile:
        """The job's facts, for such devices."""
        return self.planner.profile(self.place.device.kind)

    @functools.cache  # noqa: B019 - lives as long as one planning
    def parts(self, layout: Layout) -> ModelParts:
        """The model's parameters and blocks, as a layout divides them."""
        model = self.planner.prepared.model
        found = model_parts(model, divided_dimensions(model, layout.tensor) if layout.tensor > 1 else None)
        if layout.stages == 1:
            return found
        return found.in_blocks(stages.cut_into_stages(model, layout.stages).blocks)

    def _cuts(self, layout: Layout) -> tuple[int, ...] | None:
        """First blocks of all stages but the first, as the model is cut when it runs."""
        if layout.stages == 1:
            return None
        return tuple(
            span.start for span in stages.cut_into_stages(self.planner.prepared.model, layout.stages).spans[1:]
        )

    def forecasts(self, layout: Layout) -> LayoutForecasts:
        """Forecasts of plans under a layout."""
        if layout not in self._forecasts:
            planner, place = self.planner, self.place
            self._forecasts[layout] = LayoutForecasts(
                layout, self.profile, self.parts(layout), functools.partial(_hardware_each, place),
                planner.needs.trace, planner.extents, self.links,
                calibrations=[c for c in calibrations_of(place) if c.basis != "measured here"],
                held_bytes=resident_bytes() if place.device.kind == "cpu" else 0, fetch_s=planner.fetch_s,
                is_apart=self._is_apart, cuts=self._cuts(layout),
            )  # fmt: skip
        return self._forecasts[layout]

    def links(self, size: int, stride: int) -> Links:
        """What groups of processes reach: as measured here, or by the catalogue."""
        if (size, stride) not in self._links:
            self._links[size, stride] = self._found(size, stride)
        return self._links[size, stride]

    def _found(self, size: int, stride: int) -> Links:
        place = self.place
        if not place.is_here:
            return catalogue_links(place.entry, size, stride)
        for measured in {size: None, place.count: None}:
            if (known := kept_links(place, measured)) is not None:
                return known
        return unmeasured_links(size) if place.device.kind == "cpu" else catalogue_links(place.entry, size, stride)

    def ranked(self) -> tuple[tuple[Candidate, ...], tuple[Rejection, ...]]:
        """The best plan under each layout, the fastest first, and what other layouts lack.

        Products of two axes are looked at where no single one fits.

        Raises:
            BadJob: no layout is legal, or the model cannot be traced.
            DoesNotFit: none fits.
        """
        found: list[Candidate] = []
        rejected: list[Rejection] = []
        unfit: list[DoesNotFit] = []
        for layout in layouts_of(self.place.count):
            if _num_axes(layout) > 1 and found:
                break
            if (problem := self.terms.problem_with(layout)) is not None:
                rejected.append(self._rejected(layout, problem))
                continue
            try:
                found.append(self.best(layout))
            except DoesNotFit as problem_of_size:
                unfit.append(problem_of_size)
                rejected.append(self._rejected(layout, problem_of_size.message))
        if not found:
            raise self._nothing(rejected, unfit)
        return _in_order(found), tuple(rejected[:_MOST_TOLD])

    def best(self, layout: Layout) -> Candidate:
        """The plan under a layout that is forecast to be the fastest.

        Raises:
            DoesNotFit: none fits.
        """
        place, forecasts = self.place, self.forecasts(layout)
        local, device = self._narrowed(local_profile(self.profile, layout))
        if layout.stages > 1:  # fewer micro-batches than stages leave some of them idle all the time
            local = dataclasses.replace(local, batch=max(1, local.batch // layout.stages))
        if layout.tensor > 1:  # logits are divided already
            local = dataclasses.replace(local, loss_chunks=1)
        with users_code("the model or the loss", self.planner.prepared.entry):
            ranked = rank(local, device, forecasts, name=place.name, is_here=place.is_here,
                                   is_limited=place.is_limited)  # fmt: skip
        best = min((one for one in ranked if not one.plan.captured), key=lambda one: one.forecast.seconds_per_sample)
        self._favourite = self._favourite or best.plan
        plan = dataclasses.replace(best.plan, layout=layout)
        return dataclasses.replace(
            best, plan=plan, is_here=place.is_here, memory_bytes=device.memory_bytes, why="by forecast"
        )  # fmt: skip

    def _narrowed(self, local: Profile) -> tuple[Profile, Device]:
        """What one process is planned for: ways to compute that lost under the first layout are not looked at again."""
        place, favourite = self.place, self._favourite
        device = dataclasses.replace(place.device, cores=place.cores_each, memory_bytes=place.memory_bytes_each)
        if favourite is None:
            return local, device
        known = tuple(dtype for dtype in device.fast_dtypes if dtype in (favourite.precision, "fp32"))
        implementations: tuple[str, ...] = (favourite.optimizer_implementation,)
        return (
            dataclasses.replace(local, optimizer_implementations=implementations),
            dataclasses.replace(device, fast_dtypes=known),
        )

    def of_lockstep(self, chosen: Candidate) -> tuple[str, ...]:
        """What lockstep over these links costs, and what training apart would save; nothing where it costs little."""
        layout = chosen.plan.layout
        if not layout.is_replicated or self._is_apart:
            return ()
        step_s = self.forecasts(layout).spread(without_layout(chosen.plan)).compute_s
        links, gradient_bytes = self.links(layout.world_size, 1), self.parts(layout).trained_bytes
        found = recommend(links, gradient_bytes=gradient_bytes, step_s=step_s)
        return (found.in_words(),) if found.is_needed else ()

    def given(self, plan: Plan) -> Candidate:
        """A plan that was asked for, with its forecast.

        Raises:
            BadJob: its layout is not of so many processes, or does not go with the job.
        """
        layout, place = plan.layout, self.place
        if layout.world_size != place.count:
            count = layout.world_size
            words = "one process" if count == 1 else f"{count} processes ({layout.in_words()})"
            raise BadJob(f"the plan is for {words}, but --on {place.name} means {place.count}",
                         remedy=f"Use --on {'here' if count == 1 else f'{count}xhere'}, or another plan.")  # fmt: skip
        if (problem := self.terms.problem_with(layout)) is not None:
            raise BadJob(f"{layout.in_words()}: {problem}")
        forecast = self.forecasts(layout).forecast(dataclasses.replace(plan, layout=Layout()))
        return Candidate(device=place.name, plan=plan, forecast=forecast, memory_bytes=place.memory_bytes_each,
                         is_here=place.is_here, why="as asked")  # fmt: skip

    def _rejected(self, layout: Layout, reason: str) -> Rejection:
        plan = Plan(device=self.place.device.torch_name, micro_batch=1, layout=layout)
        return Rejection(device=self.place.name, plan=plan, reason=reason)

    def _nothing(self, rejected: list[Rejection], unfit: list[DoesNotFit]) -> BadJob | DoesNotFit:
        """The error where no layout is left."""
        if unfit:
            return DoesNotFit(f"on {self.place.name} under any layout: {unfit[0].message}", remedy=unfit[0].remedy)
        reasons = "; ".join(dict.fromkeys(f"{one.plan.layout.in_words()}: {one.reason}" for one in rejected[:4]))
        return BadJob(f"{self.place.count} devices cannot share this job. {reasons}", remedy="Use one device.")


def kept_links(place: Place, world_size: int) -> Links | None:
    """What `stoker doctor --on Nx…` measured here for so many processes; None where it did not."""
    build = installed_torch()
    if build is None:
        return None
    return links_cache(cache_root()).read(cache_key(place.device, build.version), f"{world_size} processes")


def _hardware_each(place: Place, threads: int | None) -> Hardware:
    """The device of one process; of a CPU that is here its share of the cores."""
    found = measured_hardware(place, threads or place.cores_each if place.device.kind == "cpu" else threads)
    device = dataclasses.replace(found.device, memory_bytes=place.memory_bytes_each)
    return dataclasses.replace(found, device=device)


def _in_order(found: list[Candidate]) -> tuple[Candidate, ...]:
    """The fastest first; a simpler layout goes before one that is faster by no more than the noise of a trial."""
    best = found[0]
    for one in found[1:]:
        if one.forecast.seconds_per_sample < (1 - LEAST_GAIN) * best.forecast.seconds_per_sample:
            best = one
    return (best, *sorted((one for one in found if one is not best), key=lambda one: one.forecast.seconds_per_sample))


def without_layout(plan: Plan) -> Plan:
    """A plan as forecasts of one layout know it."""
    return dataclasses.replace(plan, layout=Layout())


def _num_axes(layout: Layout) -> int:
    return sum(size > 1 for size in (layout.replicas, layout.shards, layout.tensor, layout.stages))


def _why_not_divisible(planner: Planner) -> str | None:
    """Why no part of the job's updates can be done by several processes."""
    job = planner.prepared.job
    if job.step is not None:
        return "the job's own step makes a whole update by itself"
    for optimizer in _optimizers(planner):
        if needs_closure(optimizer):
            return f"{type(optimizer).__name__} computes the loss anew within its step"
    return None


def _optimizers(planner: Planner) -> Iterator[TorchOptimizer]:
    """The job's optimiser on the outline of its model; none where it cannot be made there."""
    prepared = planner.prepared
    with contextlib.suppress(Exception):  # what is wrong with it, if anything is, the real one says
        yield build_optimizer(prepared.job, prepared.model, Plan(device="cpu", micro_batch=1))


def _objection(planner: Planner, layout: Layout) -> str | None:
    """Why the model cannot be in parts as a layout says."""
    job, model = planner.prepared.job, planner.prepared.model
    if isinstance(job.optimizer, Optimizer) and not job.optimizer.is_elementwise and layout.shards > 1:
        return f"{type(job.optimizer).__name__} needs whole matrices, and shards hold parts of them"
    needs_statistics = job.swa is not None or isinstance(job.optimizer, ScheduleFree)
    if needs_statistics and not layout.is_replicated and batch_norms(model):
        return "the averaged weights need running statistics of their own, which takes whole models"
    problem = layout_problem(job, layout) or tensor_plan_problem(model, layout) or stages.stage_problem(model, layout)
    samples = job.batch // layout.data_size
    if problem is None and samples < layout.stages:
        return f"{layout.stages} stages need as many micro-batches, and have {samples} samples for them"
    return problem


def links_between(on: str, *, fresh: bool = False) -> tuple[Links, ...]:
    """The links of places such as `2xhere`, a CPU's processes or a machine's GPUs, as measured now or before.

    What was measured while others used the CPU is told, and not kept.

    Args:
        on: places of several devices that are here; those of one have no links.
        fresh: measure even what is kept.

    Raises:
        NoDevice: a word is unknown, or means what is not here.
        RunFailed: measuring fails.
    """
    return tuple(_links_of(place, fresh=fresh) for place in _places(on))


def _places(on: str) -> list[Place]:
    places = [place for place in planned_devices(on, attached_devices()) if place.count > 1]
    for place in places:
        if not place.is_here:
            raise NoDevice(f"{place.name} is not here: its links cannot be measured.",
                           remedy="Use --on 2xhere, or run the same command where they are.")  # fmt: skip
    return places


def _links_of(place: Place, *, fresh: bool) -> Links:
    known = None if fresh else kept_links(place, place.count)
    if known is not None:
        return known
    before = sample_cpu()
    found = measure_links(place.device, place.count, threads=place.cores_each if place.device.kind == "cpu" else 1)
    after = sample_cpu()
    # Processes that were waited for are this one's own.
    if before is None or after is None or load_between(before, after).is_quiet:
        key = cache_key(place.device, torch.__version__)
        links_cache(cache_root()).write(found, key, f"{found.world_size} processes")
    return found
