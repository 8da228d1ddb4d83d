"""What a run over several processes survives: SIGKILL and SIGSTOP of random ones, and how long until it trains again.

    python -m bench.many.kill [--kills 20] [--stops 5] [--workers 4] [--seed 0]

A data parallel job of the bench's own (`kill_worker`) under Stoker's supervisor. A worker is hit at a random moment,
every third time right after the one before, while the others still meet again. Recorded: seconds from the signal to the
next update, and to the next one with all workers; who is left over afterwards; and how far the weights are from those
of one process that made as many updates.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.many.kill_worker import alone
from stoker.training.elastic.supervisor import Supervisor

RESULTS = Path(__file__).parents[1] / "results"
LONGEST_S = 300.0
SILENCE_S = 3.0


@dataclass
class Watch:
    """What the run tells, with when [s, monotonic]."""

    folder: Path
    workers: int
    updates: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    news: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)
    code: int | str | None = None

    def on_line(self, line: str) -> None:
        """An update was made."""
        self.updates.append((time.monotonic(), json.loads(line)))

    def tell(self, kind: str, fields: dict[str, Any]) -> None:
        """The supervisor tells something."""
        self.news.append((time.monotonic(), kind, fields))
        print(f"  {kind}: {fields}", flush=True)

    def first_update(self, after: int, size: int = 1) -> float:
        """When the first update of a generation after that one, of at least so many processes, was made [s]."""
        until = time.monotonic() + LONGEST_S
        place = 0
        while time.monotonic() < until and self.code is None:
            while place < len(self.updates):
                at, update = self.updates[place]
                if update["generation"] > after and update["size"] >= size:
                    return at
                place += 1
            time.sleep(0.002)
        raise SystemExit(f"no update after generation {after}: {self.code}, {self.news[-5:]}")

    @property
    def generation(self) -> int:
        """Of the last update."""
        return self.updates[-1][1]["generation"] if self.updates else 0

    def hit(self, number: signal.Signals, randomly: random.Random) -> tuple[float, int, int]:
        """Send the signal to a member of the present generation; when [s], the generation, and its size."""
        met = [fields for _, kind, fields in self.news if kind == "met"][-1]
        worker = randomly.choice(met["workers"])
        pid = int((self.folder / f"pid-{worker}").read_text())
        self.pids.add(pid)
        at = time.monotonic()
        os.kill(pid, number)
        return at, met["generation"], len(met["workers"])


def hits(watch: Watch, kills: int, stops: int, randomly: random.Random) -> list[dict[str, Any]]:
    """Kill and stop workers; how long each took to be overcome."""
    numbers = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops
    randomly.shuffle(numbers)
    found = []
    for place, number in enumerate(numbers):
        is_double = place % 3 == 2 and number == signal.SIGKILL
        watch.first_update(watch.generation - 1, watch.workers)
        time.sleep(randomly.uniform(0.2, 1.5))
        at, generation, _ = watch.hit(number, randomly)
        if is_double:  # another one, while the others meet again
            time.sleep(randomly.uniform(0.0, 0.2))
            at, generation, _ = watch.hit(number, randomly)
        trains = watch.first_update(generation) - at
        whole = watch.first_update(generation, watch.workers) - at
        found.append({"signal": number.name, "twice": is_double, "recovery_s": trains, "all_back_s": whole})
        print(f"{place + 1:3d} {found[-1]}", flush=True)
    return found


def measured(workers: int, kills: int, stops: int, seed: int) -> dict[str, Any]:
    """One run, hit so often."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        watch = Watch(folder, workers)
        supervisor = Supervisor(
            [sys.executable, "-m", "bench.many.kill_worker", name],
            workers=workers,
            least=1,
            environment={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            on_line=watch.on_line,
            tell=watch.tell,
            silence_s=SILENCE_S,
            most_returns=2 * (kills + stops),
        )

        def run() -> None:
            try:
                watch.code = supervisor.run()
            except Exception as problem:  # noqa: BLE001 - told by whoever waits
                watch.code = repr(problem)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            watch.first_update(0, workers)
            found = hits(watch, kills, stops, random.Random(seed))
            (folder / "enough").touch()
            thread.join(LONGEST_S)
        finally:
            supervisor.stop(signal.SIGTERM)
            supervisor.stop(signal.SIGINT)
            thread.join(LONGEST_S)
        watch.pids |= {int(path.read_text()) for path in folder.glob("pid-*")}
        final = torch.load(folder / "final.pt", weights_only=True)
    pairs = zip(final["tensors"], alone(final["done"]), strict=True)
    return {
        "exit": watch.code,
        "updates": final["done"],
        "left_over": sum(Path(f"/proc/{pid}").exists() for pid in watch.pids),
        "largest_difference": max(float((mine - theirs).abs().max()) for mine, theirs in pairs),
        "recovery_s": {what: spread(found, what) for what in ("SIGKILL", "SIGKILL twice", "SIGSTOP")},
        "hits": found,
    }


def spread(found: list[dict[str, Any]], what: str) -> dict[str, float]:
    """Least, median and most of the seconds until the next update."""
    name, _, twice = what.partition(" ")
    values = [one["recovery_s"] for one in found if one["signal"] == name and one["twice"] == bool(twice)]
    if not values:
        return {}
    return {"number": len(values), "least": min(values), "median": statistics.median(values), "most": max(values)}


def main() -> int:
    """Measure, print and write; 0 if the run ended well and with the weights of one process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = measured(given.workers, given.kills, given.stops, given.seed)
    date = datetime.now(UTC).date().isoformat()
    about = {
        "what": "recovery of a run over several processes from SIGKILL and SIGSTOP",
        "command": f"python -m bench.many.kill --kills {given.kills} --stops {given.stops} --workers {given.workers} "
        f"--seed {given.seed}",
        "date": date,
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "system": platform.platform(),
        },
        "silence_s": SILENCE_S,
        "load": os.getloadavg(),
    }
    path = RESULTS / f"many_kill_{date}.json"
    path.write_text(json.dumps({**about, **result}, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "hits"}, indent=1))
    print(f"written to {path}")
    return 0 if result["exit"] == 0 and result["left_over"] == 0 and result["largest_difference"] < 1e-9 else 1


if __name__ == "__main__":
    sys.exit(main())
