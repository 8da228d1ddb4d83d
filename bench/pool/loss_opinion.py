"""Can the loss that a block removes on held-back data tell a cheat from the noise between determinism classes?

    python -m bench.pool.loss_opinion

A two-layer transformer with dropout learns handwritten digits with AdamW, in fp32 and in bf16 (autocast). From states
along one run a block of updates is made honestly by two classes on this machine (all instructions, and none beyond the
oldest), and by cheats in the first class. One process evaluates all ends on 512 held-back samples in fp32, so that the
evaluation itself adds no noise. For each block length two criteria:

- `loss`: |loss removed − loss removed by the honest other class| / |loss removed by the honest other class|;
- `weights`: the relative difference of the update, as `replay_check.update_difference` has it.

`honest` is the noise, `most` over all states, and a cheat is told from it where its `least` is larger. Where a block is
one update, `weights` is what an arbiter judges.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from bench.pool.result_file import write_result
from bench.pool.small_jobs import Attention
from stoker.data import digits

CLASSES = {
    "own": {"OMP_NUM_THREADS": "1"},
    "other": {
        "OMP_NUM_THREADS": "1",
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
}
CHEATS = ("skip", "half", "data", "precision")
LENGTHS = (1, 10, 40)
STATES = tuple(range(40, 400, 60))
BATCH, WIDTH = 64, 64


def samples() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs and labels for training, and held back."""
    rows = [part[index] for part in digits() for index in range(len(part))]
    images = torch.stack([torch.as_tensor(image) for image, _ in rows]).float()
    labels = torch.tensor([int(label) for _, label in rows])
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(5))
    held, train = order[:512], order[512:]
    return images[train], labels[train], images[held], labels[held]


def updated(
    model: nn.Module, optimizer: torch.optim.Optimizer, update: int, precision: str, cheat: str, data: Any
) -> None:
    """One update: its batch and its dropout depend on its number alone."""
    images, labels = data[:2]
    if cheat == "skip":
        return
    rows = torch.randint(0, len(images), (BATCH,), generator=torch.Generator().manual_seed(update))
    if cheat == "half":
        rows = torch.cat([rows[: BATCH // 2]] * 2)
    if cheat == "data":
        rows = torch.randint(0, len(images), (BATCH,), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(update)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = functional.cross_entropy(model(images[rows]), labels[rows])
    loss.backward()
    optimizer.step()
    if cheat == "precision":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16().float())


def begun() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimiser before the first update."""
    torch.manual_seed(0)
    model = Attention(WIDTH)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def make_blocks(folder: Path, precision: str, cheat: str, name: str) -> None:
    """Make a block of each length from each state that was saved, and save its ends."""
    data = samples()
    for state in STATES:
        for length in LENGTHS:
            model, optimizer = begun()
            saved = torch.load(folder / f"start-{precision}-{state}.pt")
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            for update in range(state, state + length):
                is_cheat = cheat != "skip" or update == state + length // 2
                updated(model, optimizer, update, precision, cheat if is_cheat else "", data)
            torch.save(model.state_dict(), folder / f"{name}-{precision}-{state}-{length}.pt")


def make_states(folder: Path) -> None:
    """Train in the own class, and save the states from which blocks begin."""
    data = samples()
    for precision in ("fp32", "bf16"):
        model, optimizer = begun()
        for update in range(max(STATES) + 1):
            if update in STATES:
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
                    folder / f"start-{precision}-{update}.pt",
                )
            updated(model, optimizer, update, precision, "", data)


def loss_of(weights: dict[str, torch.Tensor], data: Any) -> float:
    """Loss on what is held back, in fp32 [1]."""
    model = Attention(WIDTH).eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        return float(functional.cross_entropy(model(data[2]), data[3]))


def difference(start: dict[str, torch.Tensor], one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    """|one - two| / |two - start| over all weights [1]."""
    off = sum(float((one[name].double() - two[name].double()).square().sum()) for name in two)
    moved = sum(float((two[name].double() - start[name].double()).square().sum()) for name in two)
    return float((off / moved) ** 0.5)


def compared(folder: Path) -> list[dict[str, Any]]:
    """Both criteria of each case."""
    data, rows = samples(), []
    for precision in ("fp32", "bf16"):
        for length in LENGTHS:
            found: dict[tuple[str, str], list[float]] = defaultdict(list)
            for state in STATES:
                start = torch.load(folder / f"start-{precision}-{state}.pt")["model"]
                verifier = torch.load(folder / f"other-{precision}-{state}-{length}.pt")
                before = loss_of(start, data)
                removed = before - loss_of(verifier, data)
                for case in ("own", *CHEATS):
                    weights = torch.load(folder / f"{case}-{precision}-{state}-{length}.pt")
                    off = abs(before - loss_of(weights, data) - removed) / abs(removed)
                    found[case, "loss"].append(off)
                    found[case, "weights"].append(difference(start, weights, verifier))
            for criterion in ("loss", "weights"):
                noise = max(found["own", criterion])
                cheats = {cheat: sorted(found[cheat, criterion]) for cheat in CHEATS}
                rows.append(
                    {
                        "precision": precision,
                        "updates": length,
                        "criterion": criterion,
                        "honest_most": noise,
                        "honest_median": sorted(found["own", criterion])[len(STATES) // 2],
                        "cheats_least": {cheat: values[0] for cheat, values in cheats.items()},
                        "cheats_median": {cheat: values[len(values) // 2] for cheat, values in cheats.items()},
                        "told": {cheat: sum(one > noise for one in values) for cheat, values in cheats.items()},
                    }
                )
    return rows


def main() -> None:
    """Make all blocks, each class in a process of its own; compare, print and write."""
    options = argparse.ArgumentParser()
    options.add_argument("--make", nargs=4, metavar=("FOLDER", "PRECISION", "CHEAT", "NAME"), default=None)
    options.add_argument("--states", type=Path, default=None)
    given = options.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    if given.states is not None:
        make_states(given.states)
        return
    if given.make is not None:
        make_blocks(Path(given.make[0]), given.make[1], given.make[2], given.make[3])
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.pool.loss_opinion"]
        subprocess.run([*command, "--states", folder], env={**os.environ, **CLASSES["own"]}, check=True)
        for precision in ("fp32", "bf16"):
            for cheat, name in (("none", "own"), ("none", "other"), *((cheat, cheat) for cheat in CHEATS)):
                environment = {**os.environ, **CLASSES.get(name, CLASSES["own"])}
                words = ["--make", folder, precision, cheat, name]
                subprocess.run([*command, *words], env=environment, check=True)
        rows = compared(Path(folder))
    for row in rows:
        print(json.dumps(row))
    values = {"torch": torch.__version__, "states": len(STATES), "held_back": 512, "cases": rows}
    write_result("loss_opinion", __doc__, values)


if __name__ == "__main__":
    main()
