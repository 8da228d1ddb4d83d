"""Exact continuing, shown by killing: SIGKILL at random moments, the same command again, the same bytes in the end.

    python -m bench.predict.kill [--kills 20] [--cases parquet csv jsonl] [--rows 60000] [--seed 0]

For each case: one job that is never stopped, then the same job killed again and again, anywhere between the start of
the process and the end of the work, every other time while a file is being written. Compared in the end: every byte of
the predictions and of the bad rows, and that each row of the input is in exactly one of them. The result is printed and
written to bench/results/.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pyarrow.parquet as pq

from bench.predict.material import CASES, make
from stoker.devices import attached_cpu

RESULTS = Path(__file__).parents[1] / "results"


def command(model: Path, rows: Path, out: Path) -> list[str]:
    """The command line: the same for the first try and for every other."""
    return [
        sys.executable,
        "-m",
        "stoker",
        "predict",
        str(model),
        str(rows),
        "-o",
        str(out),
        "--json",
        "--max-bad",
        "2%",
        "--batch",
        "32",
        "--part-rows",
        "512",
    ]


def predict_to_the_end(arguments: list[str]) -> dict[str, object]:
    """Run the command; its last event."""
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    last: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return last


def kill_at(
    arguments: list[str], out: Path, target: int, jitter_s: float, *, in_a_write: bool
) -> dict[str, object] | None:
    """Start the command and SIGKILL it `jitter_s` after `target` parts are done, or, below 0, after its start.

    With `in_a_write`, the kill waits for the next file to be half-written. None if it was done before.
    """
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for line in process.stdout or () if target >= 0 else ():
        event = json.loads(line)
        if event["event"] == "progress" and event["parts"] >= target:
            break
    time.sleep(jitter_s)
    while in_a_write and process.poll() is None and not _is_writing(out):
        pass
    inside = _is_writing(out)
    process.kill()
    process.communicate()
    if process.returncode == 0:
        return None
    parts = len(list((out / "predictions").glob("part-*"))) if out.exists() else 0
    return {"parts_done": parts, "inside_a_write": inside, "exit": process.returncode}


def contents(out: Path) -> dict[str, str]:
    """SHA-256 of every file with rows."""
    files = [*sorted((out / "predictions").iterdir()), out / "bad_rows.jsonl"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def is_complete(out: Path, rows: int) -> bool:
    """Whether each row of the input is in exactly one place."""
    counts = Counter(pq.read_table(out / "predictions", columns=["row"])["row"].to_pylist())
    counts.update(json.loads(line)["row"] for line in (out / "bad_rows.jsonl").read_text().splitlines())
    return counts == Counter(range(rows))


def prove(case: str, kills: int, rows: int, randomly: random.Random) -> dict[str, object]:
    """Kill the jobs of a case so many times; what came out."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, path = make(case, folder, rows)
        summary = predict_to_the_end(command(model, path, folder / "whole"))
        wanted = contents(folder / "whole")
        num_parts = len(wanted) - 1
        happened: list[dict[str, object]] = []
        jobs, same, complete = 0, True, is_complete(folder / "whole", rows)
        while len(happened) < kills:
            out = folder / f"killed{jobs}"
            arguments = command(model, path, out)
            targets = [randomly.randrange(-num_parts // 10, num_parts) for _ in range(kills - len(happened))]
            for target in sorted(targets):
                in_a_write, jitter_s = len(happened) % 2 == 1, randomly.uniform(0.0, 1.0 if target < 0 else 0.02)
                killed = kill_at(arguments, out, target, jitter_s, in_a_write=in_a_write)
                if killed is None:
                    break
                happened.append(killed)
            predict_to_the_end(arguments)
            jobs, same, complete = jobs + 1, same and contents(out) == wanted, complete and is_complete(out, rows)
        inside = sum(bool(one["inside_a_write"]) for one in happened)
        print(
            f"{case}: {kills} kills of {jobs} jobs, {inside} inside a write, {num_parts} parts; "
            f"same bytes: {same}, each row once: {complete}",
            flush=True,
        )
        return {
            "kills": happened,
            "jobs": jobs,
            "kills_inside_a_write": inside,
            "parts": num_parts,
            "rows": rows,
            "bad_rows": summary["bad_rows"],
            "same_bytes": same,
            "each_row_once": complete,
        }


def _is_writing(out: Path) -> bool:
    for place in (out, out / "predictions", out / "bad"):
        with suppress(FileNotFoundError):  # not made yet, or removed at the end
            if any(name.startswith(".writing-") for name in os.listdir(place)):  # noqa: PTH208 - names are enough
                return True
    return False


def main() -> int:
    """Prove it for every case; 0 if all bytes are the same and no row is lost or doubled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    date = datetime.now(UTC).date().isoformat()
    cases = {case: prove(case, asked.kills, asked.rows, random.Random(asked.seed)) for case in asked.cases}
    result = {
        "what": "the same rows, bit for bit, after SIGKILL at random moments",
        "command": f"python -m bench.predict.kill --kills {asked.kills} --rows {asked.rows} --seed {asked.seed}",
        "date": date,
        "hardware": f"{attached_cpu().model}, {attached_cpu().cores} cores",
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in ("pyarrow", "onnxruntime", "openvino", "numpy")},
        "cases": cases,
    }
    path = RESULTS / f"predict_kill_{date}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")
    return 0 if all(case["same_bytes"] and case["each_row_once"] for case in cases.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
