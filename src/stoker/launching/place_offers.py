"""`stoker plan --on slurm:,k8s:,sky:any,here`: places compared by when the run would be finished there, and by money.

What: the offers of each place, each with the forecast of the run on its devices. A run is finished after the wait for
its start, the transfer of what is sent, and the run itself with what preemptions cost. The order of prices
an hour is shown for comparison: it says nothing of how long a run takes.
Learned: earlier runs of a place give the pace of their jobs, correct other forecasts, say what starting takes, and the
wait where the place itself cannot (`place_history`). For the first run, starting takes as long as a program takes here
that does the same (`start_up`).
Costs: one question to each place, and one forecast for each kind of device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar

from stoker.devices import attached_devices, planned_devices
from stoker.errors import BadJob, DoesNotFit, NoDevice, PlaceFailed, StokerError
from stoker.jobs import Entry, Job
from stoker.launching import is_elsewhere, launcher_of, parse_target
from stoker.launching.bundle import code_bundle, data_of, stoker_bundle, work_folder
from stoker.launching.kept_forecasts import keep_forecast
from stoker.launching.launch import data_paths, device_word, is_below, time_limit, why_unknown
from stoker.launching.launcher import Launcher, LaunchTarget, Offer, Probe, Request
from stoker.launching.place_history import PlaceLessons, job_key, lessons_of, place_of, usual_start
from stoker.launching.start_up import StartUp, expected_start, program_start_s
from stoker.planning.decision import STARTING_S, memory_limit, most_threads, on_one, require_mtbf
from stoker.planning.model.objectives import Objective, PlanLimits
from stoker.planning.planner import Planner
from stoker.planning.resolved_job import resolve_job
from stoker.records import Candidate, Estimate, Forecast
from stoker.units import format_money, format_seconds

ASSUMED_BYTES_PER_S = 12.5e6
"""Rate at which files are sent, where none is known [bytes/s]: 100 Mbit/s."""

_SEEN_S = 0.1
"""A shorter difference between two places is none [s]."""

_SEEN_SLOWNESS = 0.05
"""A place that computes so much faster or slower computes as fast as here [1]."""

RESTART_S = 120.0
"""Time from a preemption to training again beyond the queue, where a place has not shown it [s]: a judgement."""


@dataclass(frozen=True, kw_only=True)
class PlaceOffer:
    """A way to run the job, and when it would be finished.

    Attributes:
        text: word of `--on` that takes it.
        device: what the forecast is for, such as `4xa100-80g`; "" without a forecast.
        starts_in_s: wait until the run's processes start [s]; None: unknown, counted as none, and ranked after others.
        startup_s: the submission before the wait, and from the start of the processes to training [s], as learned.
        transfer_s: to send what the job needs [s].
        run: forecast of the run there, preemptions and what was learned included [s].
        finish_s: wait, start-up, transfer and run together [s]; None without a forecast.
        cost: of the run, its start and restarts [`currency`]; None: unknown.
        price_per_h: of all devices; 0: nothing is charged; None: unknown.
        interrupted: probability of at least one preemption [0 to 1].
        price_rank: place in the order of prices an hour, from 1; None: no price is known.
        why: the reason for or against it.
        problem: why it cannot be taken; "" if it can.
    """

    text: str
    device: str = ""
    starts_in_s: float | None = None
    startup_s: float = 0.0
    transfer_s: float = 0.0
    run: Estimate | None = None
    finish_s: float | None = None
    cost: Estimate | None = None
    currency: str = "USD"
    price_per_h: float | None = None
    price_source: str = ""
    interrupted: float = 0.0
    price_rank: int | None = None
    why: str = ""
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class PlaceComparison:
    """Places for a job, the best first; those that cannot be taken last, with the reason.

    Attributes:
        offers: in the order of the objective.
        lines: what the figures rest on.
        sent_bytes: what would be sent to a place that has nothing of it yet [bytes].
        took_s: time of the comparison [s].
    """

    schema: ClassVar[int] = 1

    offers: tuple[PlaceOffer, ...]
    lines: tuple[str, ...] = ()
    sent_bytes: int = 0
    took_s: float = 0.0


@dataclass
class _Forecasts:
    """Forecasts of the job by word of a device, each made once."""

    planner: Planner
    memory_bytes: float | None = None
    threads: int | None = None
    _known: dict[str, Candidate | str] = field(default_factory=dict)

    def of(self, word: str) -> Candidate | str:
        """The best plan on the devices a word means; or why there is none."""
        if word not in self._known:
            try:
                self._known[word] = slowest_plan(self.planner, word, self.memory_bytes, self.threads)
            except (DoesNotFit, NoDevice, BadJob) as problem:
                self._known[word] = problem.message
        return self._known[word]

    def known(self) -> dict[str, Forecast]:
        """The forecasts that were made, by word of a device."""
        return {word: best.forecast for word, best in self._known.items() if isinstance(best, Candidate)}


def slowest_plan(planner: Planner, word: str, memory_bytes: float | None, threads: int | None) -> Candidate:
    """The best plan on the devices that a word means; of an alias, the slowest of theirs.

    Raises:
        DoesNotFit, NoDevice, BadJob: there is none.
    """
    places = planned_devices(word, attached_devices())
    chosen = [on_one(planner, place.limited_to(memory_bytes, threads)).chosen for place in places]
    return max(chosen, key=lambda candidate: candidate.forecast.total_s.value)


def compare_places(
    job: Job,
    *,
    on: str,
    entry: Entry | None = None,
    limits: PlanLimits | None = None,
    objective: Objective | None = None,
    memory: float | str | None = None,
    threads: int | None = None,
    device_mtbf_h: float | None = None,
) -> PlaceComparison:
    """Compare places for a job: hosts, clusters, clouds, devices here and of the catalogue.

    Args:
        job: the job.
        on: words of `--on` with commas between them, such as `slurm:,ssh:box,here,l4`.
        entry: the job file it came from; what would be sent is known only with it.
        limits: the most it may cost and last; places beyond them come last.
        objective: `time` or `money`; None: time, or money where there is a deadline.
        memory: as of `plan`.
        threads: likewise.
        device_mtbf_h: likewise.

    Raises:
        BadJob: the job cannot be trained as it is; or the objective is energy, which no place states.
        NoDevice: a word cannot be read.
    """
    started, limits = time.perf_counter(), limits or PlanLimits()
    if objective == "energy":
        raise BadJob("--objective energy: places elsewhere do not state it", remedy="Use time or money.")
    names = split_words(on)
    elsewhere = [word for word in names if is_elsewhere(word)]
    for word in elsewhere:
        parse_target(word)
    sent_bytes, code_digest = (0, "") if entry is None else to_send(job, entry)
    sent = None if entry is None else (code_digest, entry.setting_words)
    planner = Planner(
        resolve_job(job, entry), is_all_elsewhere="here" not in names, device_mtbf_h=require_mtbf(device_mtbf_h)
    )
    forecasts = _Forecasts(planner, memory_limit(memory), most_threads(threads))
    is_kept = memory is None and threads is None and device_mtbf_h is None  # as a run there is forecast
    asked: dict[str, _Answer | str] = {}
    is_unknown = any(None in usual_start(parse_target(word).kind) for word in elsewhere)
    with ThreadPoolExecutor(max_workers=8) as pool:
        asked.update(zip(elsewhere, pool.map(_ask, elsewhere), strict=True))
    start_s = program_start_s() if is_unknown else None  # not while places are asked, which starts programs, too
    offers: list[PlaceOffer] = []
    for word in names:
        if word in asked:
            offers += _offers_of(word, asked[word], forecasts, sent_bytes, sent, start_s)
        else:
            offers += _on_devices(word, forecasts)
    for device, forecast in forecasts.known().items() if is_kept and elsewhere else ():
        keep_forecast(planner.prepared, device, forecast)
    lines = []
    if elsewhere and sent_bytes > ASSUMED_BYTES_PER_S:
        lines.append("transfer: at 100 Mbit/s, which is assumed; what a place has already is not sent")
    return PlaceComparison(
        offers=ranked(offers, limits, objective),
        lines=tuple(lines),
        sent_bytes=sent_bytes,
        took_s=time.perf_counter() - started,
    )


def split_words(on: str) -> list[str]:
    """The words of `--on` between commas; what is no device belongs to the place before it, as a further host.

    >>> split_words("ssh:box1,box2/2xcpu,here,l4")
    ['ssh:box1,box2/2xcpu', 'here', 'l4']
    """
    names: list[str] = []
    for part in filter(None, (part.strip() for part in on.split(","))):
        if names and is_elsewhere(names[-1]) and not is_elsewhere(part):
            try:
                planned_devices(part, attached_devices())
            except NoDevice:
                names[-1] += f",{part}"
                continue
        names.append(part)
    return names


def ranked(offers: Sequence[PlaceOffer], limits: PlanLimits, objective: Objective | None) -> tuple[PlaceOffer, ...]:
    """The offers in the order of the objective, with their rank by price, limits and the difference to the best."""
    prices = sorted({offer.price_per_h for offer in offers if offer.price_per_h is not None and not offer.problem})
    marked = []
    for offer in offers:
        cost, finish_s, problem = offer.cost, offer.finish_s, offer.problem
        if limits.max_cost_usd is not None and not problem:
            if cost is None:
                problem = "its price is unknown, so the most it may cost cannot be kept"
            elif cost.value > limits.max_cost_usd:
                problem = f"costs {format_money(cost.value)}, over {format_money(limits.max_cost_usd)}"
        if limits.deadline_s is not None and not problem and (finish_s is None or finish_s > limits.deadline_s):
            when = "at an unknown time" if finish_s is None else f"in {format_seconds(finish_s)}"
            problem = f"finished {when}, after the deadline of {format_seconds(limits.deadline_s)}"
        price_rank = prices.index(offer.price_per_h) + 1 if offer.price_per_h in prices and not offer.problem else None
        marked.append(replace(offer, problem=problem, price_rank=price_rank))
    by_money = objective == "money" or (objective is None and limits.deadline_s is not None)

    def key(offer: PlaceOffer) -> tuple[bool, bool, float, float]:
        finish_s = math.inf if offer.finish_s is None else offer.finish_s
        cost = math.inf if offer.cost is None else offer.cost.value
        is_open = offer.starts_in_s is None and not by_money  # it may start tomorrow
        return (bool(offer.problem), is_open, *((cost, finish_s) if by_money else (finish_s, cost)))

    order = sorted(marked, key=key)
    best = order[0] if order else None
    return tuple(replace(offer, why=_why(offer, best, by_money=by_money)) for offer in order)


def to_send(job: Job, entry: Entry) -> tuple[int, str]:
    """Bytes for a place that has no file yet: code, Stoker, data below the job's folder; and the code's digest."""
    root = work_folder(entry.path)
    data = [data_of(path, root) for path in data_paths(job) if is_below(path, root)]
    code = code_bundle(entry.path, entry.sources, data)
    bundles = [stoker_bundle(), code, *(candidate.bundle for candidate in data)]
    return sum(bundle.num_bytes for bundle in bundles), code.digest


@dataclass(frozen=True)
class _Answer:
    """The answer of a place."""

    target: LaunchTarget
    launcher: Launcher
    offers: tuple[Offer, ...]
    probe: Probe


def _ask(word: str) -> _Answer | str:
    """The offers and resources of a place; a sentence where it cannot be asked, or lacks what a run needs."""
    try:
        target = parse_target(word)
        launcher = launcher_of(target.kind)
        offers, probe = launcher.offers(Request(target=target)), launcher.probe(target, {})
        if not offers or probe.missing:
            return "; ".join(probe.missing) or "offers nothing of that shape"
        return _Answer(target, launcher, offers, probe)
    except (StokerError, ImportError) as problem:
        return str(problem).split("\n", 1)[0]


def _offers_of(
    word: str,
    answer: _Answer | str,
    forecasts: _Forecasts,
    sent_bytes: int,
    sent: tuple[str, Sequence[str]] | None,
    start_s: float | None,
) -> list[PlaceOffer]:
    """The offers of a place, with forecasts; `sent`: the digest of the job's code, and its arguments of `train`."""
    if isinstance(answer, str):
        return [PlaceOffer(text=word, problem=answer)]
    start = None if start_s is None else expected_start(start_s, answer.probe.loop_s)
    offers = []
    for offer in answer.offers:
        shape = replace(
            answer.target,
            text=offer.text,
            num_nodes=offer.num_nodes,
            devices_each=offer.devices_each,
            device=offer.device,
        )
        best = _forecast(shape, answer.probe, forecasts)
        key = "" if sent is None else job_key(*sent, shape)
        device = device_word(shape, answer.probe) or ""
        lessons = lessons_of(place_of(offer.text), job=key, device=device)
        if not lessons.num_runs:  # the word leaves the place open, as `sky:any`, and so did earlier runs
            lessons = lessons_of(place_of(word), job=key, device=device)
        if isinstance(best, Candidate) and answer.launcher.limits_time:
            offer = _with_limit(answer.launcher, shape, offer, best, lessons)  # noqa: PLW2901 - the same, asked for precisely
        offers.append(_priced(offer, best, lessons, sent_bytes, start))
    return offers


def _forecast(target: LaunchTarget, probe: Probe, forecasts: _Forecasts) -> Candidate | str:
    word = device_word(target, probe)
    if word is None:
        return f"no forecast: {why_unknown(target, probe)}"
    forecast = forecasts.of(word)
    if isinstance(forecast, str) and target.num_nodes > 1:  # forecasts stand on nodes of eight devices
        forecast = forecasts.of(f"{target.num_devices}x{target.device}")
    return forecast


def _with_limit(
    launcher: Launcher, target: LaunchTarget, offer: Offer, best: Candidate, lessons: PlaceLessons
) -> Offer:
    """The offer for the time that the run needs: a short request starts sooner."""
    with suppress(PlaceFailed):
        again = launcher.offers(Request(target=target, time_limit_s=time_limit(best.forecast, lessons)))
        return next((candidate for candidate in again if candidate.text == offer.text), offer)
    return offer


def _priced(
    offer: Offer, best: Candidate | str, lessons: PlaceLessons, sent_bytes: int, start: StartUp | None = None
) -> PlaceOffer:
    """An offer with what its run takes and costs; `start`: the start-up to expect where no run has shown one."""
    is_learned = lessons.queue_s is not None and (offer.starts_in_s is None or offer.is_rented)
    starts_in_s = lessons.queue_s if is_learned else offer.starts_in_s
    submit_s, startup_s, whose = _start_of(offer.text.partition(":")[0], lessons, start)
    parts = [offer.why] if offer.why else []
    if is_learned:
        parts.append(f"wait: median of {lessons.num_runs} earlier runs")
    if startup_s + submit_s:
        parts.append(f"start-up {format_seconds(startup_s + submit_s)}, {whose}")
    else:
        parts.append("start-up not known yet, counted as none")
    made = PlaceOffer(
        text=offer.text,
        starts_in_s=starts_in_s,
        startup_s=startup_s + submit_s,
        transfer_s=0.0 if lessons.is_sent else sent_bytes / ASSUMED_BYTES_PER_S,
        price_per_h=offer.price_per_h,
        currency=offer.currency,
        price_source=offer.price_source,
        why="; ".join(parts),
    )
    if isinstance(best, str):
        return replace(made, device=offer.device, why="; ".join([*parts, best]))
    charged_s = startup_s + (starts_in_s or 0.0 if offer.is_rented else 0.0)
    restart_s = charged_s or RESTART_S
    if words := lessons.in_words(best.forecast):
        parts.append(words)
    run = lessons.run_time(best.forecast)
    preemptions = offer.preempted_per_h * run.value / 3600
    lost_s = preemptions * (restart_s + (best.forecast.checkpoint_every_s or 0.0) / 2)
    run = replace(run, value=run.value + lost_s, high=run.high + 2 * lost_s)
    held = replace(run, value=run.value + charged_s, low=run.low + charged_s, high=run.high + charged_s)
    price = offer.price_per_h
    return replace(
        made,
        device=best.device,
        run=run,
        finish_s=(starts_in_s or 0.0) + made.startup_s + made.transfer_s + run.value,
        cost=None if price is None else held.scaled(price / 3600, offer.currency),
        interrupted=-math.expm1(-preemptions),
        why="; ".join(parts),
    )


def _start_of(kind: str, lessons: PlaceLessons, start: StartUp | None) -> tuple[float, float, str]:
    """Time to submit, and to start up [s], 0 where unknown, and what they rest on: each on the nearest known."""
    usual_submit_s, usual_startup_s = usual_start(kind)
    sources = [
        (lessons.submit_s, lessons.startup_s, "as earlier runs took"),
        (usual_submit_s, usual_startup_s, "as runs at other places of this kind took"),
    ]
    if start is not None:
        scale = f", and times {start.slowness:.2g} there" if abs(start.slowness - 1) >= _SEEN_SLOWNESS else ""
        whose = f"from that of a program here{scale}; an environment that has to be made there comes on top"
        sources.append((start.submit_s, start.startup_s, whose))
    submit_s = next((seconds for seconds, _, _ in sources if seconds is not None), 0.0)
    startup_s, whose = next(((seconds, whose) for _, seconds, whose in sources if seconds is not None), (0.0, ""))
    return submit_s, startup_s, whose


def _on_devices(word: str, forecasts: _Forecasts) -> list[PlaceOffer]:
    """A word for devices here, or of the catalogue, which are rented by hand."""
    offers = []
    for place in planned_devices(word, attached_devices()):
        best = forecasts.of(place.name)
        if isinstance(best, str):
            offers.append(PlaceOffer(text=place.name, device=place.name, problem=best))
            continue
        run, starts_in_s = best.forecast.total_s, 0.0 if place.is_here else STARTING_S
        price = None if best.price is None else best.price.usd_per_hour * place.count
        offers.append(
            PlaceOffer(
                text=place.name,
                device=best.device,
                starts_in_s=starts_in_s,
                run=run,
                finish_s=starts_in_s + run.value,
                price_per_h=0.0 if place.is_here else price,
                cost=run.scaled(0.0, "USD") if place.is_here else best.forecast.cost_usd,
                price_source="" if best.price is None else f"{best.price.provider}, {best.price.seen_on or 'undated'}",
                why="yours" if place.is_here else "to be rented by hand" if price is not None else "no price is known",
            )
        )
    return offers


def _why(offer: PlaceOffer, best: PlaceOffer | None, *, by_money: bool) -> str:
    """How an offer differs from the best one, then what its figures rest on."""
    if offer.problem or best is None or offer.finish_s is None:
        return offer.why
    if offer.starts_in_s is None:
        first = "its start is unknown"
    elif offer is best:
        first = "the cheapest to finish" if by_money else "finished first"
    else:
        later_s = offer.finish_s - (best.finish_s or 0.0)
        how_much = f"{format_seconds(abs(later_s))} {'later' if later_s > 0 else 'sooner'}"
        first = how_much if abs(later_s) >= _SEEN_S else "as soon"
        if offer.price_rank is not None and best.price_rank is not None and offer.price_rank < best.price_rank:
            first += ", though cheaper an hour"
    return "; ".join([first, *([offer.why] if offer.why else [])])
