"""How a model in shards slows down over many machines, by forecast and as measured by others.

    python -m bench.forecast.scaling [--out FILE]

Llama-2-7B, 4,096 tokens, two samples a device in one pass, in shards over 128 to 2,048 H100 with eight network cards of
400 Gbit/s a machine, and, for comparison, in shards within machines. J. Fernandez et al., "Hardware Scaling Trends and
Diminishing Returns in Large-Scale Distributed Training" (2024, arXiv:2411.13055) measured 37.2 % fewer tokens a second
and device over 2,048 than over 128. Nothing runs. Steps of a ring are as NCCL assumes them under the protocol Simple,
which was chosen among NCCL's by this figure: it is calibration, not validation.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import warnings
from datetime import UTC, datetime
from pathlib import Path

import torch

import stoker
from bench.forecast.situations import tokens_of
from stoker.devices import attached_devices, planned_devices
from stoker.planning.multi_device import LayoutCandidates
from stoker.planning.planner import Planner
from stoker.planning.resolved_job import resolve_job
from stoker.records import Layout, Plan

MEASURED = 0.372
LENGTH, EACH = 4096, 2


def step_s(machines: int, shards: int) -> float:
    """Time of an update over machines of eight H100, in groups of so many shards [s]."""
    count = 8 * machines
    job = stoker.Job(
        model=lambda: stoker.zoo.Llama(context=LENGTH, kv_heads=32, hidden=11_008, vocab=32_000),
        data=tokens_of(EACH * count, LENGTH, 32_000),
        loss="token_cross_entropy",
        optimizer=stoker.AdamW(lr=3e-4),
        batch=EACH * count,
        until=stoker.updates(1000),
    )
    (place,) = planned_devices(f"{machines}x8xh100", attached_devices())
    forecasts = LayoutCandidates(Planner(resolve_job(job), is_all_elsewhere=True), place).forecasts(
        Layout(shards=shards, replicas=count // shards)
    )
    plan = Plan(
        device=place.device.torch_name,
        micro_batch=EACH,
        precision="bf16",
        optimizer_implementation="fused",
        loader="device",
    )
    return forecasts.update(plan).step_s.value


def main() -> int:
    """Print times and the decline of both layouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write a JSON document here, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    layouts = {}
    for name, is_within in (("shards over all machines", False), ("shards within machines", True)):
        times_s = {8 * machines: step_s(machines, 8 if is_within else 8 * machines) for machines in (16, 64, 128, 256)}
        decline = 1 - times_s[128] / times_s[2048]
        layouts[name] = {"step_s": times_s, "decline": decline, "measured": None if is_within else MEASURED}
        measured = "" if is_within else f" (measured {MEASURED:.1%})"
        each = ", ".join(f"{count} {seconds:.3f} s" for count, seconds in times_s.items())
        print(f"{name}: {each}; {decline:.1%} fewer tokens a second and device over 2,048 than over 128{measured}")
    if options.out:
        document = {
            "command": "python -m bench.forecast.scaling",
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "layouts": layouts,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
