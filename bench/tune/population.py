"""What a population makes of the same first settings and the same training as random search.

    python -m bench.tune.population [--seeds 3] [--members 8] [--intervals 3]

For each seed random search trains as many configurations to their end as the population has members; they are the ones
that the members begin with, so that both train the same number of samples. `examples/tune_me.py` on the handwritten
digits, judged by the accuracy on 287 held-out images; only settings that can change in the middle of a run. In this
process, under one plan.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import stoker
from bench.forecast.registration import surroundings
from bench.tune.search import RESULTS, ROOT
from stoker.records import Plan
from stoker.records.codec import JSON

SPACE = "lr=log(1e-4,1) momentum=float(0,0.99) weight_decay=log(1e-6,1e-2) dropout=float(0,0.6)"


def searched(seed: int, members: int, **rule: Any) -> dict[str, JSON]:
    """What a study finds: the best value, how good the members are, what they took."""
    began = time.perf_counter()
    study = stoker.tune(
        ROOT / "examples" / "tune_me.py",
        SPACE,
        fixed={"batch": "64", "epochs": "9"},
        trials=members,
        seed=seed,
        plan=Plan(device="cpu", micro_batch=64),
        planned=0,
        in_processes=False,
        **rule,
    )
    finished = [one for one in study.trials if one.state == "finished" and one.value is not None]
    return {
        "best": finished[0].value,
        "median": finished[len(finished) // 2].value,
        "finished": len(finished),
        "samples": study.result.samples,
        "took_s": time.perf_counter() - began,
        "course": [
            {"trial": one.number, "parameters": one.parameters, "curve": one.curve}
            for one in study.result.lineage(finished[0].number)
        ],
    }


def main() -> int:
    """Compare them; 0 if the population's best is at least random search's with every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--intervals", type=int, default=3)
    asked = parser.parse_args()
    rows: list[dict[str, JSON]] = []
    date = datetime.now(UTC).date().isoformat()
    path = RESULTS / f"tune_population_{date}.json"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STOKER_RUNS"] = folder
        for seed in range(asked.seeds):
            alone = searched(seed, asked.members, sampler="random", pruner="none")
            herd = searched(seed, asked.members, sampler="pbt", intervals=asked.intervals)
            rows.append({"seed": seed, "random": alone, "population": herd})
            print(
                f"seed {seed}: best {herd['best']:.4f} and median {herd['median']:.4f} of a population, "
                f"{alone['best']:.4f} and {alone['median']:.4f} at random",
                flush=True,
            )
            result = {
                "what": "accuracy that a population and random search find from the same first settings",
                "command": f"python -m bench.tune.population --seeds {len(rows)} --members {asked.members} "
                f"--intervals {asked.intervals}",
                "date": date,
                "machine": surroundings(),
                "optuna": version("optuna"),
                "seeds": rows,
            }
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(path)
    return 0 if all(row["population"]["best"] >= row["random"]["best"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
