"""Forecasts of a job on what a pool offers: Stoker's planner, corrected by the job's earlier leases.

What: the best plan's time on each kind of device, from the catalogue or from this machine; a CPU by its number of
cores, as if it were this machine's; several devices under the fastest layout over all of them. Earlier leases of the
same job on the same kind of device correct it; on an offer where the job has run, if only for a minute, it is as fast
as it was there.
Costs: a forecast for each kind; a CPU's plan is tried here, in seconds. Imports torch, so the control plane does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from stoker.devices.catalogue import catalogue
from stoker.errors import BadJob, DoesNotFit, NoDevice
from stoker.jobs import Entry, Job
from stoker.launching.launch import identity_of
from stoker.launching.place_offers import slowest_plan, to_send
from stoker.planning.decision import require_mtbf
from stoker.planning.planner import Planner
from stoker.planning.resolved_job import resolve_job
from stoker.pool.client import PoolClient
from stoker.pool.matching import (
    Columns,
    Needs,
    Ranking,
    RunForecast,
    after_runs,
    calibrated,
    earlier_ratios,
    earlier_runs,
    rank_offers,
)
from stoker.pool.shown_lease import ShownLease
from stoker.pool.state import ListedOffer, Record

_MOST_RUNS = 20


def job_forecasts(
    job: Job, entry: Entry, leases: Sequence[ShownLease] = (), *, sites: int = 1
) -> Callable[[str], RunForecast | str]:
    """What `rank_offers` asks: the run on a kind of device, or why it cannot run there.

    A word with an offer's name in it (`cpu/4@box`) is for that offer, where the job has run before.

    Args:
        job: the job.
        entry: the job file it came from.
        leases: of the pool: earlier ones of the job correct the forecast; see `leases_before`.
        sites: that train the job together: the run is that of one of them.
    """
    prepared = replace(resolve_job(job, entry), sites=sites)
    planner = Planner(prepared, is_all_elsewhere=False, device_mtbf_h=require_mtbf(None))
    identity = identity_of(entry)
    runs = earlier_runs(leases, identity, sites=sites)

    def forecast_of(word: str) -> RunForecast | str:
        device, _, offer_id = word.partition("@")
        number, _, cores = device.partition("/")
        count, kind = _count_of(number)
        model = catalogue().called(kind)
        try:
            name = kind if model is None else model.name
            name = f"{count}x{name}" if count > 1 else name
            found = slowest_plan(planner, name, None, int(cores) if cores else None).forecast
        except (DoesNotFit, NoDevice, BadJob) as problem:
            return problem.message.split("\n", 1)[0]
        total, updates = found.total_s, found.total_updates
        forecast = RunForecast.of_interval(total.value, total.low, total.high, basis=total.basis, total_updates=updates)
        if offer_id in runs:
            return after_runs(forecast, runs[offer_id], updates)
        return calibrated(forecast, earlier_ratios(leases, identity, kind, count))

    return forecast_of


def _count_of(word: str) -> tuple[int, str]:
    """Number and kind of devices.

    >>> _count_of("8xh100"), _count_of("xpu")
    ((8, 'h100'), (1, 'xpu'))
    """
    count, times, kind = word.partition("x")
    return (int(count), kind) if times and count.isdigit() else (1, word)


def rank_for_job(
    job: Job,
    entry: Entry,
    offers: Sequence[ListedOffer],
    records: Mapping[str, Record],
    *,
    needs: Needs,
    now_s: float,
    leases: Sequence[ShownLease] = (),
) -> Ranking:
    """Offers for a job by expected money and hours to finish; what has to be sent is added to `needs`.

    Args:
        job: the job.
        entry: the job file it came from.
        offers: that can be taken; see `matching.listed_offers`.
        records: of their agents.
        needs: what the renter wants.
        now_s: the clock [s since 1970].
        leases: of the pool; see `job_forecasts`.

    Raises:
        BadJob: the job cannot be trained as it is.
    """
    needs = replace(needs, sent_bytes=to_send(job, entry)[0])
    columns = Columns.of(offers, records, now_s, earlier_runs(leases, identity_of(entry)))
    return rank_offers(columns, needs, job_forecasts(job, entry, leases))


def leases_before(client: PoolClient, entry: Entry) -> list[ShownLease]:
    """The newest leases of the pool; the newest of the job with their blocks, which lists leave out."""
    job, leases = identity_of(entry), sorted(client.leases(), key=lambda one: -one.opened_s)
    mine = [lease.lease_id for lease in leases if lease.forecast.job == job][:_MOST_RUNS]
    return [client.lease(lease.lease_id) if lease.lease_id in mine else lease for lease in leases]
