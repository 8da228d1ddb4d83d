"""A job on several devices: its layouts compared by forecast, and the plan to run on what is here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator

from stoker import planning
from stoker.devices import PUE_DATA_CENTRE, PUE_HERE, Place, cache_key, cheapest, grid_of, installed_torch
from stoker.devices.links import catalogue_links, unmeasured_links
from stoker.devices.malloc import resident_bytes
from stoker.errors import BadJob, DoesNotFit
from stoker.flow.planner import Planner, calibrations_of, measured_hardware
from stoker.flow.preparation import users_code
from stoker.jobs import Muon
from stoker.planning.layouts import Terms, layouts_of
from stoker.planning.spread_forecast import SpreadForecasts, local_profile
from stoker.planning.spread_words import why_slower, words_on_messages
from stoker.profiling.model_parts import model_parts
from stoker.records import Candidate, Decision, Hardware, Layout, Plan, Price, Profile, Rejection
from stoker.records.links import Links
from stoker.records.model_parts import ModelParts
from stoker.stepping.layouts.tensor_plans import divided_dimensions, problem_with
from stoker.stepping.optimizers import build_optimizer, needs_closure
from stoker.store import cache_root
from stoker.store.links import LinksCache

_MOST_TOLD = 24


class Layouts:
    """The layouts of a job at a place of several devices, each with its forecasts."""

    def __init__(self, planner: Planner, place: Place) -> None:
        self.planner, self.place = planner, place
        self._forecasts: dict[Layout, SpreadForecasts] = {}
        self._links: dict[tuple[int, int], Links] = {}

    @functools.cached_property
    def terms(self) -> Terms:
        """What the job demands of layouts."""
        model = self.planner.prepared.model
        return Terms(
            profile=self.profile, parts=self.parts(1), alone=_why_alone(self.planner),
            tensor_problem=lambda layout: _why_undivided(self.planner) or problem_with(model, layout),
            stages_problem=lambda layout: _why_in_one_piece(self.planner, layout),
        )  # fmt: skip

    @property
    def profile(self) -> Profile:
        """The job's facts, for such devices."""
        return self.planner.profile(self.place.device.kind)

    @functools.cache  # noqa: B019 - lives as long as one planning
    def parts(self, tensor: int) -> ModelParts:
        """The model's parameters, as so many tensor processes divide them."""
        model = self.planner.prepared.model
        return model_parts(model, divided_dimensions(model, tensor) if tensor > 1 else None)

    def forecasts(self, layout: Layout) -> SpreadForecasts:
        """Forecasts of plans under a layout."""
        if layout not in self._forecasts:
            planner, place = self.planner, self.place
            self._forecasts[layout] = SpreadForecasts(
                layout, self.profile, self.parts(layout.tensor), functools.partial(_hardware_each, place),
                planner.needs.trace, planner.extents, self.links,
                calibrations=[c for c in calibrations_of(place) if c.basis != "measured here"],
                held_bytes=resident_bytes() if place.device.kind == "cpu" else 0, fetch_s=planner.fetch_s,
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
        return tuple(sorted(found, key=lambda one: one.forecast.total_s.value)), tuple(rejected[:_MOST_TOLD])

    def best(self, layout: Layout) -> Candidate:
        """The plan under a layout that is forecast to be the fastest.

        Raises:
            DoesNotFit: none fits.
        """
        place, forecasts = self.place, self.forecasts(layout)
        local = local_profile(self.profile, layout)
        if layout.stages > 1:  # fewer micro-batches than stages leave some of them idle all the time
            local = dataclasses.replace(local, batch=max(1, local.batch // layout.stages))
        device = dataclasses.replace(
            place.device, cores=place.cores_each, memory_bytes=place.memory_bytes_each
        )  # fmt: skip
        with users_code("the model or the loss", self.planner.prepared.entry):
            ranked = planning.rank(local, device, forecasts, name=place.name, is_here=False, can_compile=False)
        best = min(ranked, key=lambda one: one.forecast.total_s.value)
        plan = dataclasses.replace(best.plan, layout=layout)
        return dataclasses.replace(
            best, plan=plan, is_here=place.is_here, memory_bytes=device.memory_bytes, why="by forecast"
        )  # fmt: skip

    def given(self, plan: Plan) -> Candidate:
        """A plan that was asked for, with its forecast.

        Raises:
            BadJob: its layout is not of so many processes, or does not go with the job.
        """
        layout, place = plan.layout, self.place
        if layout.world_size != place.count:
            words = f"{layout.world_size} processes ({layout.in_words() or 'alone'})"
            raise BadJob(f"the plan is for {words}, but --on {place.name} has {place.count}",
                         remedy=f"Use --on {layout.world_size}xhere, or another plan.")  # fmt: skip
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


def on_many(planner: Planner, place: Place, only: Plan | None = None) -> Decision:
    """The layouts of a job at a place of several devices, the best first; with `only`, that plan.

    Raises:
        BadJob: the job cannot be spread, or `only` does not go with it.
        DoesNotFit: it fits under no layout.
    """
    started, layouts = time.perf_counter(), Layouts(planner, place)
    ranked, rejected = layouts.ranked() if only is None else ((layouts.given(only),), ())
    candidates = tuple(_priced(layouts, one) for one in ranked)
    chosen, *others = candidates
    forecasts, plain = layouts.forecasts(chosen.plan.layout), _plain(chosen.plan)
    told = [dataclasses.replace(one, why=_times(one, chosen)) for one in others]
    lost = tuple(
        Rejection(device=one.device, plan=one.plan, reason=why_slower(
            layouts.forecasts(one.plan.layout).spread(_plain(one.plan)), one.forecast, chosen.forecast
        ))
        for one in others
    )  # fmt: skip
    device = dataclasses.replace(place.device, memory_bytes=place.memory_bytes_each)
    lines = planning.explain(chosen, layouts.profile, device, (), ())
    spread = forecasts.spread(plain)
    messages = words_on_messages(spread, [layouts.links(place.count, 1)])
    return Decision(
        device=place.name,
        candidates=(dataclasses.replace(chosen, why="the fastest layout" if others else chosen.why), *told),
        rejected=(*lost, *rejected),
        explanation=(*planner.prepared.notes, *lines, *messages, planning.assumptions(
            chosen.price, pue=PUE_HERE if place.is_here else PUE_DATA_CENTRE, grid=grid_of()
        )),
        took_s=time.perf_counter() - started,
        breakdown=forecasts.breakdown(plain),
    )  # fmt: skip


def kept_links(place: Place, world_size: int) -> Links | None:
    """What `stoker doctor --on Nx…` measured here for so many processes; None where it did not."""
    build = installed_torch()
    if build is None:
        return None
    return LinksCache(cache_root() / "links").read(cache_key(place.device, build.version), world_size)


def _hardware_each(place: Place, threads: int | None) -> Hardware:
    """The device of one process; of a CPU that is here its share of the cores."""
    found = measured_hardware(place, threads or place.cores_each if place.device.kind == "cpu" else threads)
    device = dataclasses.replace(found.device, memory_bytes=place.memory_bytes_each)
    return dataclasses.replace(found, device=device)


def _plain(plan: Plan) -> Plan:
    """A plan as forecasts of one layout know it."""
    return dataclasses.replace(plan, layout=Layout())


def _num_axes(layout: Layout) -> int:
    return sum(size > 1 for size in (layout.replicas, layout.shards, layout.tensor, layout.stages))


def _times(one: Candidate, chosen: Candidate) -> str:
    return f"{one.forecast.total_s.value / chosen.forecast.total_s.value:.2f}x the time"


def _priced(layouts: Layouts, candidate: Candidate) -> Candidate:
    """The candidate with what all devices together cost, draw and emit."""
    place, forecast = layouts.place, candidate.forecast
    each = None if place.is_here or place.entry is None else cheapest(place.entry.name)
    price: Price | None = None
    if each is not None:
        price = dataclasses.replace(each, usd_per_hour=each.usd_per_hour * place.count)
    pue = PUE_HERE if place.is_here else PUE_DATA_CENTRE
    energy = layouts.forecasts(candidate.plan.layout).energy_kwh(_plain(candidate.plan), forecast, pue=pue)
    if energy is not None:
        energy = energy.scaled(place.count)
    return dataclasses.replace(
        candidate,
        price=price,
        forecast=dataclasses.replace(
            forecast, energy_kwh=energy, co2_kg=None if energy is None else planning.co2_kg(energy, grid_of()),
            cost_usd=None if price is None else planning.cost_usd(forecast.total_s, price),
        ),
    )  # fmt: skip


def _why_alone(planner: Planner) -> str | None:
    """Why no part of the job's updates can be done by several processes."""
    job = planner.prepared.job
    if job.step is not None:
        return "the job's own step makes a whole update by itself"
    for optimizer in _optimizers(planner):
        if needs_closure(optimizer):
            return f"{type(optimizer).__name__} computes the loss anew within its step"
    return None


def _optimizers(planner: Planner) -> Iterator[object]:
    """The job's optimiser on the outline of its model; none where it cannot be made there."""
    prepared = planner.prepared
    with contextlib.suppress(Exception):  # what is wrong with it, if anything is, the real one says
        yield build_optimizer(prepared.job, prepared.model, Plan(device="cpu", micro_batch=1))


def _why_undivided(planner: Planner) -> str | None:
    """Why matrices must stay whole."""
    if isinstance(planner.prepared.job.optimizer, Muon):
        return "Muon orthogonalises whole matrices"
    return None


def _why_in_one_piece(planner: Planner, layout: Layout) -> str | None:
    """Why the model cannot be cut into stages."""
    micro_batches = planner.profile("cpu").batch // layout.data_size
    if micro_batches < layout.stages:
        return (
            f"{layout.stages} stages need as many micro-batches in a batch, which has {micro_batches} samples for them"
        )
    return None
