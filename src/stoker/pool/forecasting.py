"""Forecasts of a job on what a pool offers: Stoker's planner, corrected by the job's earlier leases.

What: the best plan's time on each kind of device, from the catalogue or from this machine; a CPU by its number of
cores, as if it were this machine's. Earlier leases of the same job on the same kind of device correct it.
Costs: a forecast for each kind; a CPU's plan is tried here, in seconds. Imports torch, so the control plane does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stoker.devices import attached_devices, planned_devices
from stoker.devices.catalogue import catalogue
from stoker.errors import BadJob, DoesNotFit, NoDevice
from stoker.jobs import Entry, Job
from stoker.launching.launch import identity_of
from stoker.launching.place_offers import bytes_to_send
from stoker.planning.decision import on_one, require_mtbf
from stoker.planning.planner import Planner
from stoker.planning.resolved_job import resolve_job
from stoker.pool.matching import Columns, Needs, Ranking, RunForecast, calibrated, earlier_ratios, rank_offers
from stoker.pool.state import ListedOffer, Record


def job_forecasts(
    job: Job, entry: Entry, leases: Sequence[Mapping[str, Any]] = ()
) -> Callable[[str], RunForecast | str]:
    """What `rank_offers` asks: the run on a kind of device, or why it cannot run there.

    Args:
        job: the job.
        entry: the job file it came from.
        leases: of the pool, as its control plane shows them: earlier ones of the job correct the forecast.
    """
    planner = Planner(resolve_job(job, entry), is_all_elsewhere=False, device_mtbf_h=require_mtbf(None))
    name = identity_of(entry)

    def forecast_of(word: str) -> RunForecast | str:
        kind, _, cores = word.partition("/")
        model = catalogue().called(kind)
        try:
            places = planned_devices(kind if model is None else model.name, attached_devices())
            limited = [place.limited_to(None, int(cores) if cores else None) for place in places]
            forecasts = [on_one(planner, place).chosen.forecast for place in limited]
        except (DoesNotFit, NoDevice, BadJob) as problem:
            return problem.message.split("\n", 1)[0]
        total = max((forecast.total_s for forecast in forecasts), key=lambda one: one.value)  # an alias: the slowest
        forecast = RunForecast.of_interval(total.value, total.low, total.high, basis=total.basis)
        return calibrated(forecast, earlier_ratios(leases, name, kind))

    return forecast_of


def rank_for_job(
    job: Job,
    entry: Entry,
    offers: Sequence[ListedOffer],
    records: Mapping[str, Record],
    *,
    needs: Needs,
    now_s: float,
    leases: Sequence[Mapping[str, Any]] = (),
    most: int = 20,
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
        most: how many of the best to describe.

    Raises:
        BadJob: the job cannot be trained as it is.
    """
    needs = replace(needs, sent_bytes=bytes_to_send(job, entry))
    columns = Columns.of(offers, records, now_s)
    return rank_offers(columns, needs, job_forecasts(job, entry, leases), most=most)
