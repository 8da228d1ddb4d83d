"""What a killed study loses: SIGKILL at random moments, the same command again, the same trials in the end.

    python -m bench.tune.kill [--kills 6] [--trials 5] [--seed 0]

One study that is never stopped, then the same one, whose process is killed again and again, each time within
four fifths of a trial's mean length after it went on. One trial at a time, under one plan: what is proposed, what is
pruned and what is learned must be equal, to the last bit of every value of every curve. The result is printed and
written to bench/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from bench.forecast.registration import surroundings
from stoker.records import Plan, dumps
from stoker.records.codec import JSON

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
SPACE = "lr=log(1e-3,0.5) width=choice(4,8)"


def command(folder: Path, trials: int, name: str) -> list[str]:
    """The command line: the same for the first try and for every other."""
    plan = folder / "plan.json"
    plan.write_text(dumps(Plan(device="cpu", micro_batch=64, checkpoint_every_s=0.2)))
    return [
        sys.executable,
        "-m",
        "stoker",
        "tune",
        str(ROOT / "examples" / "tune_me.py"),
        "--space",
        SPACE,
        "--trials",
        str(trials),
        "--set",
        "epochs=6",
        "--plan",
        str(plan),
        "--planned",
        "0",
        "--study",
        name,
        "--json",
    ]


def trials_of(name: str, environment: dict[str, str]) -> list[JSON]:
    """What of each trial must be equal."""
    shown = subprocess.run(
        [sys.executable, "-m", "stoker", "tune", "--show", name, "--json"],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    kept = ("number", "state", "parameters", "value", "curve", "reason")
    found = [{key: one[key] for key in kept} for one in json.loads(shown.stdout)["trials"]]
    return sorted(found, key=lambda one: one["number"])


def killed_once(arguments: list[str], environment: dict[str, str], after_s: float) -> dict[str, JSON] | None:
    """Start the command and SIGKILL it so many seconds after its first trial began; None if it was done before."""
    process = subprocess.Popen(
        arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    assert process.stdout is not None
    told: list[dict[str, JSON]] = []
    for line in process.stdout:
        told.append(json.loads(line))
        if told[-1]["event"] in ("began", "resumed"):
            break
    with suppress(subprocess.TimeoutExpired):
        process.wait(after_s)
    process.kill()
    told += [json.loads(line) for line in process.communicate()[0].splitlines() if line.endswith("}")]
    if process.returncode == 0:
        return None
    assert process.returncode == -signal.SIGKILL
    counts = {kind: sum(one["event"] == kind for one in told) for kind in ("began", "resumed", "ended")}
    return {"after_s": round(after_s, 2), **counts}


def main() -> int:
    """Prove it; 0 if both studies have the same trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draws, happened = random.Random(asked.seed), list[dict[str, JSON]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = os.environ | {
            "STOKER_RUNS": str(folder / "runs"),
            "STOKER_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        began = time.perf_counter()
        subprocess.run(command(folder, asked.trials, "whole"), env=environment, check=True, capture_output=True)
        took_s = time.perf_counter() - began
        arguments = command(folder, asked.trials, "killed")
        for _ in range(asked.kills):
            killed = killed_once(arguments, environment, draws.uniform(0.0, 0.8) * took_s / asked.trials)
            if killed is None:
                break
            happened.append(killed)
            print(killed, flush=True)
        subprocess.run(arguments, env=environment, check=True, capture_output=True)
        whole, again = trials_of("whole", environment), trials_of("killed", environment)
    is_same = whole == again
    date = datetime.now(UTC).date().isoformat()
    result = {
        "what": "the trials of a study after SIGKILL at random moments, against one never stopped",
        "command": f"python -m bench.tune.kill --kills {asked.kills} --trials {asked.trials} --seed {asked.seed}",
        "date": date,
        "machine": surroundings(),
        "optuna": version("optuna"),
        "whole_took_s": took_s,
        "kills": happened,
        "trials": whole,
        "same_trials": is_same,
    }
    path = RESULTS / f"tune_kill_{date}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{len(happened)} kills of a study of {len(whole)} trials; the same trials: {is_same}\n{path}")
    return 0 if is_same else 1


if __name__ == "__main__":
    raise SystemExit(main())
