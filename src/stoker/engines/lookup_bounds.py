"""Bounds of lookups in OpenVINO graphs: a category or token that a table lacks is an error, as in PyTorch and ONNX.

OpenVINO 2026.4 checks hardly any index on the CPU. `Gather` answers 0 for one that is out of bounds. `GatherND` reads,
and `ScatterNDUpdate` and `ScatterElementsUpdate` write, wherever it points: the next sample of the batch, other memory
of the process, or an address that ends it; the last may also fail, and right requests with it from then on. So the
least and the greatest index of each lookup whose indices are computed become an output, which is compared with the
table's sizes after a run; all but `Gather` take indices cut to the table.

Costs: two reductions of the indices of each lookup, and reading one output.

What is not checked: lookups within the body of a loop or a branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

BOUNDS = "stoker.lookup_bounds"
"""The output with the bounds of all lookups, one after the other: least, greatest, and sizes that vary."""
_AXIS_INPUTS = {"Gather": 2, "ScatterElementsUpdate": 3}
"""Operations whose indices address one dimension, and the input that says which."""
_KINDS = ("GatherND", "ScatterNDUpdate", "GatherElements", *_AXIS_INPUTS)


@dataclass(frozen=True)
class Lookup:
    """A lookup in a compiled graph, by indices of one number or several.

    `sizes` are those of the table's dimensions that an index addresses, None where they vary; `inputs` are the model's
    inputs that the indices are computed from.
    """

    num_axes: int
    sizes: tuple[int, ...] | None
    inputs: tuple[str, ...]


def lookup_fault(lookups: Sequence[Lookup], bounds: Sequence[int]) -> str:
    """Why the indices of a run are not in their tables, by its output `BOUNDS`; empty if all are."""
    start = 0
    for lookup in lookups:
        count = lookup.num_axes
        least, greatest = bounds[start : start + count], bounds[start + count : start + 2 * count]
        start += 2 * count
        sizes = lookup.sizes
        if sizes is None:
            sizes = tuple(bounds[start : start + count])
            start += count
        for low, high, size in zip(least, greatest, sizes, strict=True):
            if high >= size or low < -size:
                who = " and ".join(map(repr, lookup.inputs)) or "the model"
                return f"{who} has a number beyond the {' × '.join(map(str, sizes))} entries that it is looked up in"
    return ""


def bounded_lookups(model: Any, ops: Any, names: Iterable[str]) -> tuple[Lookup, ...]:
    """Add the output `BOUNDS` to a model that is not compiled yet, if it looks anything up.

    Args:
        model: OpenVINO's, changed in place.
        ops: OpenVINO's operations, such as `openvino.opset13`.
        names: of the model's inputs.
    """
    known, lookups, parts, zero = frozenset(names), list[Lookup](), list[Any](), ops.constant(np.array([0], np.int64))
    for node in model.get_ordered_ops():
        axes = _axes(node)
        if not axes:
            continue
        table, indices = node.input_value(0), node.input_value(1)
        rows = ops.reshape(indices, ops.constant(np.array([-1, len(axes)], np.int64)), special_zero=False)
        parts += [ops.reduce_min(rows, zero), ops.reduce_max(rows, zero)]
        dims, sizes = [table.get_partial_shape()[axis] for axis in axes], None
        if all(dim.is_static for dim in dims):
            sizes = tuple(dim.get_length() for dim in dims)
            most = ops.constant(np.array(sizes, np.int64))
        else:
            shape = ops.shape_of(table, output_type="i64")
            most = ops.gather(shape, ops.constant(np.array(axes, np.int64)), ops.constant(np.int64(0)))
            parts.append(most)
        if node.get_type_name() != "Gather":
            kind = indices.get_element_type()
            one, size = ops.constant(np.array(1, kind.to_dtype())), ops.convert(most, kind.get_type_name())
            inside = ops.minimum(ops.maximum(indices, ops.negative(size)), ops.subtract(size, one))
            node.input(1).replace_source_output(inside.output(0))
        lookups.append(Lookup(len(axes), sizes, _sources(indices.get_node(), known)))
    if lookups:
        bounds = ops.concat([ops.convert(part, "i64") for part in parts], 0)
        bounds.output(0).get_tensor().add_names({BOUNDS})
        model.add_results([ops.result(bounds)])
    return tuple(lookups)


def _axes(node: Any) -> tuple[int, ...]:
    """Dimensions of its table that a node's indices address, one for each number of an index; none of other nodes."""
    kind = node.get_type_name()
    if kind not in _KINDS or node.input_value(1).get_node().get_type_name() == "Constant":
        return ()
    table, indices = node.input_value(0).get_partial_shape(), node.input_value(1).get_partial_shape()
    if table.rank.is_dynamic:
        return ()
    if kind == "GatherElements":
        return (node.get_attributes()["axis"] % table.rank.get_length(),)
    if kind in _AXIS_INPUTS:
        axis = node.input_value(_AXIS_INPUTS[kind]).get_node()
        if axis.get_type_name() != "Constant":
            return ()
        number = int(np.asarray(axis.get_data()).reshape(-1)[0])
        return (number % table.rank.get_length(),)
    if indices.rank.is_dynamic or indices[indices.rank.get_length() - 1].is_dynamic:
        return ()
    first = node.get_attributes().get("batch_dims", 0)
    return tuple(range(first, first + indices[indices.rank.get_length() - 1].get_length()))


def _sources(node: Any, names: frozenset[str]) -> tuple[str, ...]:
    """The model's inputs whose numbers a node is computed from, in the order in which they are found."""
    found: dict[str, None] = {}
    seen, waiting = set[str](), [node]
    while waiting:
        current = waiting.pop()
        if current.get_friendly_name() in seen:
            continue
        seen.add(current.get_friendly_name())
        if current.get_type_name() == "Parameter":
            found |= dict.fromkeys(sorted(current.output(0).get_names() & names))
        if current.get_type_name() not in ("ShapeOf", "Constant"):  # a shape does not depend on numbers
            waiting += [value.get_node() for value in current.input_values()]
    return tuple(found)
