"""Cold starts and whole runs: Stoker against Lightning and a plain loop, interleaved.

    python -m bench.start [--kinds unet,gru] [--pairs 5] [--peers lightning,plain] [--seconds 25] [--out FILE]

Stoker starts cold: its cache knows nothing of the job. Each process is timed from its start to its exit. The bars: the
first update comes no later than Lightning's, no fewer samples are trained by Lightning's 20th update, and a whole run
takes no longer. With `--seconds` a kind has as many updates as the first peer makes in that time on this machine (bf16
is slower than fp32 on CPUs without it: name the peer that is the fastest here).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.forecast.registration import dated
from bench.start.kinds import ALL_KINDS, KINDS, prepare
from bench.train import results

CALIBRATION_UPDATES = 40
"""Updates of the run that says how many a peer makes in the time asked for."""


def updates_in(seconds: float, peer: str, kind: str, folder: Path) -> int:
    """Updates that a whole process of the peer makes in `seconds`; at least 60."""
    run = run_once(peer, kind, folder, CALIBRATION_UPDATES)
    before_s = run["whole_s"] - CALIBRATION_UPDATES * run["update_s"]
    return max(60, round((seconds - before_s) / run["update_s"]))


def run_once(contender: str, kind: str, folder: Path, updates: int, keep: int = 200) -> dict[str, Any]:
    """One process: seconds to the first update and to the exit, and when each of the first `keep` updates was done."""
    out = folder / "out.json"
    for place in ("cache", "runs"):
        shutil.rmtree(folder / place, ignore_errors=True)
    environment = os.environ | {"STOKER_CACHE": str(folder / "cache"), "STOKER_RUNS": str(folder / "runs")}
    started = time.monotonic()
    subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "bench.start.run",
            contender,
            kind,
            str(updates),
            str(folder),
            repr(started),
            str(out),
        ],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    whole_s = time.monotonic() - started
    document = json.loads(out.read_text(encoding="utf-8"))
    updates_s: list[float] = document["updates_s"]
    last = updates_s[len(updates_s) // 2 :]
    return {
        "first_s": updates_s[0],
        "whole_s": whole_s,
        "updates_s": [round(s, 3) for s in updates_s[:keep]],
        "update_s": (last[-1] - last[0]) / (len(last) - 1),
        "plans": document["plans"],
    }


def summary(runs: dict[str, list[dict[str, Any]]], peer: str) -> dict[str, float]:
    """Medians over pairs: first update, whole run and later updates against the peer, and updates by its 20th."""
    pairs = list(zip(runs["stoker"], runs[peer], strict=False))

    def by_20th(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
        moment = theirs["updates_s"][19]
        return sum(update_s <= moment for update_s in ours["updates_s"]) / 20

    return {
        "first_s": statistics.median(ours["first_s"] for ours, _ in pairs),
        "peer_first_s": statistics.median(theirs["first_s"] for _, theirs in pairs),
        "samples_by_20th": statistics.median(by_20th(*pair) for pair in pairs),
        "whole_speedup": statistics.median(theirs["whole_s"] / ours["whole_s"] for ours, theirs in pairs),
        "settled_speedup": statistics.median(theirs["update_s"] / ours["update_s"] for ours, theirs in pairs),
        "whole_s": statistics.median(ours["whole_s"] for ours, _ in pairs),
    }


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--peers", default="lightning")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, help="length of a run of the first peer (default: the kind's updates)")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    content = results.document("whole runs from cold", " ".join(["python -m bench.start", *sys.argv[1:]]), {})
    path, peers = given.out or dated("cold_runs"), given.peers.split(",")
    with tempfile.TemporaryDirectory(prefix="bench-start-") as name:
        folder = Path(name)
        prepare(folder)
        for kind in given.kinds.split(","):
            runs: dict[str, list[dict[str, Any]]] = {contender: [] for contender in ("stoker", *peers)}
            asked = given.seconds
            updates = ALL_KINDS[kind].updates if asked is None else updates_in(asked, peers[0], kind, folder)
            content.setdefault("updates", {})[kind] = updates
            for _ in range(given.pairs):
                for contender, of in runs.items():
                    of.append(run_once(contender, kind, folder, updates))
            content.setdefault("runs", {})[kind] = runs
            for peer in peers:
                row = summary(runs, peer)
                content.setdefault("summary", {}).setdefault(kind, {})[peer] = row
                print(kind, peer, " ".join(f"{key} {value:.3g}" for key, value in row.items()), flush=True)
            results.save(path, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
