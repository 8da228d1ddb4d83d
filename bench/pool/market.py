"""Regret of the match in a simulated market of 10,000 offers, and the time that it takes.

    python -m bench.pool.market

Real: the prices (the built-in table, a row for each offer, varied by a tenth as owners would), the devices (the
catalogue's), and the errors of forecasts: ratios of measured to forecast time from bench/results, one drawn for each
job and kind of device (73 cases of GPUs that were not at hand). Assumed, and stated in the result: jobs (arithmetic,
memory traffic, memory, bytes), how much machines of one kind differ, how often machines are lost, how long their
records are. The renter sees forecasts, offers and records; the truth has the drawn errors, each machine's own speed and
its own rate of loss. Regret: expected cost (money and the worth of the hours) of the offer that was taken, beyond that
of the offer that is best in truth, over the latter.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from stoker.devices.catalogue import CatalogueEntry, builtin_catalogue
from stoker.devices.prices import builtin_prices
from stoker.pool.events import CREDIT, Measured, Offer, OfferedDevice
from stoker.pool.matching import Columns, Needs, RunForecast, expected_costs, rank_offers, worth_probing
from stoker.pool.state import ListedOffer, Record
from stoker.units import GIB

RESULTS = Path(__file__).parents[1] / "results"
COLD = ("published_steps_2026-11-25", "gpu_latency_24-points_2026-11-25")
TRIED = "cpu_step_time_planned_2026-11-22"
NOW_S = 1.8e9
MACHINE_SPREAD, PRICE_SPREAD, PROBED_FLOPS_SPREAD = 0.05, 0.10, 0.02
MEAN_LOSS_EVERY_H, MEAN_RECORD_H = 48.0, 200.0
PROBE_S = 60.0


def cold_errors() -> list[float]:
    """Measured / forecast time of devices that were not at hand."""
    cases = [case for name in COLD for case in json.loads((RESULTS / f"{name}.json").read_text())["cases"]]
    return [case["measured_ms"] / case.get("forecast_ms", case.get("predicted_ms")) for case in cases]


def tried_errors() -> list[float]:
    """Measured / forecast time after a trial of about a second of the job (on a CPU whose cores others share)."""
    runs = json.loads((RESULTS / f"{TRIED}.json").read_text())["runs"]
    return [case["measured_ms"] / case["planned"]["forecast_ms"] for run in runs for case in run["cases"]]


@dataclass(frozen=True)
class Market:
    """Offers, and the truth about their machines: speed against their kind's, rate of loss [1/h]."""

    columns: Columns
    speed: Any
    hazard: Any
    entries: dict[str, CatalogueEntry]


def rates(entry: CatalogueEntry) -> tuple[float, float]:
    """Rate of matrix products [FLOP/s] and of memory [bytes/s], by the datasheet."""
    best = next(value for name in ("bf16", "fp16", "fp32") if (value := entry.value(f"dense_tflops_{name}")))
    return best * 1e12, (entry.value("bandwidth_gb_per_s") or 0.0) * 1e9


def make_market(num_offers: int, draw: random.Random) -> Market:
    """Offers of GPUs at prices of the table."""
    known = {entry.name: entry for entry in builtin_catalogue().entries if entry.kind == "cuda"}
    rows = [price for price in builtin_prices() if price.device in known and price.usd_per_hour > 0]
    offers, records, speeds, hazards = [], {}, [], []
    for number in range(num_offers):
        row = draw.choice(rows)
        entry = known[row.device]
        speed = math.exp(draw.gauss(0, MACHINE_SPREAD))
        hazard = draw.gammavariate(0.7, 1 / (0.7 * MEAN_LOSS_EVERY_H))
        ran_h = draw.expovariate(1 / MEAN_RECORD_H)
        agent = f"{number:064x}"
        lost = int(np.random.default_rng(draw.randrange(2**32)).poisson(hazard * ran_h))
        records[agent] = Record(ran_s=3600 * ran_h, lost=lost, finished=int(ran_h / 5), passed=int(ran_h / 5))
        link = 10 ** draw.uniform(6.3, 8.3)
        offer = Offer(
            offer_id=f"offer-{number}",
            isolation=draw.choice(["podman", "gvisor", "bubblewrap"]),
            device=OfferedDevice(kind=row.device, memory_bytes=entry.usable_memory_bytes),
            measured=Measured(fp32_flop_per_s=rates(entry)[0] * speed * math.exp(draw.gauss(0, PROBED_FLOPS_SPREAD))),
            price_per_hour=round(row.usd_per_hour * math.exp(draw.gauss(0, PRICE_SPREAD)) * CREDIT),
            upload_bytes_per_s=link / 4,
            download_bytes_per_s=link,
            disk_bytes=10**12,
            expires_s=NOW_S + 600,
            max_s=draw.choice([6, 24, 7 * 24]) * 3600,
        )
        offers.append(ListedOffer(offer=offer, agent=agent, offered_s=NOW_S))
        speeds.append(speed)
        hazards.append(hazard)
    return Market(Columns.of(offers, records, NOW_S), np.array(speeds), np.array(hazards), known)


@dataclass(frozen=True)
class SimulatedJob:
    """Arithmetic [FLOP], memory traffic [bytes], memory [bytes], and what else the renter knows."""

    flop: float
    traffic: float
    memory_bytes: float
    needs: Needs


def make_job(draw: random.Random) -> SimulatedJob:
    """Half an hour to a day on an H100, from bound by arithmetic to bound by memory."""
    hours = 10 ** draw.uniform(math.log10(0.5), math.log10(24))
    share = draw.uniform(0.1, 0.9)
    state = 10 ** draw.uniform(0, 1.7) * GIB
    return SimulatedJob(
        flop=hours * 3600 * share * 0.5 * 989e12,
        traffic=hours * 3600 * (1 - share) * 0.8 * 3.35e12,
        memory_bytes=state,
        needs=Needs(
            value_per_hour=draw.choice([0, 1, 5]) * CREDIT,
            sent_bytes=10 ** draw.uniform(8, 10.5),
            result_bytes=state / 4,
            checkpoint_bytes=state * 0.75,
            checkpoint_blocked_s=1 + state / 2e9,
            verify_fraction=draw.choice([0.0, 0.05]),
            setup_s=60,
        ),
    )


def forecasts_of(job: SimulatedJob, market: Market, spread: float) -> dict[str, RunForecast | str]:
    """The renter's forecast on each kind: half of the printed arithmetic rate, and 80 % of the bandwidth after it."""
    found: dict[str, RunForecast | str] = {}
    for name in market.columns.kinds:
        entry = market.entries[name]
        flop_per_s, bytes_per_s = rates(entry)
        if entry.usable_memory_bytes < job.memory_bytes:
            found[name] = "has too little memory"
        else:
            run_s = job.flop / (0.5 * flop_per_s) + job.traffic / (0.8 * bytes_per_s)
            found[name] = RunForecast(run_s=run_s, spread=spread, reference_flop_per_s=flop_per_s)
    return found


def judge(
    job: SimulatedJob, market: Market, draw: random.Random, cold: list[float], tried: list[float]
) -> dict[str, Any]:
    """Regrets of the ways to choose, for one job."""
    spread = statistics.pstdev(math.log(error) for error in cold)
    seen = forecasts_of(job, market, spread)
    error = {kind: draw.choice(cold) for kind in market.columns.kinds}
    real = [
        replace(one, run_s=one.run_s * error[kind], spread=0.0, reference_flop_per_s=1.0)
        if isinstance(one, RunForecast)
        else RunForecast(run_s=math.inf)
        for kind, one in seen.items()
    ]
    truth = expected_costs(
        replace(market.columns, flop_per_s=market.speed, hazard=market.hazard), job.needs, real
    ).score
    best = float(np.nanmin(truth))
    started, cpu_s = time.perf_counter(), time.process_time()
    ranking = rank_offers(market.columns, job.needs, lambda kind: seen[kind])
    took_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
    index = {listed.offer.offer_id: number for number, listed in enumerate(market.columns.offers)}

    def cost(match: Any) -> float:
        return float(truth[index[match.listed.offer.offer_id]])

    assert ranking.best is not None
    probes = worth_probing(ranking, job.needs.value_per_hour)
    known = dict(seen)
    for match in probes:
        kind = match.listed.offer.device.kind
        now = seen[kind]
        assert isinstance(now, RunForecast)
        told = error[kind] / draw.choice(tried)  # what the trial says, whose own error is measured / told
        known[kind] = replace(now, run_s=now.run_s * told, spread=statistics.pstdev(math.log(one) for one in tried))
    paid = sum(match.listed.offer.price_per_hour * PROBE_S / 3600 for match in probes)
    paid += job.needs.value_per_hour * PROBE_S / 3600 if probes else 0.0
    probed = rank_offers(market.columns, job.needs, lambda kind: known[kind]).best
    usable = np.isfinite(truth)
    price = np.where(usable, market.columns.price, np.inf)
    rate = np.array([rates(market.entries[kind])[0] for kind in market.columns.kinds])[market.columns.kind]
    return {
        "forecast": cost(ranking.best) / best - 1,
        "forecast and probes": (cost(probed) + paid) / best - 1,
        "price an hour": float(truth[int(np.argmin(price))]) / best - 1,
        "FLOP/s for the money": float(truth[int(np.argmin(price / rate))]) / best - 1,
        "probes": len(probes),
        "value_per_hour": job.needs.value_per_hour,
        "took_s": took_s,
        "cpu_s": cpu_s,
    }


WAYS = ("forecast", "forecast and probes", "price an hour", "FLOP/s for the money")


def main() -> None:
    """Simulate, print, and write the result."""
    options = argparse.ArgumentParser()
    options.add_argument("--offers", type=int, default=10_000)
    options.add_argument("--jobs", type=int, default=300)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    draw = random.Random(given.seed)
    cold, tried = cold_errors(), tried_errors()
    market = make_market(given.offers, draw)
    records = {listed.agent: Record() for listed in market.columns.offers}
    started = time.process_time()
    Columns.of(market.columns.offers, records, NOW_S)
    columns_s = time.process_time() - started
    rows = [judge(make_job(draw), market, draw, cold, tried) for _ in range(given.jobs)]
    summary = {
        way: {
            "mean": statistics.mean(row[way] for row in rows),
            "median": statistics.median(row[way] for row in rows),
            "p90": sorted(row[way] for row in rows)[int(0.9 * len(rows))],
            "worst": max(row[way] for row in rows),
        }
        for way in WAYS
    }
    values = sorted({row["value_per_hour"] for row in rows})
    by_value = {
        f"{value / CREDIT:g} USD an hour": {
            way: statistics.mean(row[way] for row in rows if row["value_per_hour"] == value) for way in WAYS
        }
        for value in values
    }
    took, cpu = (sorted(row[name] for row in rows) for name in ("took_s", "cpu_s"))
    print(f"{given.jobs} jobs, {given.offers} offers of {len(market.columns.kinds)} kinds; regret [%]:")
    for way, figures in summary.items():
        print(f"  {way:<22}" + "  ".join(f"{name} {100 * value:.1f}" for name, value in figures.items()))
    print(f"  a match takes {1e3 * statistics.median(took):.1f} ms (slowest {1e3 * took[-1]:.1f}), of CPU", end="")
    print(f" {1e3 * statistics.median(cpu):.1f} ms (most {1e3 * cpu[-1]:.1f}), columns {1e3 * columns_s:.0f} ms of CPU")
    document = {
        "what": __doc__,
        "command": "python -m bench.pool.market",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "offers": given.offers,
        "jobs": given.jobs,
        "seed": given.seed,
        "kinds": list(market.columns.kinds),
        "errors_from": {"cold": COLD, "tried": TRIED, "cold_cases": len(cold), "tried_cases": len(tried)},
        "assumed": {
            "machines_of_a_kind_differ_by": MACHINE_SPREAD,
            "owners_vary_prices_by": PRICE_SPREAD,
            "probe_of_a_machine_is_off_by": PROBED_FLOPS_SPREAD,
            "mean_time_between_losses_h": MEAN_LOSS_EVERY_H,
            "mean_record_h": MEAN_RECORD_H,
            "probe_s": PROBE_S,
        },
        "bars": {"regret_mean": 0.05, "match_s": 0.1},
        "regret": summary,
        "mean_regret_by_worth_of_an_hour": by_value,
        "match_s": {"median": statistics.median(took), "worst": took[-1]},
        "match_cpu_s": {"median": statistics.median(cpu), "worst": cpu[-1], "columns": columns_s},
        "rows": rows,
    }
    path = RESULTS / f"pool_market_{document['date']}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
