"""Layers of an int8 graph put back: their activations are no longer quantised, their weights stay in 8 bits.

What: a quantised graph rounds activations at points before its layers. Each point is undone alone, and how much nearer
the answers come to the original's ranks it; then the first 1, 2, 4, … of the ranking are undone together, until the
metric is kept. Points that follow one another are taken together where there are more than time allows to ask singly.
Use when: int8 is fast enough and not good enough; often a few layers do all the damage.
Costs: an undone layer computes as the rest does, in fp32 or bf16.
Source: accuracy-aware quantisation as in NNCF's `quantize_with_accuracy_control`, which puts back weights as well and
asks the metric for each; the ranking by answers and the doubling are ours.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from stoker.compressing.candidates.base import Made, explained
from stoker.compressing.candidates.ir import openvino, saved

Group = tuple[str, ...]
"""Points that are undone together, by name."""


def points_of(graph: Path) -> tuple[str, ...]:
    """Where an int8 graph rounds activations, in the order of its layers."""
    with explained("OpenVINO"):
        return tuple(op.get_friendly_name() for op in _read(graph).get_ordered_ops() if _is_point(op))


def undone(graph: Path, directory: Path, points: Collection[str]) -> Made:
    """The graph without rounding at these points, written to `directory`."""
    with explained("OpenVINO"):
        model = _read(graph)
        for op in model.get_ordered_ops():
            if _is_point(op) and op.get_friendly_name() in points:
                for reader in list(op.output(0).get_target_inputs()):
                    reader.replace_source_output(op.input_value(0))
        return saved(model, directory)


def grouped(points: Sequence[str], most: int) -> tuple[Group, ...]:
    """At most `most` groups of points, each of neighbours, of like sizes.

    >>> grouped(["a", "b", "c", "d", "e"], 2)
    (('a', 'b', 'c'), ('d', 'e'))
    """
    size = -(-len(points) // max(1, most))
    return tuple(tuple(points[at : at + size]) for at in range(0, len(points), size))


def shares(groups: Sequence[Group]) -> tuple[int, ...]:
    """How many groups to undo together in turn: 1, 2, 4, …, and never all of them.

    >>> shares([("a",)] * 6)
    (1, 2, 4)
    """
    doubled = (2**power for power in range(len(groups).bit_length()))
    return tuple(count for count in doubled if count < len(groups))


def _read(graph: Path) -> Any:
    return openvino().Core().read_model(graph)


def _is_point(op: Any) -> bool:
    return bool(op.get_type_name() == "FakeQuantize" and op.input_value(0).get_node().get_type_name() != "Constant")
