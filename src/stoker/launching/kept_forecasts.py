"""Forecasts for places, kept for a day: a run that is submitted after `stoker plan --on` is not forecast a second time.

What: the forecast of a job on a device, before earlier runs of a place correct it, in the cache. It counts for the same
code and parameters, the same data, and the same version of PyTorch. It is of devices, not of an environment or options
there: by how much those differ is learned with the pace (`place_history`). Costs: reading the job's data once more to
compare them, only where there is such a forecast.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from stoker.devices import installed_torch
from stoker.errors import RunFailed
from stoker.jobs import Entry, Job
from stoker.planning.resolved_job import ResolvedJob, resolve_job
from stoker.records import Forecast, digest
from stoker.store import cache_root
from stoker.store.record_caches import RecordCache

KEPT_S = 86400.0
"""Age to which a forecast is kept [s]: others use the machine, and what is known of it changes."""


@dataclass(frozen=True, kw_only=True)
class KeptForecast:
    """A forecast, and the fingerprint and number of training samples that it was made for."""

    schema: ClassVar[int] = 1

    forecast: Forecast
    data: str
    num_train: int


def keep_forecast(prepared: ResolvedJob, device: str, forecast: Forecast) -> None:
    """Keep the forecast of a job file's job on `device`, a word of `stoker plan --on`."""
    if prepared.entry is None:
        return
    data = prepared.data
    kept = KeptForecast(forecast=forecast, data=data.fingerprint(), num_train=len(data.train))
    with suppress(RunFailed):  # a cache that cannot be written costs the next submission its forecast
        _cache().write(kept, _key(prepared.entry, device))


def kept_forecast(job: Job, entry: Entry, device: str) -> Forecast | None:
    """The forecast that was kept for this job on `device`; None if there is none, or its data have changed."""
    kept = _cache().read(_key(entry, device))
    if kept is None:
        return None
    data = resolve_job(job, entry).data
    is_same = (kept.data, kept.num_train) == (data.fingerprint(), len(data.train))
    return kept.forecast if is_same else None


def _cache() -> RecordCache[KeptForecast]:
    return RecordCache(
        cache_root(), "places/forecasts", KeptForecast, what="a forecast for a place", longest_kept_s=KEPT_S
    )


def _key(entry: Entry, device: str) -> str:
    build = installed_torch()
    return digest([entry.digest, entry.parameters, device, "" if build is None else build.version])
