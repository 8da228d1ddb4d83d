"""How soon a run elsewhere makes its first update, and how long it takes against its forecast.

    python -m bench.places.start PLACE [--rounds 3] [--seconds 40]      PLACE is slurm or ssh
    python -m bench.places.start PLACE --first [--rounds 2] [--threads 1]   first runs of three kinds of jobs

A real Slurm of idle nodes, or a real sshd, is started on this machine (tests/places). The commands are those that
people type, each a process of its own: `stoker plan JOB --on PLACE`, then `stoker train JOB --on PLACE --new`, followed
to its end. In the first round nothing is at the place; Python's environment is there. From the second on all is there
(warm). Recorded for each: the time from the command to the event of the first update, and of it the wait in the queue
(submission to the job's start, by the scheduler); the time of training; and the whole time from the command to the end
of training. Forecast is what `stoker plan` said before: the run, and when it would be finished. Epochs are as many as
train for so many seconds by the forecast.

With `--first`, each round has a state of its own, here and there, as on the first day: no run has come home from any
place. The kinds take turns: a wide network of two layers, convolutions, and small tables; rounds of each kind are so
many. How many epochs take so many seconds is found out before, with a state that is then thrown away. On a machine
that others use, `--threads 1` leaves them a core: with as many threads as cores, each waits for the other.

Bars: 10 s from the command to the first update, less the queue, warm; forecasts of the run and of the whole time within
15 %, warm. With `--first`: the whole time within 15 %, in the median of each kind.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from stoker.launching.slurm_scheduler import read_job
from stoker.store import RunDirectory
from tests.places import slurm_cluster
from tests.places.ssh_hosts import SSHD, loopback

HERE = Path(__file__).parent
MOST_START_S, MOST_ERROR = 10.0, 0.15


@contextmanager
def slurm(folder: Path) -> Iterator[str]:
    """The word of a Slurm cluster, which commands find by a variable."""
    if reason := slurm_cluster.missing():
        raise SystemExit(reason)
    cluster = slurm_cluster.SlurmCluster(folder / "slurm")
    try:
        cluster.start()
        os.environ["SLURM_CONF"] = cluster.environ["SLURM_CONF"]
        yield f"slurm:low/cpu:cpus={os.cpu_count()}"
    finally:
        cluster.stop()


@contextmanager
def ssh(folder: Path) -> Iterator[str]:
    """The word of a host behind sshd on loopback."""
    if SSHD is None:
        raise SystemExit("there is no sshd: apt-get install openssh-server")
    (folder / "hosts").mkdir()
    with loopback(folder / "hosts") as hosts:
        os.environ["STOKER_SSH_CONFIG"] = str(hosts.config)
        yield "ssh:box/cpu"


PLACES = {"slurm": slurm, "ssh": ssh}


def stoker(*words: str) -> str:
    """Standard output of a command of Stoker, which has to succeed."""
    done = subprocess.run([sys.executable, "-m", "stoker", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"stoker {' '.join(words)}: exit {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def queued_s(launch: dict[str, Any], submitted: float) -> float:
    """How long the job waited in the scheduler's queue [s]; 0 where there is none."""
    if launch["kind"] != "slurm":
        return 0.0
    command = ["scontrol", "show", "job", launch["handle"]["job"], "-o"]
    shown = subprocess.run(command, env=os.environ | {"TZ": "UTC"}, capture_output=True, text=True, check=True).stdout
    job = read_job(shown)
    assert job is not None
    assert job.starts_at is not None
    return max(0.0, job.starts_at - submitted)


def planned(on: str, job: list[str], epochs: int) -> dict[str, Any]:
    """What `stoker plan` says of the place."""
    words = [*job, *THREADS, "--set", f"epochs={epochs}", "--on", on, "--json"]
    offer: dict[str, Any] = json.loads(stoker("plan", *words))["offers"][0]
    if offer["run"] is None:
        raise SystemExit(f"no forecast: {offer}")
    return offer


THREADS: list[str] = []
"""`--threads`, as words of a command."""

KINDS = {"mlp": ["digits_mlp.py", "--set", "width=4096"], "cnn": ["digits_cnn.py"], "table": ["table_mlp.py"]}
"""Jobs as words of a command, without their epochs."""


def measure(folder: Path, on: str, number: int, job: list[str], epochs: int) -> dict[str, Any]:
    """One round: forecast, run, compare."""
    run, load = folder / "runs" / f"start-{number}", os.getloadavg()[0]
    offer = planned(on, job, epochs)
    began = time.time()
    stoker(
        "train",
        *job,
        *THREADS,
        "--set",
        f"epochs={epochs}",
        "--on",
        on,
        "--run-dir",
        str(run),
        "--env",
        sys.executable,
        "--place-option",
        f"root={folder / 'root'}",
        "--var",
        f"STOKER_CACHE={folder / 'cache-there'}",
        "--json",
    )
    launch = json.loads((run / "launch.json").read_text())
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    at = {
        kind: next(event["at"] for event in events if event["kind"] == kind)
        for kind in ("planned", "progress", "finished")
    }
    submitted = datetime.fromisoformat(launch["submitted_at"]).timestamp()
    queue, training = queued_s(launch, submitted), json.loads((run / "run.json").read_text())["wall_s"]
    whole = at["finished"] - began
    forecast, finish = offer["run"]["value"], offer["finish_s"]
    decision = RunDirectory(run).read_decision()
    assert decision is not None
    return {
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "epochs": epochs,
        "sent_bytes": launch["sent_bytes"],
        "submitted_after_s": round(submitted - began, 2),
        "queue_s": round(queue, 2),
        "first_update_less_queue_s": round(at["progress"] - began - queue, 2),
        "to_begin_s": round(at["planned"] - began - queue, 2),
        "training_s": round(training, 2),
        "tried_s": round(decision.chosen.forecast.trials_s or 0.0, 2),
        "forecast_s": round(forecast, 2),
        "forecast_error": round(forecast / training - 1, 3),
        "whole_s": round(whole, 2),
        "forecast_start_s": round(offer["startup_s"] + offer["transfer_s"], 2),
        "forecast_whole_s": round(finish, 2),
        "whole_error": round(finish / whole - 1, 3),
        "why": offer["why"],
    }


def first_runs(on: str, folder: Path, num_rounds: int, seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Rounds of each kind, each with a state of its own."""
    epochs: dict[str, int] = {}
    rounds: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    os.environ["STOKER_CACHE"] = str(folder / "sizing")
    for kind, job in KINDS.items():
        epochs[kind] = max(1, round(200 * seconds / planned(on, job, 200)["run"]["value"]))
    for number in range(num_rounds):
        for kind, job in KINDS.items():
            state = folder / f"{kind}-{number}"
            os.environ["STOKER_CACHE"] = str(state / "cache")
            rounds[kind].append(measure(state, on, number, job, epochs[kind]))
            print(kind, rounds[kind][-1], flush=True)
    return rounds


def main() -> int:
    """Measure, print and write; 0 if the bars are held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", choices=PLACES)
    parser.add_argument("--first", action="store_true")
    for name, value in {"rounds": 3, "seconds": 40}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    THREADS.extend([] if given.threads is None else ["--threads", str(given.threads)])
    with tempfile.TemporaryDirectory(prefix="place-", dir="/tmp") as name:  # sockets need a short path
        folder = Path(name)
        for file in HERE.glob("*.py"):
            (folder / file.name).write_text(file.read_text())
        os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
        os.environ["STOKER_CACHE"] = str(folder / "cache")
        os.chdir(folder)
        with PLACES[given.place](folder) as on:
            if given.first:
                return first(given.place, on, folder, given.rounds, given.seconds)
            return again(given.place, on, folder, given.rounds, given.seconds)


def first(place: str, on: str, folder: Path, num_rounds: int, seconds: int) -> int:
    """First runs at the place; 0 if the whole time is forecast within the bar for each kind."""
    rounds, options = first_runs(on, folder, num_rounds, seconds), ["--seconds", str(seconds), *THREADS]
    errors = {kind: [one["whole_error"] for one in of_kind] for kind, of_kind in rounds.items()}
    is_held = all(abs(median(of_kind)) <= MOST_ERROR for of_kind in errors.values())
    loads = [one[name] for of_kind in rounds.values() for one in of_kind for name in ("load_before", "load_after")]
    result = {
        "what": f"{place}: whole time of first runs, of which nothing was known before, against its forecast",
        "command": " ".join([f"python -m bench.places.start {place} --first --rounds {num_rounds}", *options]),
        **about(),
        "load": f"{min(loads):.1f} to {max(loads):.1f} before and after runs, on {os.cpu_count()} cores",
        "whole_errors": errors,
        "median_whole_errors": {kind: median(of_kind) for kind, of_kind in errors.items()},
        "is_held": is_held,
        "rounds": rounds,
    }
    write(f"place_first_{place}", result)
    return 0 if is_held else 1


def again(place: str, on: str, folder: Path, num_rounds: int, seconds: int) -> int:
    """Runs of one job after each other; 0 if the bars are held from the second on."""
    job, rounds = KINDS["mlp"], []
    epochs = round(100 * seconds / planned(on, job, 100)["run"]["value"])
    for number in range(num_rounds):
        rounds.append(measure(folder, on, number, job, epochs))
        print(rounds[-1], flush=True)
    warm = rounds[1:]
    is_held = all(
        one["first_update_less_queue_s"] <= MOST_START_S
        and abs(one["forecast_error"]) <= MOST_ERROR
        and abs(one["whole_error"]) <= MOST_ERROR
        for one in warm
    )
    result = {
        "what": f"{place}: from the command to the first update, and total time against its forecast",
        "command": f"python -m bench.places.start {place} --rounds {num_rounds} --seconds {seconds}",
        **about(),
        "epochs": epochs,
        "warm_first_update_less_queue_s": [one["first_update_less_queue_s"] for one in warm],
        "warm_forecast_errors": [one["forecast_error"] for one in warm],
        "warm_whole_errors": [one["whole_error"] for one in warm],
        "is_held": is_held,
        "rounds": rounds,
    }
    write(f"place_start_{place}", result)
    return 0 if is_held else 1


def about() -> dict[str, Any]:
    """The date, and the machine."""
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()}
    return {"date": datetime.now(UTC).date().isoformat(), "machine": machine}


def write(name: str, result: dict[str, Any]) -> None:
    """Write a dated file of results."""
    path = HERE.parent / "results" / f"{name}_{result['date']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
