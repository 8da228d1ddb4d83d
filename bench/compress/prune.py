"""What pruning gives on the demo's CNN: speed, and accuracy before and after training what is left.

    python -m bench.compress.prune --run RUN --fine-tune 0.75     # a finished run of examples/demo.py

For each speed asked for: the share of channels that went, the speed measured in interleaved rounds against the whole
network (in the engine and precision that would serve it, one thread, batches of 1 and 32), and accuracy on the test
images: of the whole network, of what is left right after the cut, and after training it with the whole one as its
teacher. Speeds are of CPU time, so that others on the machine weigh less.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.train.results import document, save
from stoker import api
from stoker.compressing.channel_importance import multiplications
from stoker.compressing.compress import _material
from stoker.compressing.contender import CompressionTerms, Examination
from stoker.compressing.distillation import trained
from stoker.compressing.pruning import TARGETS, decided
from stoker.compressing.source_job import Pruner, pruner_of
from stoker.devices import attached_cpu
from stoker.loading.datasets import datasets_of
from stoker.records import to_json
from stoker.training.pruned_network import rebuild_pruned
from stoker.units import epochs

RESULTS = Path(__file__).parents[1] / "results"


def accuracy(pruner: Pruner, module: nn.Module) -> float:
    """The share of the test images that a network tells rightly."""
    samples = datasets_of(pruner.prepared.job).test
    assert samples is not None
    hits = 0
    with torch.no_grad():
        for start in range(0, len(samples), 1000):
            rows = torch.arange(start, min(start + 1000, len(samples))).numpy()
            images, labels = samples.prepare(samples.fetch(rows, 0))
            hits += int((module.eval()(images).argmax(1) == labels).sum())
    return hits / len(samples)


def products(module: nn.Module, pruner: Pruner) -> float:
    """Multiplications of convolutions and linear layers for an image."""
    return sum(multiplications(module, pruner.ask).values()) / 4


def speeds(pruner: Pruner, aside: Path, targets: Sequence[float], length: float) -> list[dict[str, Any]]:
    """Each speed: what went, how fast the rest is, and how good before and after its training."""
    told = []
    for one in decided(pruner, targets, epochs(length), aside):
        small = rebuild_pruned(pruner.teacher, one.cut)
        began = time.perf_counter()
        run, tuned = trained(pruner.run, pruner.prepared.job, pruner.teacher, one, None)
        took_s = time.perf_counter() - began
        found = {
            "target": one.target,
            "ratio": one.ratio,
            "speed_up": to_json(one.speed_up),
            "engine_precision": one.engine_precision,
            "products": products(small, pruner) / products(pruner.teacher, pruner),
            "parameters": _size(small) / _size(pruner.teacher),
            "accuracy_after_the_cut": accuracy(pruner, small),
            "accuracy_after_training": accuracy(pruner, tuned),
            "trained_for": str(one.until),
            "took_s": took_s,
            "run": run.name,
        }
        print(found, flush=True)
        told.append(found)
    return told


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def main() -> None:
    """Prune the run's model for each speed, and write what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--fine-tune", type=float, default=0.75, metavar="EPOCHS")
    parser.add_argument("--speed", type=float, action="append", help="may be repeated; default: 1.25, 1.5 and 2")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        aside = Path(temporary)
        source = api.export(arguments.run, aside / "models" / "demo")
        material, metric = _material(source, None, None, None, 0)
        course = Examination(
            source, material, metric, CompressionTerms(batch_sizes=(1, 32), threads=1), time.process_time
        )
        cpu = attached_cpu()
        pruner = pruner_of(source, None, course, fast_dtypes=cpu.fast_dtypes, proved_on=cpu.model, tell=print)
        asked = "".join(f" --speed {speed:g}" for speed in arguments.speed or ())
        command = f"python -m bench.compress.prune --run RUN --fine-tune {arguments.fine_tune:g}{asked}"
        content = document(__doc__.splitlines()[0], command, _versions())
        content |= {"load_average": os.getloadavg(), "whole": {"accuracy": accuracy(pruner, pruner.teacher)}}
        content["speeds"] = speeds(pruner, aside, arguments.speed or TARGETS, arguments.fine_tune)
        content["load_average_after"] = os.getloadavg()
        save(RESULTS / f"compress_prune_{datetime.now(UTC).date().isoformat()}.json", content)


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torch", "torch-pruning", "openvino", "onnx")}


if __name__ == "__main__":
    main()
