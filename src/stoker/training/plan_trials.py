"""Trials of plans on a run's own updates: they are training, and nothing is thrown away.

What: a run begins under a safe plan. After its fourth update candidates take turns at its next updates
(`planning.live_search`), until no turn can pay; the run goes on under the fastest. Each switch is on the disk before
its first update. A precision below fp32 is first compared by the gradients of the run's own batches, which are not
used. Smaller micro-batches wait for the coupling probe, which is made between updates once it costs little of what is
left. A candidate that raises or runs out of memory is left out, and its update is made again under the best plan; one
that hangs, or under which two processes ended without a word, is left out when the run resumes.
Use when: a run begins at once (`planning.safe_start`). Costs: turns of slower plans; two gradients for each of three
batches where a reduced precision is possible. Does not combine with: what `safe_start.plan_first_because` lists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from stoker import records
from stoker.activity import doing
from stoker.devices import Place, sample_cpu
from stoker.devices.hardware import mtbf_h
from stoker.devices.malloc import heap_kept_small, renew_heap, resident_bytes
from stoker.errors import RunFailed, StokerError, first_line
from stoker.loading.batches import Batch
from stoker.planning.explanation import explain
from stoker.planning.live_search import UNTIMED, LiveSearch, Timed, Turn
from stoker.planning.model.run_forecast import Extents, forecast_from_trial, taken_bytes
from stoker.planning.model.search_space import MemoryFormat, precisions
from stoker.planning.model.shared_cpu import describe_load, widen_for_load
from stoker.planning.plan_history import keep_decision, used_by_others
from stoker.planning.resolved_job import ResolvedJob
from stoker.profiling.job_profile import has_convolutions, job_profile
from stoker.profiling.plan_trial import PeakMemory, evaluation_time
from stoker.records import (
    FULL_PRECISIONS,
    LARGEST_GRADIENT_ERROR,
    Candidate,
    Measurement,
    Plan,
    PlanSwitch,
    Position,
    Precision,
    Rejection,
)
from stoker.records.plan_schedule import saving_as_often
from stoker.stepping.coupling import find_coupling, unprobed
from stoker.stepping.gradient_distance import gradient_distance
from stoker.stepping.model import bytes_of
from stoker.stepping.python_state import python_state, undo_changes
from stoker.stepping.step import Step
from stoker.stepping.step_failures import NotFinite, ran_out_of_memory
from stoker.stepping.torch_compile import compiler_missing
from stoker.stepping.torch_optimizers import needs_closure
from stoker.stepping.uncompiled import uncompiled
from stoker.training.plan_in_force import PlanInForce, Replanned, saving_every
from stoker.training.recovery import nothing_changed
from stoker.training.telemetry import Telemetry
from stoker.units import format_bytes, format_seconds

COMPARED = 3
"""Updates whose gradients are compared before a reduced precision may take a turn."""

FEWEST_UPDATES = 40
"""Updates of a run in which plans are tried: in fewer hardly a turn would pay."""

_PROBE_SHARE = 0.01
"""Share of the time left that the coupling probe may take [0 to 1]."""

_PROBE_UPDATES = 12
"""Updates that the probe takes as long as, roughly, and no less than a second."""

_CAPTURE_S = 1.5
"""Time to record a pass, with what is imported for it [s]."""

_RECURRENT_FACTOR = 20
"""How much longer it takes to record a recurrent layer, which is recorded step by step."""

_COMPILE_S, _COMPILED_GAIN = 30.0, 0.1
"""Expected time to compile [s], and share of the time that a compiled plan saves [0 to 1]; a trial shows both."""

_SECONDS_EACH = 4e-5
"""Time of the host that a captured layer saves in an update, forward and backward [s]: an expectation, which decides
only whether a trial is worth recording the pass."""

_GROWN = 1.05
"""Resident memory, as a multiple of what the plans so far need, from which on the heap is renewed between turns."""

_CLEARLY_SLOWER = 1.3
"""Ratio of times from which a setting that was tried under one plan is not tried again under a better one."""


class PlanTrials:
    """Chooses the plan of a run's next updates, until the choice is settled.

    Args:
        prepared: the job.
        place: the device here, limited as the run is.
        step: what makes the updates.
        plans: the plan in force.
        telemetry: sends events.
        total_updates: of the whole run.

    Attributes:
        is_over: the choice is settled.
    """

    def __init__(
        self,
        prepared: ResolvedJob,
        place: Place,
        step: Step,
        plans: PlanInForce,
        telemetry: Telemetry,
        total_updates: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._prepared, self._place, self._step, self._plans = prepared, place, step, plans
        self._telemetry, self._total, self._clock = telemetry, total_updates, clock
        self._began = sample_cpu()
        self._errors: dict[Precision, float] = {}
        self._num_compared, self._evaluate_s, self._is_first = 0, 0.0, True
        self._is_probed = plans.coupling.evidence != unprobed(prepared.job).evidence
        self._compared = set[Plan]()  # compiled plans whose gradient was compared
        self._turn: Turn | None = None
        self._watching, self._peak = contextlib.ExitStack(), PeakMemory(place.device.torch_name)
        self._peak_bytes: dict[Plan, int] = {}
        self._usual_bytes, self._is_heap_new = math.inf, False
        """Resident memory after two updates, or after a turn that began in a new heap and left more [bytes]."""
        self._times_s: list[float] = []
        self._made, self._num_expansions = 0, 0
        self._mark = 0.0
        self._search: LiveSearch | None = None
        self._safe, self._is_updating = plans.schedule.safe, False
        self._python = python_state(step.model, step.objective.loss_object, with_tensors=False)
        self._is_resumed = plans.schedule.candidate is not None
        lost = [(switch.left_out, switch.why) for switch in plans.schedule.switches]
        self._lost = {saving_as_often(plan, self._safe): why for plan, why in lost if plan is not None}
        # Of a safe plan that is not in fp32 (a model in float64, say) no other precision takes turns.
        is_reducible = self._safe.precision == "fp32"
        self._precisions = precisions(place.device, prepared.job.numerics) if is_reducible else (self._safe.precision,)
        self._reduced = [p for p in self._precisions if p not in FULL_PRECISIONS]
        # An optimiser with a closure takes a different number of passes in each update, which says little of a plan.
        is_hopeless = total_updates < FEWEST_UPDATES or needs_closure(step.optimizer)
        self.is_over = plans.schedule.is_settled or is_hopeless

    @property
    def is_waiting(self) -> bool:
        """Whether the run still replays its schedule, or has settled."""
        return self.is_over or self._plans.due < math.inf

    @property
    def _is_trying(self) -> bool:
        """Whether the plan in force is a candidate, in its turn or in the one in which the run resumed."""
        is_turn = self._turn is not None or self._plans.schedule.candidate is not None
        return is_turn and not self.is_waiting and self._step.plan != self._safe

    def before(self, batch: Batch, position: Position) -> None:
        """Before an update: compare gradients of its batch where a reduced precision is not known to be exact."""
        if self._is_resumed and not self.is_waiting:
            self._is_resumed = False
            self._plans.try_again(position)
        if self._search is None:  # threads may have been given up since the run's first plan
            self._safe = self._plans.schedule.safe
        if not self.is_waiting and self._is_first:
            self._is_first = False  # is seen sooner without a comparison
        elif not self.is_waiting and self._num_compared < COMPARED:
            self._num_compared += 1
            self._usual_bytes = self._usual_bytes if self._num_compared > 2 else resident_bytes()
            if self._reduced:
                self._step.loss_pass.on_gradients = functools.partial(self._compare, batch, position.updates)
        elif not self.is_waiting and self._step.plan.compile and self._step.plan not in self._compared:
            self._compared.add(self._step.plan)
            self._step.loss_pass.on_gradients = functools.partial(self._require_exact, batch, position.updates)
        if self._is_trying:
            self._python = python_state(self._step.model, self._step.objective.loss_object, with_tensors=False)
        self._mark, self._is_updating = self._clock(), True

    def takes_together(self, num_updates: int) -> bool:
        """Whether the next updates may be made in one call: all are timed, and another one of the turn follows."""
        turn = None if self.is_waiting else self._turn
        return turn is not None and self._made >= UNTIMED and self._made + num_updates < turn.updates

    def after(self, position: Position, num_updates: int = 1) -> None:
        """After an update, or several in one call: take in its time, and choose the plan of the next one."""
        self._is_updating = False
        if self.is_waiting:
            return
        took_s, left = (self._clock() - self._mark) / num_updates, self._total - position.updates
        if self._num_compared == 1 and not self._evaluate_s:
            with nothing_changed(self._step):  # of one held-out sample [s]
                self._evaluate_s = max(1e-12, evaluation_time(self._step, self._prepared.data, self._clock))
            self._telemetry.lap("planning")  # no waiting for the next batch
        if left <= 0 or self._num_compared < COMPARED:
            return
        if self._turn is not None and self._turn.plan != self._step.plan:  # memory ran out under the safe plan
            self._safe, self._search, self._turn = self._step.plan, None, None
        if self._search is None:
            self._search = self._first_search()
        elif self._turn is not None:
            for _ in range(num_updates):
                self._take_in(took_s, self._turn)
            if self._turn is not None:
                return
        turn = self._search.next_turn(left)
        if turn is None and not self._search.timed[self._search.best].by_round:
            self.is_over = True  # not one turn fits into what is left
            return
        while turn is None and self._expand(left * self._search.timed[self._search.best].update_s):
            turn = self._search.next_turn(left)
        if turn is None:
            self._settle(position)
        else:
            self._begin(turn, position)
        self._telemetry.lap("planning")

    def leave_out(self, error: Exception, position: Position) -> Replanned | None:
        """The change back to the best plan after a candidate failed with `error`; None if no candidate did."""
        if not self._is_trying:
            return None
        plan, search = self._step.plan, self._search
        best = self._safe if search is None else search.best
        if isinstance(error, NotFinite) and (plan.precision in FULL_PRECISIONS or plan == best):
            return None  # the data's or the job's fault
        why = f"it raised {type(error).__name__}: {first_line(error)}"
        undo_changes(self._step.model, self._step.objective.loss_object, self._python)  # a replay makes no such attempt
        best = self._safe if plan == best else best
        if search is not None:
            search.best = best
            search.leave_out(plan, why)
        self._lost[plan] = why
        self._turn, self._times_s, self._made = None, [], 0
        return Replanned(
            old=plan,
            new=best,
            why=f"{plan.in_words()} is left out: {why}",
            position=position,
            left_out=plan,
            is_shortage=ran_out_of_memory(error),
        )

    def hangs(self, position: Position) -> None:
        """Write that the plan in force hangs, from the watchdog's thread: the process is about to end."""
        if self._is_updating and self._is_trying:
            why = f"{self._step.plan.in_words()} is left out: its update did not end"
            switch = PlanSwitch.at(position, self._safe, "left out", why, left_out=self._step.plan)
            self._plans.directory.append_switch(switch)

    def compare_samples(self) -> None:
        """Find how samples are coupled, so that smaller micro-batches are legal; does nothing the second time."""
        if self._is_probed:
            return
        self._is_probed, step = True, self._step
        try:
            with nothing_changed(step), heap_kept_small():
                coupling = find_coupling(step.job, self._prepared.data.train)
        except StokerError as problem:
            self._telemetry.emit("warned", message=f"samples were not compared: {problem.message}")
            return
        step.change_to(step.plan, coupling)
        self._plans.learn(coupling)
        if coupling.unsaved:
            kept = " and ".join(coupling.unsaved)
            message = (
                f"checkpoints do not hold {kept}, from which the next pass goes on; keep it in a persistent buffer"
            )
            self._telemetry.emit("warned", message=message)

    def _take_in(self, took_s: float, turn: Turn) -> None:
        """Take in the time of an update of this turn [s]."""
        self._made += 1
        if self._made > UNTIMED:
            self._times_s.append(took_s)
        if self._made == turn.updates:
            assert self._search is not None
            self._search.record(turn.plan, self._times_s)
            self._watching.close()
            self._peak_bytes.setdefault(turn.plan, self._peak.num_bytes)
            compilation = self._step.compilation
            problem = None if compilation is None else compilation.problem
            if (problem := problem or self._exceeds(turn.plan)) is not None:
                if turn.plan == self._search.best:
                    self._search.best = self._safe
                self._search.leave_out(turn.plan, problem)
                self._lost[turn.plan] = problem
            self._turn, self._times_s, self._made = None, [], 0

    def _exceeds(self, plan: Plan) -> str | None:
        """Why a plan took more memory in its first turn than it may; None if it did not, or is the safe one."""
        taken, allowed = taken_bytes(self._measurement(plan, self._times_s)), self._place.device.memory_bytes
        if plan == self._safe or not 0 < allowed < taken:
            return None
        return f"it took {format_bytes(taken)} of memory when it was tried, and may take {format_bytes(allowed)}"

    def _begin(self, turn: Turn, position: Position) -> None:
        """Let a plan make the next updates; the switch is stored first."""
        self._turn, self._times_s, self._made = turn, [], 0
        self._watching.close()
        self._keep_heap_small(turn.plan)
        self._peak = self._watching.enter_context(PeakMemory(turn.plan.device))
        if turn.plan != self._step.plan:
            self._plans.switch(PlanSwitch.at(position, turn.plan, "trial", "tried on the run's own updates"))

    def _keep_heap_small(self, plan: Plan) -> None:
        """Renew the heap before a turn of `plan`, where the plans so far have left it larger than any of them needs.

        What stays after each switch makes holes in it: in time it has twice what an update takes.
        """
        if self._is_heap_new:  # the turn that ends here began in a new heap
            self._usual_bytes, self._is_heap_new = max(self._usual_bytes, resident_bytes()), False
        is_full = plan not in self._peak_bytes and resident_bytes() > self._place.device.memory_bytes / 2
        if is_full or resident_bytes() > _GROWN * self._usual_bytes:
            renew_heap()
            self._is_heap_new = True

    def _first_search(self) -> LiveSearch:
        """Precision and memory format first: they decide most, and need nothing but the comparison of gradients."""
        formats: tuple[MemoryFormat, ...] = (
            ("channels_last", "contiguous") if has_convolutions(self._step.model) else ("contiguous",)
        )
        arithmetic = [precision for precision in self._precisions if self._is_exact(precision)]
        return LiveSearch(
            self._safe,
            self._possible(
                dataclasses.replace(self._safe, precision=precision, memory_format=memory_format)
                for precision in arithmetic
                for memory_format in formats
            ),
            lambda: not used_by_others(self._began),
        )

    def _expand(self, left_s: float) -> bool:
        """Let variants of the best plan take part; returns whether there are any that could pay."""
        assert self._search is not None
        self._num_expansions += 1
        if self._num_expansions > 3:
            return False
        best, variants = self._search.best, list[Plan]()
        update_s = self._search.timed[best].update_s
        if not (best.compile or used_by_others(self._began)):  # `threads` finds the number that others leave free
            numbers = [max(1, best.threads // 2), 1 if self._num_expansions == 1 else best.threads]
            numbers.append(self._place.device.cores)  # where the run began while others computed
            others = [n for n in dict.fromkeys(numbers) if not self._was_slow("threads", n)]
            variants += [dataclasses.replace(best, threads=n) for n in others]
        if not best.compile:
            variants += self._captured(best, update_s, left_s)
        if (
            self._num_expansions > 1
            and _COMPILED_GAIN * left_s > _COMPILE_S
            and not any(plan.compile for plan in self._lost)
            and compiler_missing(self._step.device) is None
        ):
            variants.append(dataclasses.replace(best, compile=True, captured=False))
        if not self._is_probed and _PROBE_SHARE * left_s > max(1.0, _PROBE_UPDATES * update_s):
            self.compare_samples()
        sizes = self._step.coupling.legal_micro_batches(self._prepared.job.batch_size)
        smaller = [size for size in sizes if size < best.micro_batch]
        if smaller and (self._num_expansions == 1 or best.micro_batch < self._safe.micro_batch):
            variants.append(dataclasses.replace(best, micro_batch=smaller[0], captured=False))
        self._search.add(self._possible(variants))
        return self._search.has_rivals

    def _was_slow(self, setting: str, value: object) -> bool:
        """Whether plans with this setting were tried, and all of them were clearly slower than the best one now."""
        assert self._search is not None
        timed, best_s = self._search.timed, self._search.timed[self._search.best].update_s
        ratios = [t.update_s / best_s for plan, t in timed.items() if t.by_round and getattr(plan, setting) == value]
        return bool(ratios) and min(ratios) > _CLEARLY_SLOWER

    def _captured(self, best: Plan, update_s: float, left_s: float) -> list[Plan]:
        """Plans captured, where recording the pass is expected to pay back."""
        assert self._search is not None
        if best.captured or any(plan.captured for plan in self._lost) or self._was_slow("captured", True):
            return []
        modules = list(self._step.model.modules())
        is_recurrent = any(isinstance(module, torch.nn.RNNBase) for module in modules)  # recorded step by step
        gain = max(min(0.3, _SECONDS_EACH * len(modules) / update_s), 0.02)
        pays = gain * left_s > _CAPTURE_S * (_RECURRENT_FACTOR if is_recurrent else 1)
        return to_capture(best, self._search.timed, gain) if pays else []

    def _possible(self, plans: Iterable[Plan]) -> Iterator[Plan]:
        """The plans without the safe one and those that failed."""
        return (plan for plan in plans if plan != self._safe and plan not in self._lost)

    def _is_exact(self, precision: Precision) -> bool:
        return precision in FULL_PRECISIONS or self._errors.get(precision, math.inf) <= LARGEST_GRADIENT_ERROR

    @heap_kept_small()
    def _compare(self, batch: Batch, update: int) -> None:
        """Compare the gradients that an update in full precision has just computed with those in each reduced one."""
        step = self._step
        if step.plan.precision in FULL_PRECISIONS and not step.plan.compile:
            exact = [p.grad for p in step.model.parameters() if p.grad is not None]
        else:  # a run that goes on under a candidate
            plain = dataclasses.replace(step.plan, precision=self._safe.precision, compile=False, captured=False)
            with nothing_changed(step), uncompiled():
                exact = step.gradients_under(plain, batch, update)
        for precision in list(self._reduced):
            plan = dataclasses.replace(step.plan, precision=precision, captured=False)
            what = f"comparing {precision}'s gradient with {self._safe.precision}'s"
            try:
                with doing(what, of=COMPARED, step=self._num_compared), nothing_changed(step):
                    error = gradient_distance(step.gradients_under(plan, batch, update), exact)
            except Exception as problem:  # noqa: BLE001 - whatever a model raises in another precision
                error = math.inf
                self._reduced.remove(precision)
                message = f"{precision} is left out: it raised {type(problem).__name__}: {first_line(problem)}"
                self._telemetry.emit("warned", message=message)
            self._errors[precision] = max(self._errors.get(precision, 0.0), error)
        self._mark += self._telemetry.lap("planning")  # no part of the update's time

    @heap_kept_small()
    def _require_exact(self, batch: Batch, update: int) -> None:
        """Raise RunFailed, and so leave the compiled plan out, if the gradient just computed is not close to fp32's."""
        step = self._step
        renew_heap()  # the heap has the compiled pass's memory, and the ordinary one takes more
        tried = [p.grad for p in step.model.parameters() if p.grad is not None]
        plain = dataclasses.replace(step.plan, precision=self._safe.precision, compile=False)
        with nothing_changed(step), uncompiled():
            exact = step.gradients_under(plain, batch, update)
        error = gradient_distance(tried, exact)
        if not error <= LARGEST_GRADIENT_ERROR:
            raise RunFailed(
                f"compiled, its gradient is {error:.1%} from fp32's, more than {LARGEST_GRADIENT_ERROR:.0%}"
            )

    def _settle(self, position: Position) -> None:
        """Go on under the fastest plan, with a forecast by its times."""
        search = self._search
        assert search is not None
        self.is_over = True
        best, began = search.best, self._safe
        timed = search.timed[best]
        measured = self._measurement(best, timed.times_s or [timed.update_s])
        # The peak of the run may be behind it: of the plans that it tried, the others took more.
        peaks = [num_bytes for plan, num_bytes in self._peak_bytes.items() if plan in search.timed]
        so_far = min(max(peaks, default=0), self._place.device.memory_bytes)
        measured = dataclasses.replace(measured, peak_bytes=max(measured.peak_bytes, so_far))
        ratio = search.timed[began].update_s / timed.update_s if began in search.timed else 1.0
        gained = f"{ratio:.2f}x as fast as the plan that it began under" if best != began else "the plan it began under"
        num_plans = len(search.timed) + len(search.left_out)
        tried = "no other plan took a turn" if num_plans == 1 else f"{num_plans} plans took turns"
        why = f"{gained}; {tried}, {search.num_updates} updates"
        decision = self._decided(measured, position)
        self._plans.settle(decision)  # first: a kill in between leaves a run that goes on choosing
        self._plans.switch(PlanSwitch.at(position, best, "settled", why))
        if not best.captured:  # recording the pass does so
            renew_heap()
        self._telemetry.settled(decision.chosen.forecast.evaluate_s.value)
        self._telemetry.emit(
            "settled",
            samples=position.samples,
            plan=records.to_json(best),
            why=why,
            forecast=records.to_json(decision.chosen.forecast),
            explanation=list(decision.explanation),
            took_updates=search.num_updates,
            speedup=ratio,
            timed=[{"plan": records.to_json(p), "update_s": t.update_s} for p, t in search.timed.items() if t.by_round],
        )
        if self._safe.threads < self._place.device.cores:
            return  # a limit of this run, which is no reason for the next one
        usual = saving_every(None, mtbf_h(self._place.device.kind), decision)  # what was asked for is this run's
        try:
            keep_decision(self._prepared, self._place, usual, self._plans.coupling)
        except RunFailed as problem:
            self._telemetry.emit("warned", message=f"the plan is not kept for the next start: {problem.message}")

    def _measurement(self, plan: Plan, times_s: list[float]) -> Measurement:
        """The measurement of a plan."""
        step = self._step
        state = [t for values in step.optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
        return Measurement(
            plan=plan,
            samples_per_update=self._prepared.job.batch_size,
            update_s=tuple(times_s),
            evaluate_s_per_sample=self._evaluate_s,
            peak_bytes=self._peak_bytes.get(plan, resident_bytes()),
            state_bytes=bytes_of([*step.model.state_dict().values(), *state]) + bytes_of(step.model.parameters()),
            took_s=0.0,
            gradient_error=self._errors.get(plan.precision),
        )

    def _decided(self, measured: Measurement, position: Position) -> records.Decision:
        """The decision that the trials come to; what the run took so far is part of its forecast."""
        prepared, search = self._prepared, self._search
        assert search is not None
        profile = job_profile(
            prepared.job, prepared.data, self._step.coupling, prepared.model, device_kind=self._place.device.kind
        )
        extent, began = prepared.extent, self._plans.decision
        evaluations = began.chosen.forecast.evaluations
        total = Extents(
            total_samples=extent.position(self._total).samples, total_updates=self._total, evaluations=evaluations
        )
        forecast, share = forecast_from_trial(measured, profile, total), used_by_others(self._began)
        if share:
            forecast = widen_for_load(forecast, share)
        typical_s = search.timed[measured.plan].update_s
        spent_s = max(0.0, self._telemetry.wall_s - typical_s * position.updates)
        time_s = forecast.total_s
        forecast = dataclasses.replace(
            forecast,
            trials_s=spent_s,
            total_s=dataclasses.replace(
                time_s, value=time_s.value + spent_s, low=time_s.low + spent_s, high=time_s.high + spent_s
            ),
        )
        plan = saving_as_often(measured.plan, began.chosen.plan)
        chosen = Candidate(
            device=self._place.name,
            plan=plan,
            forecast=forecast,
            memory_bytes=self._place.device.memory_bytes,
            why="measured here",
        )
        others = [(t.update_s, p) for p, t in search.timed.items() if t.by_round and p != measured.plan]
        rejected = (
            *(
                Rejection(
                    device=self._place.name,
                    plan=p,
                    reason=f"{format_seconds(s)} an update, {s / typical_s:.2f}x the time",
                )
                for s, p in sorted(others, key=lambda pair: pair[0])
            ),
            *(Rejection(device=self._place.name, plan=p, reason=why) for p, why in search.left_out.items()),
            *(
                Rejection(
                    device=self._place.name,
                    plan=dataclasses.replace(self._safe, precision=precision),
                    reason=f"its gradient is {error:.1%} from fp32's, more than {LARGEST_GRADIENT_ERROR:.0%}",
                )
                for precision, error in self._errors.items()
                if not self._is_exact(precision)
            ),
        )
        measurements = [self._measurement(p, [t.update_s]) for p, t in search.timed.items() if t.by_round]
        lines = explain(chosen, profile, self._place.device, measurements, rejected[len(others) :])
        if share:
            lines = (*lines, describe_load(share))
        return records.Decision(
            device=self._place.name,
            candidates=(chosen,),
            rejected=rejected,
            explanation=(*prepared.notes, *lines),
            took_s=began.took_s,
            others_share=share,
        )


def to_capture(best: Plan, timed: Mapping[Plan, Timed], gain: float) -> list[Plan]:
    """The best plan captured, and those that differ from it in precision only and may overtake it so.

    What the host does for an update is in the times of plans that are not captured, and of it autocast takes a good
    part: in bf16 a small model may be as slow as in fp32, and captured a sixth faster.

    Args:
        best: the fastest plan, not captured.
        timed: the plans that were tried, with their times.
        gain: expected share of the time that capturing saves [0 to 1].
    """
    update_s = timed[best].update_s
    near = [
        plan
        for plan, turns in timed.items()
        if turns.by_round
        and turns.update_s < (1 + gain) * update_s
        and dataclasses.replace(plan, precision=best.precision) == best
    ]
    return [dataclasses.replace(plan, captured=True) for plan in dict.fromkeys((best, *near))]
