"""Memory of a run that chooses its plan by its first updates, against that of the plan alone.

    python -m bench.train.trial_memory [--case gpt lstm …] [--out FILE]

In a fresh process a case is trained by `stoker.train` until it has settled and made some more updates: the peak of
resident memory so far, and what is resident then. In another one the settled plan makes a few updates of the same job,
with nothing tried before: the peak of that is what the plan itself needs. Both hold the case's material.
Bytes hardly depend on other load; the times that decide which plan is settled on do, and the plan is written with them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.forecast.registration import dated
from bench.train.cases import CASES, quick
from bench.train.contenders.stoker_job import the_job
from bench.train.material import prepare, read
from stoker import records
from stoker.devices.malloc import apply_malloc, resident_bytes
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.profiling.plan_trial import PeakMemory
from stoker.records import Plan, Position
from stoker.stepping.coupling import unprobed
from stoker.stepping.step import Step

UPDATES = 5
"""Updates under the settled plan alone: its optimiser's state, and its heap, are there after two."""

SECONDS_AFTER = 3.0
"""How long a run goes on after it has settled [s]."""


def chosen_by_trials(case_name: str, folder: Path, *, is_quick: bool) -> None:
    """Train until settled, print the plan and the memory as JSON, and end the process."""
    import stoker  # noqa: PLC0415 - as a user's process has it

    case = quick(CASES[case_name]) if is_quick else CASES[case_name]
    peak, settled = PeakMemory("cpu").__enter__(), dict[str, Any]()

    def note(event: records.Event) -> None:
        if event.kind == "settled":
            settled.update(at=event.at, plan=event.fields["plan"], forecast=event.fields["forecast"]["peak_bytes"])
            settled["peak_bytes"], settled["tried"] = peak.num_bytes, event.fields["took_updates"]
        elif event.kind == "progress" and settled and event.at - settled["at"] > SECONDS_AFTER:
            answer = {
                "plan": settled["plan"],
                "updates_in_trials": settled["tried"],
                "forecast_peak_bytes": round(settled["forecast"]["value"]),
                "peak_until_settled_bytes": settled["peak_bytes"],
                "peak_bytes": peak.num_bytes,
                "resident_after_bytes": resident_bytes(),
            }
            print(json.dumps(answer), flush=True)
            os._exit(0)

    stoker.train(the_job(read(case, folder)), new=True, checkpoint_every=stoker.seconds(1e7), sink=note)
    raise SystemExit(f"{case_name} ended before it had settled; give the case more epochs")


def under_the_plan_alone(case_name: str, folder: Path, plan: Plan, *, is_quick: bool) -> None:
    """Make a few updates under a plan and print the peak of memory as JSON."""
    case = quick(CASES[case_name]) if is_quick else CASES[case_name]
    job = the_job(read(case, folder))
    torch.set_num_threads(plan.intra_op_threads or torch.get_num_threads())
    apply_malloc(plan.malloc)
    data = datasets_of(job)
    with PeakMemory("cpu") as peak:
        step = Step(job, plan, unprobed(job))
        source = BatchSource(data.train, step.pipeline(data.train, augmented=True), data.extent(job), job.seed, plan)
        for update, batch in enumerate(source.batches(Position(), UPDATES)):
            step.update(batch, update, update / 100)
    print(json.dumps({"peak_bytes": peak.num_bytes, "resident_bytes": resident_bytes()}))


def measured(name: str, *, is_quick: bool) -> dict[str, Any]:
    """Both, in fresh processes."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(quick(CASES[name]) if is_quick else CASES[name], folder)
        chosen = _in_fresh_process([name, "--folder", place], folder, is_quick=is_quick)
        (folder / "plan.json").write_text(json.dumps(chosen["plan"]), encoding="utf-8")
        alone = _in_fresh_process([name, "--folder", place, "--plan", place + "/plan.json"], folder, is_quick=is_quick)
    return {
        "case": name,
        **{key: value for key, value in chosen.items() if key != "plan"},
        "plan": records.from_json(chosen["plan"], Plan).in_words(),
        "alone_peak_bytes": alone["peak_bytes"],
        "peak_over_alone": chosen["peak_bytes"] / alone["peak_bytes"],
        "forecast_error": chosen["forecast_peak_bytes"] / chosen["peak_bytes"] - 1,
    }


def _in_fresh_process(words: list[str], folder: Path, *, is_quick: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.train.trial_memory", "--one", *words, *(["--quick"] if is_quick else [])]
    home = {"STOKER_CACHE": str(folder / "cache"), "STOKER_RUNS": str(folder / "runs")}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | home)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    """Measure the cases, print a line for each and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=["gpt", "lstm", "resnet9_w16", "mlp"])
    parser.add_argument("--quick", action="store_true", help="tiny cases: shows that it runs")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one and given.plan:
        plan = records.from_json(json.loads(given.plan.read_text(encoding="utf-8")), Plan)
        under_the_plan_alone(given.one, given.folder, plan, is_quick=given.quick)
        return
    if given.one:
        chosen_by_trials(given.one, given.folder, is_quick=given.quick)
    rows = []
    for name in given.case:
        rows.append(measured(name, is_quick=given.quick))
        row = rows[-1]
        mib = {key: value / 2**20 for key, value in row.items() if key.endswith("_bytes")}
        print(
            f"{name:12} peak {mib['peak_bytes']:6.0f} MiB, {row['peak_over_alone']:.2f}x of the "
            f"{mib['alone_peak_bytes']:.0f} that the plan alone needs; resident after "
            f"{mib['resident_after_bytes']:.0f}; forecast {row['forecast_error']:+.1%}; {row['plan']}",
            flush=True,
        )
    result = {
        "what": "resident memory of runs that choose their plan by their first updates, and of the plan alone",
        "command": f"python -m bench.train.trial_memory --case {' '.join(given.case)}",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"torch": torch.__version__},
        "cases": rows,
    }
    path = given.out or dated("trial_memory")
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
