"""Overload: what a server still answers in time when more is asked of it than it can do.

    python -m bench.serving.overload [--seconds 8] [--rounds 3] [--within-ms 250] [--engine elsewhere]

A server in a process of its own serves an MLP of 400 layers (0.2 GFLOP a row); requests have a deadline. An open loop
(Poisson, latencies from when a request was due) asks at shares of its capacity, which a closed loop of 32 callers
measures first; rates are taken in turn, round after round. Recorded for each rate: answers in time a second (goodput),
against the best of all rates up to capacity (the peak); what was refused, and why; requests without any answer (the
bar: none); answers that came after their deadline; and the server's memory. The bar: at twice the capacity, goodput of
at least 90 % of the peak. With `--engine elsewhere` batches take 20 ms and 2 ms a row by waiting, as if a GPU computed
them: what is measured then is the server's own part, however busy these cores are with other things.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from bench.serving.mlp import mlp_artifact
from stoker import engines
from stoker.artifacts import Arrays
from stoker.devices import attached_cpu
from stoker.engines import Engine
from stoker.loadtesting.http_connection import address_of, ask
from stoker.loadtesting.inference_requests import http_request, infer_payload
from stoker.loadtesting.measurement import LoadTarget, at_rate, greet, with_callers
from stoker.loadtesting.server_process import served_in_child
from stoker.records.service import LoadMeasurement, Objective
from stoker.serving.server import ServerOptions, ServerStarted, run

WIDTHS, REPEATS = (512, 512, 10), 400
BASE_S, ROW_S = 0.020, 0.002
"""What a batch takes with `--engine elsewhere`."""
SHARES = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0)
CALLERS = 32
CONNECTIONS = 512


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--within-ms", type=float, default=250.0)
    parser.add_argument("--engine", default="onnxruntime", choices=["onnxruntime", "openvino", "elsewhere"])
    arguments = parser.parse_args()
    machine = attached_cpu()
    result = {
        "what": "goodput of a server at and beyond its capacity",
        "command": f"python -m bench.serving.overload --seconds {arguments.seconds:g} --rounds {arguments.rounds} "
        f"--within-ms {arguments.within_ms:g} --engine {arguments.engine}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{machine.model}, {machine.cores} cores, Python {platform.python_version()}",
        "libraries": {name: version_of(name) for name in ("onnxruntime", "openvino", "uvicorn", "uvloop")},
        **_measure(arguments),
    }
    text = json.dumps(result, indent=2)
    print(text)
    results = Path(__file__).parents[1] / "results"
    results.joinpath(f"serving_overload_{arguments.engine}_{result['date']}.json").write_text(text + "\n")


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    objective = Objective(q=0.99, within_s=arguments.within_ms / 1e3)
    with tempfile.TemporaryDirectory() as scratch:
        is_here = arguments.engine != "elsewhere"
        artifact = mlp_artifact(
            Path(scratch) / "mlp",
            WIDTHS,
            engine=arguments.engine if is_here else "onnxruntime",
            repeats=REPEATS if is_here else 1,
        )
        options = ServerOptions(
            places=(artifact.path.parent,),
            http_port=0,
            grpc_port=None,
            admin_port=0,
            watch_s=None,
            overrides=(f"deadline_s={objective.within_s}", "max_batch_rows=8"),
        )
        with served_in_child(run if is_here else run_elsewhere, options) as (started, pid):
            address = address_of(str(started.http))
            payload = infer_payload(address, "mlp", {"x": artifact.golden().inputs["x"][:1]})
            target = LoadTarget(address, [payload], connections=CONNECTIONS, objective=objective)
            greet(target)
            with_callers(target, CALLERS, 2.0)
            capacities, rates = [], {share: [] for share in SHARES}
            for number in range(arguments.rounds):
                capacities.append(with_callers(target, CALLERS, arguments.seconds / 2).throughput)
                for share in SHARES:
                    found = at_rate(target, share * capacities[-1], arguments.seconds, seed=number)
                    rates[share].append((found, _rss_mib(pid)))
            metrics = _metrics(str(started.admin))
    return _told(capacities, rates, metrics)


class Elsewhere:
    """An engine whose work is done by something else than these cores, as a GPU would: it waits."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, inputs: Arrays) -> Arrays:
        """The answers, after as long as a batch of so many rows takes."""
        answers = self._engine.run(inputs)
        time.sleep(BASE_S + ROW_S * len(inputs["x"]))
        return answers

    def close(self) -> None:
        """Give back what the real one has."""
        self._engine.close()


def run_elsewhere(options: ServerOptions, announce: Callable[[ServerStarted], None]) -> None:
    """Serve with engines that compute elsewhere."""
    load = engines.load
    engines.load = lambda *artifact, **how: tuple(Elsewhere(one) for one in load(*artifact, **how))
    run(options, announce)


def _told(
    capacities: list[float], rates: dict[float, list[tuple[LoadMeasurement, int]]], metrics: dict[str, float]
) -> dict[str, Any]:
    """Each rate against the peak of its own round, since neighbours come and go between rounds."""
    peaks = [
        max(found[number][0].goodput for share, found in rates.items() if share <= 1.0)
        for number in range(len(capacities))
    ]
    rows = {
        f"{share:g}": {
            "rate": _spread([one.rate or 0.0 for one, _ in found]),
            "goodput": _spread([one.goodput for one, _ in found]),
            "goodput_over_peak": _spread(
                [one.goodput / peak for (one, _), peak in zip(found, peaks, strict=True)], digits=3
            ),
            "mean_of_answers_ms": _spread([1e3 * one.mean_s for one, _ in found]),
            "requests": sum(one.requests for one, _ in found),
            "answered": sum(one.answered for one, _ in found),
            "answered_late": sum(one.answered - one.good for one, _ in found),
            "refused": dict(sum((Counter(_http(one)) for one, _ in found), Counter())),
            "without_an_answer": sum(sum(one.failures.values()) - sum(_http(one).values()) for one, _ in found),
            "server_rss_mib": max(rss for _, rss in found),
            "generator_late_p99_ms": _spread([1e3 * one.generator.late_p99_s for one, _ in found]),
        }
        for share, found in rates.items()
    }
    return {"capacity": _spread(capacities), "peak_goodput": _spread(peaks), "rates": rows, "metrics": metrics}


def _http(found: LoadMeasurement) -> dict[str, int]:
    """Refusals that came as an answer."""
    return {what: count for what, count in found.failures.items() if what.startswith("HTTP")}


def _spread(values: list[float], *, digits: int = 1) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def _rss_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS"))


def _metrics(admin: str) -> dict[str, float]:
    """Requests by outcome, and refusals by reason, as the server itself counted them."""
    address = address_of(admin)
    page = ask(address, http_request(address, "GET", "/metrics")).body.decode()
    names = ("stoker_total_seconds_count", "stoker_rejected_total", "stoker_deadline_miss_total")
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(names)
    }


if __name__ == "__main__":
    main()
