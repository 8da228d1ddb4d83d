"""One run resumed by other processes in other layouts again and again, against the same run never stopped.

    python -m bench.many.reshard [--chains NAME …]

Each leg of a chain takes the checkpoint of the one before, which another number of processes wrote in another layout,
makes five updates from the middle of an epoch, and writes the next. Compared are the losses of all updates (relative)
and, in float64, the weights and their averages at the end (absolute). Everything runs here, over gloo, one thread each.
Printed and written to bench/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from stoker.devices.cpu import attached_cpu
from stoker.records import CheckpointManifest, Layout, Plan
from stoker.stepping.world import ALONE
from stoker.store import CheckpointStore
from stoker.testing.ranks import on_ranks
from stoker.training.checkpoints import kept_weights, model_weights
from tests.stepping.layouts.conformance import JOBS
from tests.training.legs import losses_of_leg

UPDATES_OF_LEG = 5
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-6}


@dataclass(frozen=True)
class Chain:
    """A job of the conformance tests, and the layouts that train it one after the other."""

    job: str
    layouts: tuple[Layout, ...]


CHAINS = {
    "reshape": Chain(
        "gpt",
        (
            Layout(replicas=2),
            Layout(shards=2),
            Layout(tensor=2),
            Layout(shards=2, tensor=2),
            Layout(),
        ),
    ),
    "resize": Chain("gpt", (Layout(), Layout(replicas=2), Layout(shards=4), Layout())),
    "momentum": Chain("momentum", (Layout(replicas=2), Layout(shards=2), Layout(tensor=2), Layout())),
    "stages": Chain("gpt", (Layout(stages=2), Layout(shards=2), Layout(stages=2), Layout())),
    "divided stages": Chain(
        "gpt",
        (Layout(stages=2, tensor=2), Layout(shards=2), Layout(stages=2, shards=2, tensor=2, sequence=True), Layout()),
    ),
}


def plan_of(layout: Layout) -> Plan:
    """The largest micro-batches: what is compared is not how batches are cut."""
    return Plan(device="cpu", micro_batch=16, layout=layout)


def measured(chain: Chain, dtype: torch.dtype) -> dict[str, Any]:
    """The largest differences of a chain from the run that one process made."""
    with tempfile.TemporaryDirectory(prefix="stoker-reshard-") as name:
        whole, parts = Path(name, "whole"), Path(name, "parts")
        expected = _losses(whole, chain, Layout(), dtype, UPDATES_OF_LEG * len(chain.layouts))
        legs = []
        for number, layout in enumerate(chain.layouts, start=1):
            started = time.perf_counter()
            losses = _losses(parts, chain, layout, dtype, UPDATES_OF_LEG * number)
            pairs = zip(losses, expected[UPDATES_OF_LEG * (number - 1) :], strict=False)
            worst = max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)
            legs.append(
                {
                    "layout": layout.in_words() or "one process",
                    "largest_loss_difference": worst,
                    "took_s": round(time.perf_counter() - started, 2),
                }
            )
        differences = [_largest_difference(parts, whole, read) for read in (model_weights, kept_weights)]
    worst = max(one["largest_loss_difference"] for one in legs)
    return {
        "job": chain.job,
        "dtype": str(dtype).removeprefix("torch."),
        "legs": legs,
        "largest_loss_difference": worst,
        "limit": LIMITS[dtype],
        "holds": worst <= LIMITS[dtype],
        "largest_weight_difference": differences[0],
        "largest_average_difference": differences[1],
    }


def _losses(folder: Path, chain: Chain, layout: Layout, dtype: torch.dtype, stop: int) -> list[float]:
    arguments = (folder, chain.job, plan_of(layout), dtype, stop)
    if layout.world_size == 1:
        return losses_of_leg(ALONE, *arguments)
    found: list[float] = on_ranks(layout, losses_of_leg, *arguments)[0]
    return found


def _largest_difference(
    folder: Path, other: Path, read: Callable[[Path, CheckpointManifest], dict[str, torch.Tensor]]
) -> float:
    """Between the weights of the last checkpoints in two folders, absolute."""
    mine, theirs = (CheckpointStore(one).newest() for one in (folder, other))
    assert mine is not None
    assert theirs is not None
    weights = read(*mine)
    return max(float((weights[name] - weight).abs().max()) for name, weight in read(*theirs).items())


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", nargs="+", choices=CHAINS, default=list(CHAINS))
    chosen = parser.parse_args().chains
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in chosen:
        for dtype in LIMITS:
            one = measured(CHAINS[name], dtype)
            found[f"{name} {one['dtype']}"] = one
            print(
                f"{name:9} {one['dtype']:8} {one['largest_loss_difference']:.1e} (limit {one['limit']:.0e})  "
                + " → ".join(leg["layout"] for leg in one["legs"]),
                flush=True,
            )
    result = {
        "what": "losses of runs resumed in other layouts, against the run never stopped",
        "command": f"python -m bench.many.reshard --chains {' '.join(chosen)}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{attached_cpu().model}, torch {torch.__version__}, gloo on the loopback, 1 thread per process",
        "load": os.getloadavg()[0],
        "jobs": sorted(JOBS),
        "updates_of_a_leg": UPDATES_OF_LEG,
        "chains": found,
        "holds": all(one["holds"] for one in found.values()),
    }
    path = Path(__file__).parents[1] / "results" / f"reshard_{result['date']}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{'holds' if result['holds'] else 'DOES NOT HOLD'}; written to {path}")


if __name__ == "__main__":
    main()
