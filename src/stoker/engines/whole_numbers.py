"""Whole numbers with which an OpenVINO graph is exact; of others answers would be those to other numbers.

On the CPU OpenVINO 2026.4 computes whole numbers in 32 bits, and compares, divides and reduces them in float32: of the
identifiers 100,000,000 and 100,000,001 the remainders, and so the rows of a table, are the same. A product with a
constant may need more than 32 bits. So each input that such an operation is computed from has a range.

Not seen: products of two inputs, sums that need more than 32 bits, and what is within a loop or a branch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

LOWEST, HIGHEST = -(2**31), 2**31 - 1
"""The whole numbers of OpenVINO on the CPU."""
_IN_FLOAT32 = (-(2**24), 2**24)
_COMPUTED_IN_FLOAT32 = frozenset(
    {"Divide", "Equal", "FloorMod", "Greater", "GreaterEqual", "Less", "LessEqual", "Mod", "NotEqual", "Power"}
    | {"ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"}
)
_WHOLE = frozenset({"i32", "i64", "u32", "u64"})

Range = tuple[int, int]
"""The least and the greatest number."""


def exact_ranges(model: Any, names: Iterable[str]) -> dict[str, Range]:
    """The numbers with which a graph is exact, by name, of inputs that such an operation is computed from.

    Args:
        model: OpenVINO's, not compiled yet.
        names: of the model's inputs.
    """
    known, ranges = frozenset(names), dict[str, Range]()
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind not in _COMPUTED_IN_FLOAT32 and kind != "Multiply":
            continue
        results = (LOWEST, HIGHEST) if kind == "Multiply" else _IN_FLOAT32
        waiting: list[tuple[Any, Range]] = [(node, results)]
        seen = set[tuple[str, Range]]()
        while waiting:
            current, (least, greatest) = waiting.pop()
            if (place := (current.get_friendly_name(), (least, greatest))) in seen:
                continue
            seen.add(place)
            if current.get_type_name() == "Parameter":
                for name in current.output(0).get_names() & known:
                    low, high = ranges.get(name, (LOWEST, HIGHEST))
                    ranges[name] = (max(low, least), min(high, greatest))
            if current.get_type_name() == "ShapeOf":  # a shape does not depend on numbers
                continue
            operands = _operands(current, (least, greatest))
            values = [value for value in current.input_values() if value.get_element_type().get_type_name() in _WHOLE]
            waiting += [(value.get_node(), operands) for value in values]
    return ranges


def _operands(node: Any, results: Range) -> Range:
    """The numbers of an operation's other operand with which its results are in a range, if one is a constant."""
    kind, (least, greatest) = node.get_type_name(), results
    if kind not in ("Add", "Subtract", "Multiply"):
        return results
    first, second = (value.get_node() for value in node.input_values())
    constant = next((one for one in (second, first) if one.get_type_name() == "Constant"), None)
    numbers = np.zeros(0) if constant is None else np.asarray(constant.get_data(), np.float64)
    if not numbers.size:
        return results
    low, high = int(numbers.min()), int(numbers.max())
    if kind == "Add":
        return least - low, greatest - high
    if kind == "Subtract":
        return (least + high, greatest + low) if constant is second else (high - greatest, low - least)
    most = max(1, abs(low), abs(high))
    return -(-least // most), greatest // most
