"""A model of two blocks with an embedding before and a head behind, as parts and as a trace; links of round numbers."""

from __future__ import annotations

import dataclasses

from stoker.layouts import axes_of
from stoker.layouts.base import DividedUpdate, Traffic
from stoker.layouts.local_state import held_parts
from stoker.records import Layout, Occurrence, Operation, Storage, TensorShape, Trace, TraceSettings
from stoker.records.hardware import Collective, LinkCost, Links
from stoker.records.profile import ModelParts, Parameter

MIB = 2**20
COLLECTIVES: tuple[Collective, ...] = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "point-to-point",
)


def parameter(name: str, *shape: int, block: int | None = None, division: int | None = None) -> Parameter:
    """In fp32."""
    return Parameter(name=name, shape=shape, item_bytes=4, block=block, division=division)


PARTS = ModelParts(
    name="Toy",
    parameters=(
        parameter("table.weight", 10, 8),
        parameter("blocks.0.up.weight", 16, 8, block=0, division=0),
        parameter("blocks.0.down.weight", 8, 16, block=0, division=1),
        parameter("blocks.1.up.weight", 16, 8, block=1, division=0),
        parameter("blocks.1.down.weight", 8, 16, block=1, division=1),
        parameter("head.weight", 5, 8),
    ),
    blocks=("blocks.0", "blocks.1"),
    divided={"blocks.0.up": "columns", "blocks.0.down": "rows", "blocks.1.up": "columns", "blocks.1.down": "rows"},
)


def messages(layout: Layout, passes: int = 1, parts: ModelParts = PARTS) -> tuple[Traffic, ...]:
    """Of an update of a model over the processes of a layout, those of the loss left out."""
    update = DividedUpdate(layout=layout, parts=parts, held=held_parts(parts, layout, 0), passes=passes, trace=trace)
    return tuple(one for axis in axes_of(layout) for one in axis.traffic(update))


def links(
    size: int = 2,
    *,
    overlap: float = 0.0,
    alpha_s: float = 0.0,
    slowdown: float = 1.0,
    waits: tuple[tuple[float, float], ...] = (),
) -> Links:
    """A gigabyte takes a second, whatever is done with it."""
    costs = tuple(LinkCost(collective=one, alpha_s=alpha_s, beta_s_per_byte=1e-9) for one in COLLECTIVES)
    return Links(
        name="a wire",
        world_size=size,
        costs=costs,
        basis="measured here",
        overlap=overlap,
        waits=waits,
        slowdown={"arithmetic": slowdown, "memory": slowdown} if slowdown > 1 else {},
    )


def shape(*sizes: int) -> TensorShape:
    """In fp32."""
    return TensorShape(shape=sizes, dtype="fp32")


def product(m: int, k: int, n: int) -> Operation:
    """[m, k] @ [k, n]."""
    return Operation(
        name="mm",
        inputs=(shape(m, k), shape(k, n)),
        outputs=(shape(m, n),),
        flops=2 * m * k * n,
        bytes_read=4 * (m * k + k * n),
        bytes_written=4 * m * n,
    )


def trace(settings: TraceSettings | None = None) -> Trace:
    """One update of PARTS over as many rows as samples: forward, backward and an optimiser with two moments.

    Every product's output lives until its backward pass; gradients until the end.
    """
    settings = settings or TraceSettings(target="cpu", capability="", micro_batch=4)
    layers = ["table", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"]
    weights = [one.shape for one in PARTS.parameters]
    rows = settings.micro_batch
    operations: list[Operation] = []
    occurrences: list[Occurrence] = []

    def execute(operation: Operation, phase: str, layer: int, part: int) -> int:
        operations.append(operation)
        occurrences.append(
            Occurrence(operation=len(operations) - 1, phase=phase, part=part, module=layer + 1, source=0)  # type: ignore[arg-type]
        )
        return len(occurrences) - 1

    storages = [Storage(num_bytes=one.num_bytes, category="parameter", born=-1, died=None) for one in PARTS.parameters]
    for one in PARTS.parameters:
        state = (one.num_bytes, one.num_bytes, 4)
        storages += [Storage(num_bytes=size, category="optimizer state", born=-1, died=None) for size in state]
    for part in range(settings.parts):
        born = [execute(product(rows, wide, out), "forward", layer, part) for layer, (out, wide) in enumerate(weights)]
        for layer in reversed(range(len(weights))):
            out, wide = weights[layer]
            at = execute(product(out, rows, wide), "backward", layer, part)
            last = execute(product(rows, out, wide), "backward", layer, part)
            storages.append(Storage(num_bytes=4 * rows * out, category="activation", born=born[layer], died=last))
            if part == 0:
                storages.append(Storage(num_bytes=4 * out * wide, category="gradient", born=at, died=-2))
    lists = tuple(shape(*one) for one in weights)
    total = sum(4 * one.numel for one in lists)
    step = Operation(
        name="_fused_adamw_", inputs=lists, outputs=lists, flops=0, bytes_read=4 * total, bytes_written=3 * total
    )
    end = execute(step, "optimizer", -1, 0)
    storages = [dataclasses.replace(one, died=end) if one.died == -2 else one for one in storages]
    return Trace(
        settings=settings,
        operations=tuple(operations),
        occurrences=tuple(occurrences),
        storages=tuple(storages),
        events=_events(storages, len(occurrences)),
        modules=("", *layers),
        sources=("train_me.py:1",),
    )


def _events(storages: list[Storage], count: int) -> tuple[int, ...]:
    found = [index + 1 for index, one in enumerate(storages) if one.born < 0]
    for at in range(count):
        found += [index + 1 for index, one in enumerate(storages) if one.born == at]
        found += [-(index + 1) for index, one in enumerate(storages) if one.died == at]
    return tuple(found)
