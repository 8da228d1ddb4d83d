"""What keeping an update repeatable costs: time of `Recovery.update` beyond that of `Step.update`, both emptied.

    python -m bench.recovery_overhead [--rounds 15] [--updates 2560]

The step does nothing, so that what remains is the copies of buffers, the looks at generators, and the calls. Counted is
the CPU time of one thread; slices with and without recovery alternate. Printed and written to bench/results/: the
median over rounds of the difference in microseconds an update, with its spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import stoker
from stoker.devices.cpu import attached_cpu
from stoker.records import Position
from stoker.stepping.step import Step
from stoker.training.recovery import Recovery

MODELS = {"mlp": lambda: nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10)), "resnet9": stoker.zoo.ResNet9}


class Emptied:
    """A step that makes no update."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def update(self, _batch: Any, _update: int, _progress: float) -> None:
        """Do nothing."""


def seconds(step: Any, recovery: Recovery | None, updates: int) -> float:
    """CPU seconds an update, with or without recovery."""
    position = Position(updates=5)
    started = time.thread_time()
    for _ in range(updates):
        if recovery is None:
            step.update(None, position.updates, 0.1)
        else:
            recovery.keep()
            step.update(None, position.updates, 0.1)
    return (time.thread_time() - started) / updates


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--updates", type=int, default=2560)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, make in MODELS.items():
        step = Emptied(make())
        recovery = Recovery(cast("Step", step))
        seconds(step, recovery, 100)
        extra = sorted(
            1e6 * (seconds(step, recovery, arguments.updates) - seconds(step, None, arguments.updates))
            for _ in range(arguments.rounds)
        )
        found[name] = {
            "buffers": len(list(step.model.buffers())),
            "median_us": statistics.median(extra),
            "min_us": extra[0],
            "max_us": extra[-1],
        }
    result = {
        "what": "recovery's cost, microseconds an update",
        "command": f"python -m bench.recovery_overhead --rounds {arguments.rounds} --updates {arguments.updates}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{attached_cpu().model}, torch {torch.__version__}, 1 thread",
        "models": found,
    }
    text = json.dumps(result, indent=2)
    print(text)
    Path(__file__).with_name("results").joinpath(f"recovery_overhead_{result['date']}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
