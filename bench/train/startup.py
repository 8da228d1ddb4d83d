"""Seconds from starting a process to the end of its first update: Stoker against Lightning and a plain loop.

    python -m bench.train.startup [--case resnet9_w32] [--repeats 7] [--out FILE]

Stoker starts in three ways: cold, with a cache that knows nothing of the job; warm, the same command again, so that
the plan is there; and with the plan given in a file. Processes start one at a time, all ways in turn, in each repeat; a
start counts if others used less than 6 % of the CPUs meanwhile. All read the same files and build the same model.
Planning cold may take 5 % of the run that it forecasts; a warm first update may come a second after Lightning's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.forecast.registration import dated
from bench.train import results
from bench.train.cases import CASES, Case, quick
from bench.train.contenders import CONTENDERS
from bench.train.contenders.plan_file import PLAN_FILE
from bench.train.driving import MOST_OTHERS, TRIES, Running, Start
from bench.train.intervals import interval_of
from bench.train.material import prepare
from stoker.records.codec import JSON

WARM_BAR_S = 1.0
"""How much later than Lightning's Stoker's first update may come, its plan cached [s]."""

PLANNING_BAR = 0.05
"""Share of the forecast run that planning may take."""


@dataclass(frozen=True)
class Way:
    """A way to start: who, and whether the cache of the last cold start is there."""

    name: str
    contender: str
    is_cold: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def ways(folder: Path) -> list[Way]:
    """Everybody's ways; the cold one leaves the cache and the plan that the two after it find."""
    cache = {"STOKER_CACHE": str(folder / "cache")}
    return [
        Way("lightning", "lightning"),
        Way("plain", "plain"),
        Way("stoker_cold", "stoker", is_cold=True, environment=cache),
        Way("stoker_warm", "stoker", environment=cache),
        Way("stoker_given", "stoker", environment=cache | {PLAN_FILE: str(folder / "plan.json")}),
    ]


def start_once(way: Way, case: Case, folder: Path, *, is_quick: bool) -> Start:
    """One start, whose process ends after it."""
    contender = CONTENDERS[way.contender]
    contender = dataclasses.replace(contender, environment={**contender.environment, **way.environment})
    if way.is_cold:
        shutil.rmtree(folder / "cache", ignore_errors=True)
    with Running(contender, case, folder, is_quick=is_quick) as process:
        start = process.started()
    if way.is_cold:
        (folder / "plan.json").write_text(json.dumps(start.notes["plan"]), encoding="utf-8")
    return start


def summary(starts: Mapping[str, Sequence[Mapping[str, JSON]]], most_others: float) -> dict[str, JSON]:
    """Seconds to the first update by way, how much later than Lightning's, and what planning takes of the run."""
    clean = {
        name: [start["first_update_s"] if start["others"] < most_others else None for start in of]
        for name, of in starts.items()
    }
    found: dict[str, JSON] = {"first_update_s": {}, "after_lightning_s": {}}
    for name, seconds in clean.items():
        own = interval_of([[one for one in seconds if one is not None]])
        both = zip(seconds, clean.get("lightning", [None] * len(seconds)), strict=True)
        later = interval_of([[mine - its for mine, its in both if mine is not None and its is not None]])
        found["first_update_s"][name] = None if own is None else dataclasses.asdict(own)
        found["after_lightning_s"][name] = None if later is None else dataclasses.asdict(later)
    shares = [start["notes"]["took_s"] / start["notes"]["forecast_s"] for start in starts["stoker_cold"]]
    planning = interval_of([shares])
    found["planning_share"] = None if planning is None else dataclasses.asdict(planning)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="resnet9_w32", choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one repeat of a tiny case, to see that it works")
    parser.add_argument("--out", type=Path, help="where results go (default: bench/results, dated)")
    given = parser.parse_args(arguments)
    case, repeats = CASES[given.case], given.repeats
    most_others = MOST_OTHERS
    if given.quick:
        case, repeats, most_others = quick(case), 1, 2.0
    path = given.out or dated(f"train_startup{'_quick' if given.quick else ''}_{case.name}")
    command = f"python -m bench.train.startup --case {case.name} --repeats {repeats}"
    content = results.document("seconds to the first update", command, CONTENDERS["lightning"].versions())
    content |= {"case": dataclasses.asdict(case), "most_others": most_others, "starts": {}}
    with tempfile.TemporaryDirectory(prefix="bench-startup-") as folder:
        prepare(case, Path(folder))
        for _ in range(repeats):
            for way in ways(Path(folder)):
                if CONTENDERS[way.contender].missing():
                    content.setdefault("missing", []).append(way.name)
                    continue
                start = _undisturbed(way, case, Path(folder), most_others, is_quick=given.quick)
                content["starts"].setdefault(way.name, []).append(dataclasses.asdict(start))
                print(f"  {way.name}: {start.first_update_s:.2f} s (others: {start.others:.0%})", flush=True)
                results.save(path, content)
    content |= summary(content["starts"], most_others)
    results.save(path, content)
    print("\n".join(told(content)))
    return 0 if is_met(content) or given.quick else 1


def _undisturbed(way: Way, case: Case, folder: Path, most_others: float, *, is_quick: bool) -> Start:
    """A start that counts, or the last of four."""
    for _ in range(TRIES - 1):
        start = start_once(way, case, folder, is_quick=is_quick)
        if start.others < most_others:
            return start
    return start_once(way, case, folder, is_quick=is_quick)


def is_met(content: Mapping[str, JSON]) -> bool:
    """Whether both bars are met, by their medians."""
    later, share = content["after_lightning_s"].get("stoker_warm"), content["planning_share"]
    return bool(later and share and later["median"] <= WARM_BAR_S and share["median"] <= PLANNING_BAR)


def told(content: Mapping[str, JSON]) -> list[str]:
    """The results, a line for each way."""
    lines = []
    for name, seconds in content["first_update_s"].items():
        later = content["after_lightning_s"][name]
        words = "no start counts" if seconds is None else f"{seconds['median']:.2f} s"
        if later is not None:
            words += f", {later['median']:+.2f} s ({later['low']:+.2f} to {later['high']:+.2f}) against Lightning"
        lines.append(f"{name:14s} {words}")
    share = content["planning_share"]
    lines.append(f"planning takes {share['median']:.1%} of the run it forecasts (bar: {PLANNING_BAR:.0%})")
    return lines


if __name__ == "__main__":
    sys.exit(main())
