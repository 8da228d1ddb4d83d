"""Whole numbers with which an OpenVINO graph is exact; of others answers would be those to other numbers.

On the CPU OpenVINO 2026.4 computes whole numbers in 32 bits, and compares, divides and reduces them in float32: of the
identifiers 100,000,000 and 100,000,001 the remainders, and so the rows of a table, are the same. A product with a
constant may need more than 32 bits. So each input that such an operation is computed from has a range, which is empty
where the operation's constant is itself not exact.

Not seen: products of two inputs, sums that need more than 32 bits, and what is within a loop or a branch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

LOWEST, HIGHEST = -(2**31), 2**31 - 1
"""The whole numbers of OpenVINO on the CPU."""
_IN_FLOAT32 = (-(2**24), 2**24)
_COMPUTED_IN_FLOAT32 = frozenset(
    {"Divide", "Equal", "FloorMod", "Greater", "GreaterEqual", "Less", "LessEqual", "Mod", "NotEqual", "Power"}
    | {"ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"}
)
_DIVIDES = frozenset({"Divide", "FloorMod", "Mod"})
_COMPARES = frozenset({"Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual"})
_WITH_CONSTANTS = frozenset({"Add", "Multiply", "Power", "Subtract"})
_NONE = (1, 0)
"""No number."""
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
        if (results := _exact_results(node)) is None:
            continue
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


def inexact(name: str, exact: Range) -> str:
    """Why an input that has numbers beyond a range is refused."""
    least, greatest = exact
    if exact == (LOWEST, HIGHEST):
        return f"openvino computes in 32 bits, and {name!r} has numbers that need more"
    if least > greatest:
        return (
            f"openvino divides in float32 and computes in 32 bits, and {name!r} meets a constant of the model that "
            "needs more; export the model again: it gets another engine"
        )
    return (
        f"openvino is exact for numbers from {least:,} to {greatest:,} in {name!r}, which has others; "
        "exported with such examples, the model gets another engine"
    )


def _exact_results(node: Any) -> Range | None:
    """The results with which an operation is exact, none if its own constant is not; None where nothing is checked."""
    kind, numbers = node.get_type_name(), _constant(node)
    if kind not in _COMPUTED_IN_FLOAT32 and kind not in _WITH_CONSTANTS:
        return None
    if kind in _COMPARES and numbers.size:
        if np.abs(numbers).max() < _IN_FLOAT32[1]:
            return None  # larger numbers are rounded, but not to the constant or beyond it
        return _IN_FLOAT32[0] + 1, _IN_FLOAT32[1] - 1  # nor is the constant, which becomes one of 32 bits, to these
    least, greatest = _IN_FLOAT32 if kind in _DIVIDES else (LOWEST, HIGHEST)
    if numbers.size and (numbers.min() < least or numbers.max() > greatest):
        return _NONE
    if kind in _COMPUTED_IN_FLOAT32:
        return _IN_FLOAT32
    return (LOWEST, HIGHEST) if kind == "Multiply" else None


def _operands(node: Any, results: Range) -> Range:
    """The numbers of an operation's other operand with which its results are in a range, if one is a constant."""
    kind, (least, greatest) = node.get_type_name(), results
    if kind == "Negative":
        return -greatest, -least
    numbers = _constant(node)
    if kind not in _WITH_CONSTANTS or not numbers.size or least > greatest:
        return results
    low, high = int(numbers.min()), int(numbers.max())
    is_second = node.input_value(1).get_node().get_type_name() == "Constant"
    if kind == "Add":
        return least - low, greatest - high
    if kind == "Subtract":
        return (least + high, greatest + low) if is_second else (high - greatest, low - least)
    if kind == "Power":
        return _operands_of_power(min(greatest, _IN_FLOAT32[1]), low, high, is_exponent=is_second)
    lowest, highest = LOWEST, HIGHEST
    for factor in {low, high} - {0}:
        first, last = (least, greatest) if factor > 0 else (greatest, least)
        lowest, highest = max(lowest, -(-first // factor)), min(highest, last // factor)
    return lowest, highest


def _operands_of_power(greatest: int, low: int, high: int, *, is_exponent: bool) -> Range:
    """The bases of which powers are at most `greatest`, or the exponents if the constant is the base."""
    greatest = max(1, greatest)
    if is_exponent:
        most = int(greatest ** (1 / max(1, high)) + 1e-6)
        return -most, most
    return 0, int(math.log(greatest, max(2, abs(low), abs(high))) + 1e-6)


def _constant(node: Any) -> NDArray[Any]:
    """The whole numbers of an operation's constant operand, the second if both are; none of others."""
    values = [value for value in reversed(node.input_values()) if value.get_element_type().get_type_name() in _WHOLE]
    constant = next((one for value in values if (one := value.get_node()).get_type_name() == "Constant"), None)
    return np.zeros(0) if constant is None else np.asarray(constant.get_data(), np.float64)
