"""Services of `stoker serve` by their metrics: rates, latencies, queues and rejections over time.

Asked are only the addresses that the user named, while a page shows them. A history of some minutes is kept here.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import time
import urllib.request
from collections import deque
from collections.abc import Iterable, Mapping
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from stoker.errors import BadJob
from stoker.records.codec import JSON

_MOST_BYTES = 8 * 2**20
_KEPT = 300
_TIMEOUT_S = 2.0
_LINE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Series = dict[tuple[str, str, str], dict[tuple[tuple[str, str], ...], float]]
"""By (metric, model, version): values by their other labels."""


def parse_metrics(text: str) -> Series:
    """Values of a page in Prometheus' text format, of the metrics that have a model; other lines are left out.

    >>> parse_metrics('stoker_queue_rows{model="m",version="1"} 3.0')
    {('stoker_queue_rows', 'm', '1'): {(): 3.0}}
    """
    found: Series = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else _LINE.match(line)
        if match is None or not match["name"].startswith("stoker_"):
            continue
        labels = dict(_LABEL.findall(match["labels"] or ""))
        try:
            value = float(match["value"])
        except ValueError:
            continue
        key = (match["name"], labels.pop("model", "")[:80], labels.pop("version", "")[:20])
        found.setdefault(key, {})[tuple(sorted(labels.items()))] = value
    return found


def quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """The value that a share `q` of a histogram is below, by cumulative counts of its buckets; None of an empty one.

    Between the bounds of a bucket the count is taken to rise evenly.

    >>> quantile({0.1: 50.0, 0.2: 100.0, float("inf"): 100.0}, 0.75)
    0.15000000000000002
    """
    bounds = sorted(buckets)
    whole = buckets[bounds[-1]] if bounds else 0.0
    if whole <= 0:
        return None
    below, start = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= q * whole:
            if math.isinf(bound) or buckets[bound] == below:
                return start
            return start + (bound - start) * (q * whole - below) / (buckets[bound] - below)
        below, start = buckets[bound], bound
    return start


class Service:
    """One service, by the address of its metrics.

    Raises:
        BadJob: the address is none of HTTP.
    """

    def __init__(self, address: str) -> None:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadJob(
                f"--service {address}: wanted the address of a service's admin port",
                remedy="Such as http://127.0.0.1:8002.",
            )
        self.address = f"{parts.scheme}://{parts.netloc}"
        self.problem = "not asked yet"
        self._samples: deque[tuple[float, Series]] = deque(maxlen=_KEPT)

    def ask(self) -> None:
        """Read the metrics now; what goes wrong is kept as `problem`."""
        try:
            with _OPENER.open(f"{self.address}/metrics", timeout=_TIMEOUT_S) as answer:
                content = answer.read(_MOST_BYTES)
        except (OSError, ValueError, HTTPException) as problem:  # URLError is an OSError
            self.problem = f"does not answer: {getattr(problem, 'reason', problem)}"[:200]
            return
        self.problem = ""
        self._samples.append((time.time(), parse_metrics(content.decode("utf-8", "replace"))))

    def document(self) -> dict[str, JSON]:
        """What the page shows: for each version rates, quantiles, batches, queue, rejections, and their history."""
        last = [key for _, series in list(self._samples)[-1:] for key in series]
        versions = sorted({key[1:] for key in last if key[1] and key[2]})  # refusals are counted of a model alone
        return {
            "address": self.address,
            "problem": self.problem,
            "versions": [self._version(*one) for one in versions[:100]],
        }

    def _version(self, model: str, version: str) -> dict[str, JSON]:
        samples = list(self._samples)
        history: list[list[JSON]] = []
        for (at, before), (now, after) in itertools.pairwise(samples):
            total = _gained(before, after, "stoker_total_seconds", model, version)
            count = _histogram_count(total)
            p50, p99 = (quantile(_buckets(total), q) for q in (0.5, 0.99))
            history.append(
                [now, count / max(1e-9, now - at), p50, p99, _gauge(after, "stoker_queue_rows", model, version)]
            )
        last = samples[-1][1]
        first = samples[max(0, len(samples) - 31)][1]
        total, queue, rows = (
            _gained(first, last, f"stoker_{name}", model, version)
            for name in ("total_seconds", "queue_seconds", "batch_rows")
        )
        info = next(iter(last.get(("stoker_model_info", model, version), {})), ())
        rejected = last.get(("stoker_rejected_total", model, ""), {})
        batches = _histogram_count(rows)
        return {
            "model": model,
            "version": version,
            "info": dict(info),
            "is_ready": bool(_gauge(last, "stoker_model_ready", model, version)),
            "queue_rows": _gauge(last, "stoker_queue_rows", model, version),
            "p50_s": quantile(_buckets(total), 0.5),
            "p99_s": quantile(_buckets(total), 0.99),
            "queue_p99_s": quantile(_buckets(queue), 0.99),
            "mean_rows": _sum(rows) / batches if batches else None,
            "rejected": {
                " ".join(value for _, value in labels) or "rejected": count for labels, count in rejected.items()
            },
            "history": history,
        }


Gained = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def _gained(before: Series, after: Series, name: str, model: str, version: str) -> Gained:
    """What a histogram counted between two pages; of a service that was restarted, all of it."""
    found: Gained = {}
    for part in ("_bucket", "_count", "_sum"):
        old = before.get((name + part, model, version), {})
        new = after.get((name + part, model, version), {})
        for labels, value in new.items():
            gained = value - old.get(labels, 0.0)
            found[(part, labels)] = gained if gained >= 0 else value
    return found


def _buckets(gained: Gained) -> dict[float, float]:
    """Cumulative counts by the buckets' bounds, without refusals, which take no time and would hide slow answers."""
    counts: dict[float, float] = {}
    for (part, labels), value in gained.items():
        known = dict(labels)
        if part == "_bucket" and known.get("outcome", "ok") == "ok":
            bound = float(known.get("le", "inf").replace("+Inf", "inf"))
            counts[bound] = counts.get(bound, 0.0) + value
    return counts


def _histogram_count(gained: Gained) -> float:
    return sum(value for (part, _), value in gained.items() if part == "_count")


def _sum(gained: Gained) -> float:
    return sum(value for (part, _), value in gained.items() if part == "_sum")


def _gauge(series: Series, name: str, model: str, version: str) -> float | None:
    return next(iter(series.get((name, model, version), {}).values()), None)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none: only the addresses that the user named are asked."""


_OPENER = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))


async def ask_all(services: Iterable[Service]) -> None:
    """Ask all of them at once."""
    await asyncio.gather(*(asyncio.to_thread(service.ask) for service in services))
