"""Which offer to take: by expected money and hours until the job is finished, not by the price of an hour.

What: for each offer the expected hours (start, transfer over its measured link, the run on that device, checkpoints,
and what losing the machine costs at the provider's own rate) and the expected money for them, replays included;
ranked by money + hours × what an hour of waiting is worth. The order of prices an hour is also shown.
Use when: a job has a forecast for each kind of device that is offered.
Costs: one pass over columns of numbers; 10,000 offers in tens of milliseconds (bench/pool/market.py).
Does not see: queues behind an offer (an offer is free or it is not), and what other renters want.
Sources: J. W. Young 1974 and J. T. Daly 2006 for the checkpoint interval, as in `devices.hardware`; the hazard is a
Poisson rate with a Gamma prior, the share of offers that are not taken up a Bernoulli one with a Beta prior.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.pool.answers import read_offer
from stoker.pool.escrow import FIRST_JOBS, LEAST_CHECKED, credits_text
from stoker.pool.events import Isolation, Offer
from stoker.pool.lease import Commitment
from stoker.pool.shown_lease import ShownLease
from stoker.pool.state import ListedOffer, Record
from stoker.units import format_bytes, format_seconds

PRIOR_LOSSES, PRIOR_HOURS = 0.5, 24.0
"""A provider without a record: as if it had been lost half a time in a day."""
PRIOR_DECLINED, PRIOR_ACCEPTED = 0.5, 9.5
"""As if it had declined one lease in twenty."""
EIGHT_IN_TEN = 2 * 1.2816
"""Width of the interval that holds 8 of 10 normal deviates [standard deviations]."""
ISOLATIONS: tuple[Isolation, ...] = ("bubblewrap", "podman", "gvisor")
"""From the weakest on."""
_LEAST_INTERVAL_S = 30.0

Floats = NDArray[np.float64]


DEFAULT_LINK_BYTES_PER_S = 12.5e6
"""Of a link that was not measured: 100 Mbit/s [bytes/s]."""


@dataclass(frozen=True, kw_only=True)
class RunForecast:
    """The run alone on one kind of device.

    Attributes:
        run_s: likeliest time [s].
        spread: standard deviation of the logarithm of the error [fraction].
        basis: what it rests on: `datasheet`, `probe`, `history`, …
        reference_flop_per_s: rate of the device that `run_s` is for; an offer measured slower or faster is scaled by
            it; 0: not scaled.
        raw_s: `run_s` before earlier runs corrected it [s]; 0: they did not.
        setup_s: from accepted to training, transfers not counted [s]; None: as `Needs` has it.
        total_updates: of the whole run; 0: not known.
        has_exchanges: whether `run_s` is of a site of a gang, with its waiting for the others.
    """

    run_s: float
    spread: float = 0.1
    basis: str = "datasheet"
    reference_flop_per_s: float = 0.0
    raw_s: float = 0.0
    setup_s: float | None = None
    total_updates: int = 0
    has_exchanges: bool = False

    def done_s(self, updates: int) -> float:
        """What the first updates of the run take of `run_s` [s]; 0 where their share is not known."""
        return self.run_s * min(1.0, updates / self.total_updates) if self.total_updates else 0.0

    @classmethod
    def of_interval(cls, value_s: float, low_s: float, high_s: float, **more: Any) -> RunForecast:
        """From a likeliest value and an interval that holds 8 of 10 [s]."""
        spread = math.log(high_s / low_s) / EIGHT_IN_TEN if 0 < low_s < high_s else 0.0
        return cls(run_s=value_s, spread=spread, **more)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a job needs wherever it runs.

    Attributes:
        value_per_hour: what an hour of waiting is worth to the renter [micro-credits].
        sent_bytes, result_bytes: to the agent before the run, and back after it.
        setup_s: from accepted to training, transfers not counted [s].
        checkpoint_blocked_s: what one checkpoint takes from training [s].
        checkpoint_bytes: of one checkpoint: what is sent again after a loss.
        least_isolation: weakest isolation that the renter takes.
        verify_fraction: share of blocks to be replayed.
        num_devices: devices that one offer must have: all of them or nothing; 0: any number.
        disk_bytes: of the agent's disk.
        max_credits: most that it may cost [micro-credits]; None: no limit.
        deadline_s: time until it has to be finished [s]; None: no limit.
    """

    value_per_hour: int = 0
    sent_bytes: float = 0.0
    result_bytes: float = 0.0
    setup_s: float = 30.0
    checkpoint_blocked_s: float = 1.0
    checkpoint_bytes: float = 0.0
    least_isolation: Isolation = "bubblewrap"
    verify_fraction: float = 0.0
    num_devices: int = 1
    disk_bytes: float = 0.0
    max_credits: int | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Match:
    """An offer and what the job would take and cost there.

    Attributes:
        hours: expected, from taking the offer to the results [h].
        metered_hours: of these those that are paid [h].
        credits: expected, replays included [micro-credits].
        score: `credits` and the worth of `hours` [micro-credits].
        low_credits, high_credits: interval of the money that holds 8 of 10 [micro-credits].
        risk: probability that the machine is lost at least once [0 to 1].
        checkpoint_every_s: best time between checkpoints there [s].
        price_rank: place in the order of price an hour among offers that can be taken, from 1.
        why: how it differs from the best.
        problem: why it cannot be taken; "": it can.
    """

    listed: ListedOffer
    forecast: RunForecast | None = None
    hours: float = math.inf
    metered_hours: float = 0.0
    credits: int = 0
    score: float = math.inf
    low_credits: int = 0
    high_credits: int = 0
    risk: float = 0.0
    checkpoint_every_s: float = 0.0
    price_rank: int = 0
    why: str = ""
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Offers for a job: the best first, and counts of those that cannot be taken, by the reason.

    Attributes:
        matches: the first of them.
        num_usable: offers that can be taken.
        refused: number of offers by reason.
    """

    matches: tuple[Match, ...]
    num_usable: int
    refused: Mapping[str, int]

    @property
    def best(self) -> Match | None:
        """The offer to take."""
        return self.matches[0] if self.matches else None


def hazard_per_hour(record: Record) -> float:
    """Expected losses of a provider's machines an hour: mean of the posterior Gamma distribution.

    >>> hazard_per_hour(Record()), hazard_per_hour(Record(lost=1, ran_s=976 * 3600))
    (0.020833333333333332, 0.0015)
    """
    shape, hours = _posterior(record)
    return shape / hours


def hazard_interval(record: Record) -> tuple[float, float]:
    """Losses an hour that the provider's true rate is between in 8 cases of 10: quantiles of the same distribution.

    >>> [round(24 * bound, 3) for bound in hazard_interval(Record())]  # a day
    [0.008, 1.353]
    """
    shape, hours = _posterior(record)
    return _gamma_quantile(shape, 0.1) / hours, _gamma_quantile(shape, 0.9) / hours


def _posterior(record: Record) -> tuple[float, float]:
    """Shape and rate [h] of the Gamma distribution of a provider's losses an hour."""
    losses = record.lost + record.left + record.reclaimed
    return PRIOR_LOSSES + losses, PRIOR_HOURS + record.ran_s / 3600


def _gamma_quantile(shape: float, share: float) -> float:
    """The value below which a Gamma distribution of rate 1 has `share` of its mass, by bisection.

    Source: NIST Digital Library of Mathematical Functions, 8.7.1: the series of the incomplete gamma function.
    """

    def mass_below(x: float) -> float:
        term = total = 1.0 / shape
        order = shape
        while term > 1e-12 * total:
            order += 1.0
            term *= x / order
            total += term
        return total * math.exp(shape * math.log(x) - x - math.lgamma(shape))

    low, high = 0.0, shape + 10.0 * math.sqrt(shape) + 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mass_below(middle) < share else (low, middle)
    return high


def declines(record: Record) -> float:
    """Probability that a provider does not take up a lease [0 to 1]: mean of the posterior Beta distribution."""
    accepted = record.finished + record.lost + record.left + record.reclaimed
    return (PRIOR_DECLINED + record.declined) / (PRIOR_DECLINED + PRIOR_ACCEPTED + record.declined + accepted)


@dataclass(frozen=True)
class Columns:
    """Offers as columns of numbers: made once, used for many jobs."""

    offers: Sequence[ListedOffer]
    kinds: Sequence[str]
    kind: NDArray[np.int64]
    price: Floats
    count: Floats
    flop_per_s: Floats
    sends: Floats
    takes: Floats
    disk: Floats
    isolation: Floats
    least_s: Floats
    most_s: Floats
    hazard: Floats
    declines: Floats
    checked: Floats

    @classmethod
    def of(
        cls,
        offers: Sequence[ListedOffer],
        records: Mapping[str, Record],
        now_s: float,
        known_offers: Container[str] = frozenset(),
    ) -> Columns:
        """Columns of offers with the records of their agents; `known_offers` have a forecast of their own."""
        known: dict[str, int] = {}
        none = Record()
        rows = []
        for listed in offers:
            offer = listed.offer
            record = records.get(listed.agent, none)
            rows.append(
                (
                    known.setdefault(forecast_word(listed, known_offers), len(known)),
                    offer.price_per_hour,
                    offer.device.count,
                    offer.measured.fp32_flop_per_s,
                    offer.upload_bytes_per_s,
                    offer.download_bytes_per_s,
                    offer.disk_bytes,
                    ISOLATIONS.index(offer.isolation),
                    offer.min_s,
                    min(offer.max_s, left_today_s(offer.hours, now_s)),
                    hazard_per_hour(record),
                    declines(record),
                    1.0 if record.passed < FIRST_JOBS else max(1 / record.passed, LEAST_CHECKED),
                )
            )
        table = np.array(rows, dtype=np.float64).reshape(len(rows), 13)
        return cls(tuple(offers), tuple(known), table[:, 0].astype(np.int64), *table.T[1:])


def forecast_word(listed: ListedOffer, known_offers: Container[str] = frozenset()) -> str:
    """What a forecast is for: a kind of device, of a CPU with its cores, as in `cpu/4`; `cpu/4@NAME`: a known offer.

    Of several devices with their number, as in `8xh100`; the cores are those of all processes together: `2xcpu/4`.
    """
    device, cores, offer_id = listed.offer.device, listed.offer.measured.cores, listed.offer.offer_id
    word = f"{device.kind}/{cores}" if device.kind == "cpu" and cores else device.kind
    word = f"{device.count}x{word}" if device.count > 1 else word
    return f"{word}@{offer_id}" if offer_id in known_offers else word


def offer_word(offer: Offer) -> str:
    """The word of `--on` that takes an offer: `pool:box`, `pool:box/2xcpu`."""
    count, kind = offer.device.count, offer.device.kind
    return f"pool:{offer.offer_id}" + (f"/{count}x{kind}" if count > 1 else "")


def left_today_s(hours: tuple[int, int] | None, now_s: float) -> float:
    """Time for which an offer's hours of the day go on [s]; 0: not now.

    >>> [left_today_s(hours, 3600.0 * 23) / 3600 for hours in ((22, 6), (6, 22), (20, 0), None)]
    [7.0, 0.0, 1.0, inf]
    """
    if hours is None or hours[0] == hours[1]:
        return math.inf
    into_s = (now_s - hours[0] * 3600) % 86400
    length_s = (hours[1] - hours[0]) * 3600 % 86400
    return max(0.0, length_s - into_s)


def rank_offers(
    columns: Columns,
    needs: Needs,
    forecast_of: Callable[[str], RunForecast | str],
    *,
    most: int = 20,
) -> Ranking:
    """Rank offers for a job by expected money and hours to finish.

    Args:
        columns: the offers.
        needs: of the job.
        forecast_of: the run on a kind of device, asked once for each kind; a sentence: why it cannot run there.
        most: how many of the best to describe.
    """
    num = len(columns.offers)
    forecasts = [forecast_of(kind) for kind in columns.kinds]
    problems = _problems(columns, needs, forecasts)
    base = [found if isinstance(found, RunForecast) else RunForecast(run_s=math.inf) for found in forecasts]
    if not num:
        return Ranking(matches=(), num_usable=0, refused={})
    costs = expected_costs(columns, needs, base)
    score = costs.score
    is_good = np.isfinite(score)
    if needs.max_credits is not None:
        problems.append(
            (is_good & (costs.credits > needs.max_credits), f"costs more than {credits_text(needs.max_credits)}")
        )
    if needs.deadline_s is not None:
        problems.append(
            (is_good & (costs.hours * 3600 > needs.deadline_s), f"is finished after {format_seconds(needs.deadline_s)}")
        )
    problems.append((~is_good, "is lost so often that the job would never end"))
    usable = np.ones(num, dtype=bool)
    refused: dict[str, int] = {}
    for is_bad, why in problems:
        if count := int((usable & is_bad).sum()):
            refused[why] = refused.get(why, 0) + count
        usable &= ~is_bad
    places = np.flatnonzero(usable)
    order = places[np.lexsort((columns.price[places], score[places]))]
    price_ranks = np.empty(num, dtype=np.int64)
    price_ranks[places[np.argsort(columns.price[places], kind="stable")]] = np.arange(1, len(places) + 1)
    shown = list(order[:most])
    if len(places) and (cheapest := places[np.argmin(columns.price[places])]) not in shown:
        shown.append(cheapest)  # the one that a list of prices would put first
    matches = [
        Match(
            listed=columns.offers[i],
            forecast=base[columns.kind[i]],
            hours=float(costs.hours[i]),
            metered_hours=float(costs.metered_hours[i]),
            credits=round(costs.credits[i]),
            score=float(score[i]),
            low_credits=round(costs.credits[i] * math.exp(-1.2816 * costs.spread[i])),
            high_credits=round(costs.credits[i] * math.exp(1.2816 * costs.spread[i])),
            risk=float(costs.risk[i]),
            checkpoint_every_s=float(costs.interval_s[i]),
            price_rank=int(price_ranks[i]),
        )
        for i in shown
    ]
    return Ranking(
        matches=tuple(replace(match, why=_why(match, matches[0])) for match in matches),
        num_usable=len(places),
        refused=refused,
    )


def _problems(
    columns: Columns, needs: Needs, forecasts: Sequence[RunForecast | str]
) -> list[tuple[NDArray[np.bool_], str]]:
    """What cannot be taken, and why, in the order in which reasons are given."""
    problems: list[tuple[NDArray[np.bool_], str]] = []
    if needs.num_devices:
        problems.append((columns.count != needs.num_devices, f"has another number of devices than {needs.num_devices}"))
    problems += [(columns.kind == number, found) for number, found in enumerate(forecasts) if isinstance(found, str)]
    least = ISOLATIONS.index(needs.least_isolation)
    problems.append((columns.isolation < least, f"isolates less than {needs.least_isolation}"))
    if needs.disk_bytes:
        problems.append((columns.disk < needs.disk_bytes, f"has less disk than {format_bytes(needs.disk_bytes)}"))
    problems.append((columns.most_s < np.maximum(columns.least_s, 1.0), "is not lent at this hour"))
    return problems


@dataclass(frozen=True)
class Costs:
    """What each offer is expected to take and cost: hours, checkpoint interval [s], money [micro-credits]."""

    hours: Floats
    metered_hours: Floats
    interval_s: Floats
    credits: Floats
    score: Floats
    risk: Floats
    spread: Floats


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def expected_costs(columns: Columns, needs: Needs, forecasts: Sequence[RunForecast]) -> Costs:
    """Expected hours and money of a job on each offer; infinite where its forecast is, or it would never end.

    Args:
        columns: the offers.
        needs: of the job.
        forecasts: the run, by the columns' kinds.
    """
    run_s, spread, reference = (
        np.array([getattr(one, name) for one in forecasts])[columns.kind]
        for name in ("run_s", "spread", "reference_flop_per_s")
    )
    is_scaled = (reference > 0) & (columns.flop_per_s > 0)
    setup_s = np.array([needs.setup_s if one.setup_s is None else one.setup_s for one in forecasts])[columns.kind]
    run_s = run_s * np.where(is_scaled, reference / np.maximum(columns.flop_per_s, 1e-9), 1.0)
    run_s = run_s * np.exp(spread**2 / 2)  # mean of a log-normal distribution
    send_s = _transfer_s(needs.sent_bytes, columns.takes)
    mtbf_s = 3600 / columns.hazard
    blocked_s = needs.checkpoint_blocked_s
    share = blocked_s / (2 * mtbf_s)
    daly_s = np.sqrt(2 * blocked_s * mtbf_s) * (1 + np.sqrt(share) / 3 + share / 9) - blocked_s
    interval_s = np.maximum(_LEAST_INTERVAL_S, np.where(blocked_s >= 2 * mtbf_s, mtbf_s, daly_s))
    # After a loss the job is set up on a machine like this one, from the last checkpoint.
    restart_s = setup_s + send_s + _transfer_s(needs.checkpoint_bytes, columns.takes)
    worked_s = mtbf_s * np.exp(restart_s / mtbf_s) * np.expm1(interval_s / mtbf_s)
    trained_s = run_s * (1 + blocked_s / interval_s) * worked_s / interval_s
    leases = np.ceil(np.maximum(trained_s / np.maximum(columns.most_s, 1.0), 1.0))
    metered_s = setup_s + trained_s + (leases - 1) * restart_s
    waits_s = 60.0 * columns.declines / (1 - columns.declines)
    hours = (metered_s + send_s + _transfer_s(needs.result_bytes, columns.sends) + waits_s) / 3600
    metered_hours = np.maximum(metered_s, columns.least_s) / 3600
    checked = np.maximum(needs.verify_fraction, columns.checked) if needs.verify_fraction else 0.0
    credits_ = columns.price * metered_hours * (1 + checked)
    return Costs(
        hours=hours,
        metered_hours=metered_hours,
        interval_s=interval_s,
        credits=credits_,
        spread=spread,
        score=credits_ + needs.value_per_hour * hours,
        risk=-np.expm1(-columns.hazard * metered_hours),
    )


def _transfer_s(num_bytes: float, bytes_per_s: Floats) -> Floats:
    """Time of a transfer [s]; a link that was not measured counts as 100 Mbit/s."""
    return num_bytes / np.where(bytes_per_s > 0, bytes_per_s, DEFAULT_LINK_BYTES_PER_S)


def _why(match: Match, best: Match) -> str:
    """How an offer differs from the best one, in the terms of the list of prices."""
    price = credits_text(match.listed.offer.price_per_hour)
    whole = f"{credits_text(match.credits)} in {format_seconds(match.hours * 3600)}"
    if match is best:
        ahead = match.price_rank - 1
        return f"{whole}; {ahead} cheaper an hour" if ahead else f"{whole}; also the cheapest an hour"
    later_s = (match.hours - best.hours) * 3600
    costs = match.credits - best.credits
    parts = [
        f"{credits_text(abs(costs))} {'more' if costs >= 0 else 'less'}",
        f"{format_seconds(abs(later_s))} {'later' if later_s >= 0 else 'sooner'}",
    ]
    if match.listed.offer.price_per_hour < best.listed.offer.price_per_hour:
        ratio = match.metered_hours / best.metered_hours if best.metered_hours else math.inf
        parts.append(
            f"though {price} an hour against {credits_text(best.listed.offer.price_per_hour)}: "
            f"{ratio:.1f} times as many hours"
        )
    return ", ".join(parts)


# ------------------------------------------------------------------------------------------- probes, history, and moves


def worth_probing(ranking: Ranking, value_per_hour: int) -> list[Match]:
    """The best offers of up to three kinds whose order a short paid run would settle; none: the best is sure enough.

    A kind is asked if in a lucky case (one in ten) it beats what the best one is expected to cost.
    """
    best = ranking.best
    if best is None:
        return []
    kinds: dict[str, Match] = {}
    for match in ranking.matches:
        spread = 0.0 if match.forecast is None else match.forecast.spread
        lucky = match.low_credits + value_per_hour * match.hours * math.exp(-1.2816 * spread)
        if match is best or lucky < best.score:
            kinds.setdefault(forecast_word(match.listed), match)
    return list(kinds.values())[:3] if len(kinds) > 1 else []


PROBE_SPREAD = 0.08
"""Standard deviation of a forecast after the job was tried; median error 5 % in cpu_step_time_planned_2026-11-22."""


def calibrated(forecast: RunForecast, ratios: Sequence[float]) -> RunForecast:
    """A forecast corrected by how earlier runs of the job on that kind of device compared: actual / forecast.

    The mean error is shrunk towards none by the forecast's own spread, as a normal prior: one run of a good forecast
    moves it little, five move it to where they were.

    >>> round(calibrated(RunForecast(run_s=100.0, spread=0.2), [1.3, 1.3, 1.3]).run_s)
    128
    """
    if not ratios:
        return forecast
    logs = [math.log(ratio) for ratio in ratios]
    noise = max(PROBE_SPREAD, float(np.std(logs)))
    prior, data = 1 / max(forecast.spread, 1e-3) ** 2, len(logs) / noise**2
    mean = sum(logs) / len(logs) * data / (prior + data)
    spread = math.sqrt(1 / (prior + data) + noise**2)
    run_s = forecast.run_s * math.exp(mean)
    return replace(forecast, run_s=run_s, spread=spread, basis="history", raw_s=forecast.raw_s or forecast.run_s)


def earlier_ratios(leases: Sequence[ShownLease], job: str, device: str, num_devices: int = 1) -> list[float]:
    """Actual against forecast time of a job's finished leases on a kind of device, from the pool's own record.

    Sites of gangs are left out: they wait for each other, which is not in the forecast of one.

    Args:
        leases: as the control plane shows them.
        job: the job's name in its forecasts (`events.Forecast.job`).
        device: kind of device.
        num_devices: of an offer.
    """
    return [
        lease.running_s / 3600 / lease.forecast.raw_hours
        for lease in leases
        if lease.reason == "finished"
        and not lease.gang
        and (lease.device, lease.forecast.job, lease.num_devices) == (device, job, num_devices)
        and lease.forecast.raw_hours > 0
        and lease.running_s > 0
    ]


@dataclass(frozen=True, kw_only=True)
class EarlierRun:
    """What a lease showed of a job on one offer, whether it came to its end or not: a short one is a probe.

    Attributes:
        updates_per_s: between its first and its last block, evaluations and saves among them [updates/s].
        over_s: time between them [s].
        setup_s: metered time before the first update [s]; None: it went on from a block, and cannot say.
        has_exchanges: whether it was a site of a gang.
    """

    updates_per_s: float
    over_s: float
    setup_s: float | None
    has_exchanges: bool = False


def earlier_runs(leases: Sequence[ShownLease], job: str, *, sites: int = 1) -> dict[str, list[EarlierRun]]:
    """What earlier leases of a job showed, by the offer's name; those without their blocks, as in lists, show nothing.

    `sites`: that trained it together. Another number of them has other parts of the batch, and other exchanges, which
    are in the pace.

    A block's time is when it was committed: two blocks say how fast updates are made without what came before them.
    """
    found: dict[str, list[EarlierRun]] = {}
    for lease in leases:
        blocks = lease.commitments
        if lease.forecast.job != job or len(lease.gang_leases or ("",)) != sites:
            continue
        if (pace := _pace(blocks)) is None:
            continue
        over_s = blocks[-1].at_s - blocks[0].at_s
        # The meter of a job that has ended stood still while its last block and its results were sent.
        later_s = 0.0 if lease.reason == "finished" else max(0.0, lease.heard_s - blocks[-1].at_s)
        setup_s = lease.running_s - later_s - blocks[-1].update / pace
        is_whole = lease.forecast.raw_hours > 0
        run = EarlierRun(
            updates_per_s=pace,
            over_s=over_s,
            setup_s=max(0.0, setup_s) if is_whole else None,
            has_exchanges=sites > 1,
        )
        found.setdefault(lease.offer_id, []).append(run)
    return found


def after_runs(forecast: RunForecast, runs: Sequence[EarlierRun], num_updates: int) -> RunForecast:
    """The forecast of a job on an offer where it has run: as fast as it was there, whatever its kind is said to be.

    >>> runs = [EarlierRun(updates_per_s=2.0, over_s=50.0, setup_s=9.0)]
    >>> after = after_runs(RunForecast(run_s=100.0), runs, 600)
    >>> after.run_s, after.setup_s, after.raw_s, after.basis
    (300.0, 9.0, 100.0, 'history')
    """
    updates, over_s = sum(run.updates_per_s * run.over_s for run in runs), sum(run.over_s for run in runs)
    setups = [run.setup_s for run in runs if run.setup_s is not None]
    return replace(
        forecast,
        run_s=num_updates * over_s / updates,
        spread=PROBE_SPREAD,
        basis="history",
        setup_s=float(np.median(setups)) if setups else None,
        raw_s=forecast.raw_s or forecast.run_s,
        reference_flop_per_s=0.0,
        has_exchanges=all(run.has_exchanges for run in runs),
    )


MOVE_SAVES = 0.1
"""Share of what the rest of a job costs that a move has to save, money and hours together, less the move itself."""
_MOVED_SPREAD = 0.2
"""Standard deviation of the logarithm of the error of a pace at an offer where the job has not run."""
_RECENT_BLOCKS = 5


def rest_of_run(lease: ShownLease, total_updates: int) -> RunForecast | None:
    """What is left of a job after its last block, at the pace of its last blocks there; None: it cannot be said.

    Args:
        lease: that runs, with its blocks.
        total_updates: of the whole run.
    """
    blocks = lease.commitments[-_RECENT_BLOCKS - 1 :]
    left, pace = total_updates - blocks[-1].update if blocks else 0, _pace(blocks)
    if len(blocks) < 3 or left <= 0 or pace is None:
        return None
    return RunForecast(run_s=left / pace, spread=PROBE_SPREAD, basis="history", setup_s=0.0)


def _pace(blocks: Sequence[Commitment]) -> float | None:
    """Updates per second between the first and the last of some blocks [updates/s]; None: no time is between them."""
    over_s = blocks[-1].at_s - blocks[0].at_s if blocks else 0.0
    return (blocks[-1].update - blocks[0].update) / over_s if over_s > 0 else None


def best_move(
    here: ListedOffer,
    others: Sequence[ListedOffer],
    records: Mapping[str, Record],
    *,
    lease: ShownLease,
    total_updates: int,
    needs: Needs,
    runs: Mapping[str, Sequence[EarlierRun]],
    now_s: float,
) -> tuple[Match, Match] | None:
    """The rest of a job where it is, and at the offer that it should move to; None: it stays.

    Only offers of the same determinism class, with as many cores, are looked at: the weights are then those of a run
    that stayed. Elsewhere the job is as fast as here, unless it has run there, or both devices were measured.

    Args:
        here: the offer that it runs on, at the price of its lease.
        others: that are free.
        records: of agents.
        lease: that runs, with its blocks; what it ran since the last one would be made again.
        total_updates: of the whole run.
        needs: of the job; the set-up is that of a move.
        runs: of the job, by offer.
        now_s: the clock [s since 1970].
    """
    rest = rest_of_run(lease, total_updates)
    same = [
        one
        for one in others
        if one.offer.determinism_class == here.offer.determinism_class
        and one.offer.device == here.offer.device
        and one.offer.measured.cores >= here.offer.measured.cores
    ]
    if rest is None or not same:
        return None
    anyhow = replace(needs, deadline_s=None)  # one that is missed here may be met elsewhere
    if (stay := rank_offers(Columns.of([here], records, now_s), anyhow, lambda _: rest).best) is None:
        return None
    last = lease.commitments[-1]
    lost_s = float(max(0, lease.running_s - last.running_s))
    fresh = replace(rest, spread=_MOVED_SPREAD, setup_s=None, reference_flop_per_s=here.offer.measured.fp32_flop_per_s)

    def forecast_of(word: str) -> RunForecast:
        offer_id = word.partition("@")[2]
        return after_runs(fresh, runs[offer_id], total_updates - last.update) if offer_id in runs else fresh

    go = rank_offers(Columns.of(same, records, now_s, runs), needs, forecast_of).best
    if go is None or not worth_moving(
        stay,
        go,
        # What went through the pool for this lease goes there again.
        move_credits=round(here.offer.price_per_hour * lost_s / 3600) + lease.forwarded_credits,
        value_per_hour=needs.value_per_hour,
        move_s=lost_s,
    ):
        return None
    return stay, go


def worth_moving(stay: Match, go: Match, *, move_credits: int, value_per_hour: int, move_s: float) -> bool:
    """Whether a job that runs at `stay`, of which the rest is forecast, should move to `go`: it saves `MOVE_SAVES`.

    Args:
        stay: the rest of the job where it is.
        go: the rest of the job there.
        move_credits: what the move itself costs [micro-credits].
        value_per_hour: what an hour is worth [micro-credits].
        move_s: time that the move takes beyond what `go` counts [s].
    """
    return go.score + move_credits + value_per_hour * move_s / 3600 < (1 - MOVE_SAVES) * stay.score


def listed_offers(documents: Sequence[Mapping[str, Any]]) -> tuple[list[ListedOffer], dict[str, Record]]:
    """Offers that are free and whose agent is there, and the records of agents, as the control plane shows them.

    Raises:
        PlaceFailed: one of them cannot be read.
    """
    offers, records = list[ListedOffer](), dict[str, Record]()
    for document in documents:
        if document.get("is_free") and document.get("is_present", True):
            listed, record = read_offer(document)
            offers.append(listed)
            records[listed.agent] = record
    return offers, records
