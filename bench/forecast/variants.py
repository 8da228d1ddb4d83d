"""Rules that forecasts of variants of one job have to keep, whatever their size: what breaks one is printed.

    python -m bench.forecast.variants [--only FAMILY] [--out FILE]

Published steps say how far off a forecast is; these rules say whether forecasts can be right together. Each varies one
setting of a job of a known shape: no precision of fewer bits is slower, no later device, no compiled plan, no larger
micro-batch for each sample; more devices are no more efficient; recomputing takes time and saves memory; a step is no
faster than its arithmetic at the datasheet's rate; memory holds at least the state. Nothing runs.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import stoker
from bench.forecast.published import GIB, forecasts_of, planner_of
from bench.forecast.situations import tokens_of
from stoker.devices import attached_devices, planned_devices
from stoker.jobs import load_job
from stoker.planning.model.layout_forecast import local_profile
from stoker.planning.model.search_space import trace_settings
from stoker.planning.planner import Planner

SLACK = 1.03
"""What a rule allows: kernels differ between shapes, and no forecast is better than this."""
NARROWEST, WIDEST = 1.1, 9.0
"""Ends of an interval, the upper over the lower: a network that is not known may be three times as fast or slow."""
FRAGMENTED = 1.2
"""What smaller shards may need more, since an allocator holds pieces of other sizes [1]."""
PRECISIONS = ("fp32", "tf32", "bf16")
COUNTS = (2, 8, 64, 512)
DEVICES = (
    ("t4", "v100-32", "a100-40", "a100-80", "h100-pcie", "h100", "h200", "b200"),
    ("a10g", "rtx-3090", "rtx-4090", "rtx-5090"),
    ("l4", "l40s"),
)
"""Devices in orders in which all that counts of one is at least what it is of the one before."""


@dataclass(frozen=True)
class Family:
    """Micro-batches that are compared on one device [samples], and the blocks that can be checkpointed.

    0 blocks: samples are coupled, so that there is one micro-batch, and none is checkpointed.
    """

    micro_batches: tuple[int, ...]
    blocks: int


FAMILIES = {
    "resnet": Family((16, 32, 64, 128, 256), 0),
    "vit": Family((16, 32, 64, 128), 12),
    "gpt": Family((1, 2, 4, 8, 16), 12),
    "encoder": Family((4, 8, 16, 32), 12),
    "llama": Family((1, 2, 4), 16),
}


def job(family: str = "gpt", batch: int = 16) -> stoker.Job:
    """ResNet-50, ViT-B/16, GPT-2, BERT-base or Llama of 1.2 billion parameters."""
    zoo = stoker.zoo
    vocab, length = {"gpt": (50_304, 1024), "encoder": (30_522, 512), "llama": (128_256, 4096)}.get(family, (0, 224))
    models: dict[str, Callable[[], torch.nn.Module]] = {
        "resnet": lambda: zoo.ResNet(50),
        "vit": lambda: zoo.ViT(image=224, patch=16, layers=12, width=768, heads=12),
        "gpt": lambda: zoo.GPT(layers=12, width=768, heads=12, context=length, vocab=vocab, tied=True),
        "encoder": lambda: zoo.Encoder(vocab=vocab, classes=2),
        "llama": lambda: zoo.Llama(
            layers=16, width=2048, heads=32, kv_heads=8, hidden=8192, vocab=vocab, context=length
        ),
    }
    if family == "encoder":
        tokens, _ = tokens_of(batch, length, vocab)
        data = tokens, torch.arange(batch) % 2
    elif vocab:
        data = tokens_of(batch, length, vocab)
    else:
        data = torch.zeros(1, 3, length, length).expand(batch, -1, -1, -1), torch.arange(batch) % 1000
    return stoker.Job(
        model=models[family],
        data=data,
        loss="cross_entropy" if family in ("resnet", "vit", "encoder") else "token_cross_entropy",
        optimizer=stoker.AdamW(lr=1e-4),
        batch=batch,
        until=stoker.updates(100),
        seed=0,
    )


@functools.cache
def _planner(family: str, batch: int) -> Planner:
    given, entry = load_job(Path(__file__), {"family": family, "batch": str(batch)})
    return planner_of(given, entry)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A forecast in figures: an update [s] with its interval, memory [GiB], and bounds of both for any program.

    `least_s` is the forward and twice the backward pass's products at the printed rate, of causal attention a half;
    `least_gib` the weights, gradients and moments of AdamW in fp32, divided as the layout divides them.
    """

    words: str
    step_s: float
    low_s: float
    high_s: float
    needed_gib: float
    least_s: float
    least_gib: float


@functools.cache
def _variant(family: str, batch: int, on: str, plan: str) -> Variant | None:
    """The forecast of a plan (JSON); None where the device does not have its precision."""
    fields, planner = json.loads(plan), _planner(family, batch)
    (place,) = planned_devices(on, attached_devices())
    rates, precision = place.hardware.dense_flops, fields["precision"]
    if precision not in rates:
        return None
    forecasts, own = forecasts_of(planner, place, fields)
    layout, step = forecasts.layout, forecasts.update(own).step_s
    profile = local_profile(planner.profile(place.device.kind), layout)
    trace = planner.needs.trace(trace_settings(own, profile, place.hardware.compute_capability or "", layout))
    forward = sum(
        trace.operations[one.operation].flops * (0.5 if "attention" in trace.operations[one.operation].name else 1.0)
        for one in trace.occurrences
        if one.phase == "forward" and one.part == 0
    )
    weights = sum(one.num_bytes for one in trace.storages if one.born < 0 and one.category == "parameter")
    return Variant(
        words=f"{family}, batch {batch}, {on}, {plan}",
        step_s=step.value,
        low_s=step.low,
        high_s=step.high,
        needed_gib=forecasts.needed_bytes(own) / GIB,
        least_s=3 * forward / own.micro_batch * batch / layout.world_size / rates[precision],
        least_gib=4 * weights / layout.shards / GIB,
    )


class Rules:
    """Forecasts of one family against each other; `broken` are sentences with both figures."""

    def __init__(self, family: str) -> None:
        self.family, self.sizes = family, FAMILIES[family]
        self.seen: dict[str, Variant] = {}
        self.broken: list[str] = []

    def of(self, batch: int, on: str, **fields: Any) -> Variant | None:
        """A variant, held against what bounds it by itself."""
        usual = {"micro_batch": batch, "precision": "fp32", "loader": "memory"}
        if self.family == "resnet":
            usual["memory_format"] = "channels_last"
        found = _variant(self.family, batch, on, json.dumps(usual | fields))
        if found is not None and found.words not in self.seen:
            self.seen[found.words] = found
            self.require("no faster than the printed rate", found, found.least_s, holds=found.step_s >= found.least_s)
            self.require("no less than the state", found, found.least_gib, holds=found.needed_gib >= found.least_gib)
            width = found.high_s / found.low_s
            self.require(f"an interval of {NARROWEST} to {WIDEST}", found, width, holds=NARROWEST <= width <= WIDEST)
        return found

    def require(self, rule: str, found: Variant, other: Variant | float, *, holds: bool) -> None:
        """Note a rule that does not hold."""
        if holds:
            return
        shown = f"{other:.3g}" if isinstance(other, float) else f"{other.step_s:.3g} s, {other.needed_gib:.3g} GiB"
        than = "" if isinstance(other, float) else f" of {other.words}"
        self.broken.append(f"{rule}: {found.words}: {found.step_s:.3g} s, {found.needed_gib:.3g} GiB; {shown}{than}")

    def no_slower(self, rule: str, variants: Sequence[Variant | None], each: Sequence[float] | None = None) -> None:
        """Each takes no longer than the one before, divided by `each` (samples)."""
        sizes = each or [1.0] * len(variants)
        known = [(one, size) for one, size in zip(variants, sizes, strict=True) if one is not None]
        for (slow, many), (fast, more) in itertools.pairwise(known):
            self.require(rule, fast, slow, holds=fast.step_s / more <= SLACK * slow.step_s / many)

    def check(self) -> None:
        """All rules."""
        middle = self.sizes.micro_batches[len(self.sizes.micro_batches) // 2]
        for device in dict.fromkeys(itertools.chain(*DEVICES)):
            self._settings(middle, device)
        for order in DEVICES:
            for precision in PRECISIONS:
                variants = [self.of(middle, device, precision=precision) for device in order]
                self.no_slower("a later device is no slower", variants)
        self._sizes("a100-80")
        self._sizes("h100")
        for device, precision in itertools.product(("a100-80", "h100", "l40s"), ("fp32", "bf16")):
            self._layouts(middle, device, precision)

    def _settings(self, batch: int, device: str) -> None:
        precisions = [self.of(batch, device, precision=precision) for precision in PRECISIONS]
        self.no_slower("fewer bits are no slower", precisions)
        for precision in PRECISIONS:
            compiled = self.of(batch, device, precision=precision, compile=True)
            self.no_slower("compiled is no slower", [self.of(batch, device, precision=precision), compiled])
        if self.family == "resnet":
            formats = [self.of(batch, device, precision="bf16", memory_format="contiguous")]
            self.no_slower("channels-last is no slower", [*formats, self.of(batch, device, precision="bf16")])
        blocks = self.sizes.blocks
        if blocks:
            saving = [
                self.of(batch, device, precision="bf16", checkpointed_blocks=blocks),
                self.of(batch, device, precision="bf16", checkpointed_blocks=blocks, checkpointing="selective"),
                self.of(batch, device, precision="bf16"),
            ]
            self.no_slower("recomputing less is no slower", saving)
            for less, more in itertools.pairwise(one for one in saving if one is not None):
                self.require("recomputing saves memory", less, more, holds=less.needed_gib <= SLACK * more.needed_gib)

    def _sizes(self, device: str) -> None:
        sizes = self.sizes.micro_batches
        for precision, is_compiled in itertools.product(PRECISIONS, (False, True)):
            variants = [self.of(size, device, precision=precision, compile=is_compiled) for size in sizes]
            self.no_slower("a larger micro-batch is no slower for each sample", variants, sizes)
            for small, large in itertools.pairwise(one for one in variants if one is not None):
                self.require(
                    "a larger micro-batch needs more", small, large, holds=small.needed_gib <= large.needed_gib
                )
        if self.sizes.blocks:
            whole, cut = (self.of(sizes[-1], device, precision="bf16", micro_batch=size) for size in sizes[-1:-3:-1])
            self.no_slower("fewer micro-batches are no slower", [cut, whole])

    def _layouts(self, batch: int, device: str, precision: str) -> None:
        one = self.of(batch, device, precision=precision)
        for axis in ("replicas", "shards"):
            spread = [
                self.of(
                    batch * count, f"{count}x{device}", micro_batch=batch, precision=precision, layout={axis: count}
                )
                for count in COUNTS
            ]
            self.no_slower(
                "more devices are no more efficient", [*spread[::-1], *([one] if axis == "replicas" else [])]
            )
            if axis == "shards":
                for few, many in itertools.pairwise(each for each in spread if each is not None):
                    self.require(
                        "more shards need no more", many, few, holds=many.needed_gib <= FRAGMENTED * few.needed_gib
                    )


def main() -> int:
    """Forecast all variants and print what breaks a rule; 0 if nothing does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(FAMILIES), help="one family")
    parser.add_argument("--out", type=Path, help="write a JSON document here, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    counted, broken = 0, list[str]()
    for family in [options.only] if options.only else FAMILIES:
        rules = Rules(family)
        rules.check()
        counted, broken = counted + len(rules.seen), broken + rules.broken
        print(f"{family}: {len(rules.seen)} forecasts, {len(rules.broken)} break a rule", flush=True)
        for sentence in rules.broken:
            print(f"    {sentence}", flush=True)
    if options.out:
        document = {
            "command": "python -m bench.forecast.variants" + (f" --only {options.only}" if options.only else ""),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "forecasts": counted,
            "broken": broken,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
