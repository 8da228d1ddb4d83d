"""What each transform costs: CPU time an image, a batch at once and image by image.

    python -m bench.data.augment [--batch 256] [--side 32] [--rounds 15]

Colour images of bytes in batches on the CPU, one thread, draws included. Printed and written to bench/results/: the
median over rounds of microseconds of CPU time an image, for the batch and for batches of one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker.devices.cpu import attached_cpu
from stoker.loading import transforms as t
from stoker.loading.mixing import pairing_of

ALONE = 32
"""Images that are transformed one by one."""


def by_name(side: int) -> dict[str, Callable[..., Any]]:
    """The transforms with the settings that papers use them with."""
    return {
        "RandomFlip": t.RandomFlip(),
        "RandomShift(4)": t.RandomShift(4),
        f"RandomCrop({side - side // 8})": t.RandomCrop(side - side // 8),
        "RandomRotation(15)": t.RandomRotation(15),
        "RandomAffine": t.RandomAffine(degrees=15, scale=(0.8, 1.2), translate=(0.1, 0.1), shear=10),
        f"RandomResizedCrop({side})": t.RandomResizedCrop(side),
        "ColorJitter(0.4, 0.4, 0.4, 0.1)": t.ColorJitter(0.4, 0.4, 0.4, 0.1),
        "RandomGrayscale": t.RandomGrayscale(0.2),
        "Cutout": t.Cutout(side // 4),
        "RandomErasing": t.RandomErasing(),
        "GaussianBlur(radius=1)": t.GaussianBlur(radius=1),
        "GaussianNoise": t.GaussianNoise(8.0),
        "Autocontrast": t.Autocontrast(),
        "Posterize(4)": t.Posterize(4),
        "Solarize": t.Solarize(),
        "Normalize": t.Normalize(0.5, 0.25),
        "OneOf(rotate, color, solarize)": t.OneOf([t.RandomRotation(30), t.ColorJitter(0.4), t.Solarize()]),
    }


def cpu_us(work: Callable[[], Any], rounds: int) -> float:
    """The median CPU time of `work` [us]."""
    work()
    spent = []
    for _ in range(rounds):
        started = time.thread_time()
        work()
        spent.append(1e6 * (time.thread_time() - started))
    return statistics.median(spent)


def costs(batch: int, side: int, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds an image, in a batch and alone."""
    x_BCHW = torch.randint(0, 256, (batch, 3, side, side), dtype=torch.uint8)
    indices, cpu = np.arange(batch), torch.device("cpu")

    def alone(transform: Callable[..., Any]) -> None:
        for i in range(ALONE):
            transform(x_BCHW[i : i + 1], t.Draw(0, 0, indices[i : i + 1], cpu))

    found = {}
    for name, transform in by_name(side).items():
        whole = cpu_us(lambda transform=transform: transform(x_BCHW, t.Draw(0, 0, indices, cpu)), rounds)
        single = cpu_us(lambda transform=transform: alone(transform), max(3, rounds // 5))
        found[name] = {"in_a_batch_us": round(whole / batch, 2), "alone_us": round(single / ALONE, 1)}
    for mix in (t.Mixup(), t.CutMix()):
        drawn = cpu_us(lambda mix=mix: pairing_of((mix,), seed=0, epoch=0, update=1, size=batch), rounds)
        found[f"who is mixed with whom ({type(mix).__name__})"] = {"in_a_batch_us": round(drawn / batch, 2)}
    return found


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "what": "CPU time of transforms, microseconds an image of bytes, 3 channels",
        "command": f"python -m bench.data.augment --batch {arguments.batch} --side {arguments.side} "
        f"--rounds {arguments.rounds}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{attached_cpu().model}, torch {torch.__version__}, 1 thread",
        "load": os.getloadavg()[0],
        "transforms": costs(arguments.batch, arguments.side, arguments.rounds),
    }
    text = json.dumps(result, indent=2)
    print(text)
    results = Path(__file__).parents[1] / "results"
    (results / f"augment_{result['date']}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
