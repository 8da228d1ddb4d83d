"""What layouts cost a process on a CPU besides arithmetic and messages, for `planning/model/layout_forecast.py`.

    python -m bench.many.overheads [--rounds 3]

Of GPTs that are all overhead, 32 wide and of 2 to 10 blocks, in one pass or two: the CPU time that the training thread
takes for an update under each layout, less what it takes alone on as many samples. Waiting for others takes none, and
messages go in threads of their own, so that a busy machine disturbs this little. Constants are fitted to the
differences by least squares, none below zero, and printed next to those in use.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.many.forecast import SEPARABLE, Case
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.planning.model import layout_forecast
from stoker.profiling.job_profile import model_parts
from stoker.records import Layout, Plan, Position
from stoker.stepping.layouts import divided_parts
from stoker.stepping.step import Step
from stoker.stepping.world import World
from stoker.testing.ranks import on_ranks

LAYOUTS = {
    "replicas": Layout(replicas=2),
    "shards": Layout(shards=2),
    "shards kept": Layout(shards=2, reshard=False),
    "tensor": Layout(tensor=2),
    "sequence": Layout(tensor=2, sequence=True),
    "stages": Layout(stages=2),
}
BATCH, UPDATES = 8, 12


@dataclass(frozen=True)
class Counted:
    """What the overhead of an update may go by."""

    passes: int
    parameters: int
    groups: int
    layers: int


def timed(world: World, case: Case, plan: Plan) -> float:
    """CPU time of this thread for an update [s], the median."""
    torch.set_num_threads(1)
    job = case.job()
    data = datasets_of(job)
    step = Step(job, plan, SEPARABLE, world=world)
    source = BatchSource(
        data.train,
        step.pipeline(data.train, augmented=True),
        data.extent(job),
        job.seed,
        plan,
        split=world.split(SEPARABLE),
    )
    times = []
    for number, batch in enumerate(source.batches(Position(), UPDATES)):
        began = time.thread_time()
        float(step.update(batch, number, 0.0))
        times.append(time.thread_time() - began)
    return statistics.median(times[2:])


def overhead(name: str, layers: int, passes: int) -> tuple[Counted, float]:
    """What goes with the overhead of a layout, and how long it is [s]."""
    layout = LAYOUTS[name]
    size = BATCH // layout.data_size
    if layout.stages > 1:  # each process passes all of the batch, through half of the blocks
        size, passes = BATCH, 2 * passes
    case = Case("gpt", batch=BATCH, micro_batch=0, layers=layers, width=32, context=16, vocab=64)
    settings: dict[str, Any] = {"device": "cpu", "micro_batch": size // passes, "optimizer_implementation": "fused"}
    spread = max(on_ranks(layout, timed, case, Plan(**settings, layout=layout)))
    alone = Case("gpt", batch=size, micro_batch=0, layers=layers // layout.stages, width=32, context=16, vocab=64)
    (own,) = on_ranks(Layout(), timed, alone, Plan(**settings))
    with torch.device("meta"):
        model = case.job().model()  # type: ignore[operator]  # it is a function
    parts = divided_parts(model_parts(model), model, layout)
    return (
        Counted(passes, len(parts.parameters) // layout.stages, 1 + len(parts.blocks), len(parts.divided)),
        spread - own,
    )


def fitted(found: list[tuple[Counted, float]], name: str) -> dict[str, float]:
    """Constants, none below zero, by what they go with."""
    columns = {
        "update": [1.0 for _ in found],
        "parameter": [float(one.parameters) for one, _ in found],
        "group in a pass": [float(one.groups * one.passes) for one, _ in found],
        "layer in a pass": [float(one.layers * one.passes) for one, _ in found],
        "pass": [float(one.passes) for one, _ in found],
    }
    kinds = {
        "replicas": ("update", "parameter", "pass"),
        "stages": ("update", "pass"),
        "tensor": ("update", "layer in a pass"),
        "sequence": ("update", "layer in a pass"),
    }
    names = list(kinds.get(name, ("update", "parameter", "group in a pass")))
    values = np.array([seconds for _, seconds in found])
    while names:
        matrix = np.array([columns[one] for one in names]).T
        solution = np.linalg.lstsq(matrix, values, rcond=None)[0]
        if (solution >= 0).all():
            return dict(zip(names, map(float, solution), strict=True))
        names.pop(int(np.argmin(solution)))
    return {}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=list(LAYOUTS))
    given = parser.parse_args()
    for name in given.only:
        found = [
            overhead(name, layers, passes)
            for _, layers, passes in itertools.product(range(given.rounds), (2, 6, 10), (1, 2))
        ]
        for one, seconds in found:
            print(f"{name}: {one} {seconds * 1e3:.2f} ms")
        print(
            f"{name}: { ({what: f'{1e6 * value:.0f} us' for what, value in fitted(found, name).items()}) }", flush=True
        )
    print({name: value for name, value in vars(layout_forecast).items() if name.endswith("_S")})


if __name__ == "__main__":
    main()
