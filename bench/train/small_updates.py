"""Updates of a small GPT on the GPU here, by hand and under plans of Stoker: what its host costs, captured or not.

    python -m bench.train.small_updates [--updates 300]

The GPT has 4 layers of width 128, a context of 128 bytes, batches of 32, AdamW and clipping, on random bytes. By hand:
bf16 autocast and fused AdamW, the mean of all updates; by Stoker: the median time between the starts of updates, of the
last two thirds. Exit code 3 without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import stoker
from stoker.records import Plan
from stoker.stepping.step import Step
from stoker.zoo import GPT

NO_DEVICE = 3
DEVICE = "cuda:0"
CONTEXT, BATCH, SAMPLES = 128, 32, 4096
PLANS: dict[str, dict[str, Any]] = {
    "bf16, data in memory": {"precision": "bf16", "loader": "memory"},
    "bf16, data on the device": {"precision": "bf16", "loader": "device"},
    "bf16, captured, data on the device": {"precision": "bf16", "loader": "device", "captured": True},
    "tf32, data on the device": {"precision": "tf32", "loader": "device"},
}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [N, T] and those that follow them [N, T]."""
    text = torch.randint(256, (SAMPLES, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def model() -> GPT:
    """The GPT, on the CPU."""
    return GPT(layers=4, width=128, heads=4, context=CONTEXT)


def by_hand_s(updates: int) -> float:
    """Mean time of an update of a loop as one writes it [s]."""
    net, (inputs, targets) = model().to(DEVICE), (tensor.to(DEVICE) for tensor in data())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

    def update(number: int) -> None:
        rows = slice(start := number * BATCH % SAMPLES, start + BATCH)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(inputs[rows]).flatten(0, 1), targets[rows].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for number in range(10):
        update(number)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for number in range(updates):
        update(number)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / updates


def by_stoker_s(plan: Plan, updates: int) -> float:
    """Median time of an update of a run under a plan [s]."""
    started: list[float] = []
    original = Step.update

    def update(*args: Any, **keywords: Any) -> torch.Tensor:
        started.append(time.perf_counter())
        return original(*args, **keywords)

    job = stoker.Job(
        model=model,
        data=data(),
        loss="token_cross_entropy",
        optimizer=stoker.AdamW(lr=1e-3),
        clip_norm=1.0,
        batch=BATCH,
        until=stoker.updates(updates),
    )
    Step.update = update  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            stoker.train(job, plan=plan, run_dir=Path(folder) / "run", sink=lambda _event: None)
    finally:
        Step.update = original  # type: ignore[method-assign]
    between = [after - before for before, after in itertools.pairwise(started)]
    return statistics.median(between[len(started) // 3 :])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=300)
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("There is no GPU here that PyTorch can use.")
        return NO_DEVICE
    print(f"by hand: {by_hand_s(given.updates) * 1e3:.2f} ms an update", flush=True)
    for name, settings in PLANS.items():
        plan = Plan(device=DEVICE, micro_batch=BATCH, optimizer_implementation="fused", **settings)
        print(f"Stoker, {name}: {by_stoker_s(plan, given.updates) * 1e3:.2f} ms an update", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
