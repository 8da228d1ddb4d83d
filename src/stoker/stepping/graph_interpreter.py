"""A graph of operations carried out by PyTorch's own interpreter in one call, instead of by Python in many.

What: a graph of ATen operations, as `capture` records it, is written as a TorchScript graph: operation by operation,
the same overloads with the same arguments, nothing fused or left out. Use when: operations are short, so that calling
each from Python (2 to 4 µs more than from C++) takes a share of the time. Costs: milliseconds, once. Does not combine
with: operations that are not ATen's, or arguments that TorchScript has no constants for; such a graph is called from
Python as before. Source: `torch/csrc/jit/runtime/interpreter.cpp`, behind `torch._C.Graph`, which is not public: where
that is gone nothing is interpreted. `torch.jit` itself, with its tracer and its optimiser, is deprecated and not used.

`below_autograd`: within it, operations skip the layer that would record them for a backward pass; results require no
gradient, and in-place changes are still counted. `torch.no_grad` lets each operation ask that layer, 5 % of a pass of a
small MLP (docs/log.md, 2026-11-22). Does not combine with: anything that is to be differentiated. Source:
`at::AutoDispatchBelowAutograd` in `ATen/core/LegacyTypeDispatch.h`. Its binding is not public: where it is gone this is
`torch.no_grad`, which gives the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from stoker.stepping.step_failures import ran_out_of_memory

Repeat = Callable[..., tuple[torch.Tensor, ...]]
"""From a graph's inputs to its outputs, without autograd."""

_native: Any = torch._C  # noqa: SLF001 - the one place that does
_NEEDED = (
    "Graph",
    "Value",
    "_create_function_from_graph",
    "_get_graph_executor_optimize",
    "_set_graph_executor_optimize",
)
_IS_THERE = all(hasattr(_native, name) for name in _NEEDED)

_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
"""TorchScript's numbers of memory formats. Source: `c10/core/MemoryFormat.h`."""


def interpreted(graph: GraphModule) -> Repeat | None:
    """`graph.forward` below autograd, in one call; None where TorchScript cannot express it.

    The graph's outputs must be tensors. Gradients may stay enabled, and must for oneDNN's LSTM, which otherwise keeps
    nothing for its backward pass.
    """
    if not _IS_THERE:
        return None
    script = Script(graph)
    try:
        script_call = script.returning(script.appended())
    except NOT_EXPRESSIBLE:
        return None
    called = called_from_python(graph)

    def repeat(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        try:
            return script_call(*inputs)
        except RuntimeError as problem:
            if not ran_out_of_memory(problem):
                called(*inputs)  # fails in the same way, with the error's own class and message
            raise

    return repeat


def called_from_python(graph: GraphModule) -> Repeat:
    """The same, operation by operation."""

    def repeat(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with below_autograd():
            outputs: tuple[torch.Tensor, ...] = graph.forward(*inputs)
        return outputs

    return repeat


class _NotExpressible(Exception):
    """Something in a graph that TorchScript has no form for."""


NOT_EXPRESSIBLE = (_NotExpressible, RuntimeError, TypeError)
"""What a `Script` raises for what has no form in TorchScript; the last two are the builder's own refusals."""


class Script:
    """A graph's operations in TorchScript, one after the other, `times` times over; values are TorchScript's.

    Inputs are the graph's own for each time, then `num_floats` numbers (`floats`). Tensors that are kept, such as
    weights, become inputs after these, so that their memory is shared and not copied.
    """

    def __init__(self, graph: GraphModule, *, times: int = 1, num_floats: int = 0) -> None:
        self._source = graph
        self._graph = _native.Graph()
        self._values: dict[Node, tuple[Any, ...]] = {}
        """The values of each node: several where its operation returns several."""
        num_inputs = sum(node.op == "placeholder" for node in graph.graph.nodes)
        self._inputs = iter([self._graph.addInput() for _ in range(times * num_inputs)])
        self.floats = [self._graph.addInput() for _ in range(num_floats)]
        for value in self.floats:
            value.setType(_native.FloatType.get())
        self._kept: list[tuple[torch.Tensor, Any]] = []

    def appended(self) -> list[Any]:
        """Append the whole graph, on its next inputs; returns the values of its outputs."""
        outputs: list[Any] = []
        for node in self._source.graph.nodes:
            if node.op == "output":
                outputs = [self._values[output][0] for output in node.args[0]]
            elif node.op != "get_attr" or node not in self._values:
                self._values[node] = self._values_of(node)
        return outputs

    def returning(self, outputs: Sequence[Any]) -> Repeat:
        """All that was appended as a function of the inputs, which returns `outputs`."""
        types = _native.TupleType([value.type() for value in outputs])
        self._graph.registerOutput(self._inserted("prim::TupleConstruct", outputs, [types]).output())
        function: Repeat = _native._create_function_from_graph("repeat", self._graph)  # noqa: SLF001 - as above
        kept = [tensor for tensor, _ in self._kept]

        def call(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            is_optimising = _native._get_graph_executor_optimize()  # noqa: SLF001 - as above
            _native._set_graph_executor_optimize(False)  # noqa: SLF001 - it would fuse products
            try:
                with below_autograd():
                    return function(*inputs, *kept)
            finally:
                _native._set_graph_executor_optimize(is_optimising)  # noqa: SLF001 - as above

        return call

    def kept(self, tensor: torch.Tensor) -> Any:
        """The value of a tensor that is the same one in every call."""
        for known, value in self._kept:
            if known is tensor:
                return value
        self._kept.append((tensor, self._graph.addInput()))
        return self._kept[-1][1]

    def _values_of(self, node: Node) -> tuple[Any, ...]:
        if node.op == "placeholder":
            return (next(self._inputs),)
        if node.op == "get_attr":
            tensor = operator.attrgetter(str(node.target))(self._source)
            if not isinstance(tensor, torch.Tensor):
                raise _NotExpressible(f"{node.target} is a {type(tensor).__name__}")
            return (self.kept(tensor),)
        if node.target is operator.getitem:
            source, index = cast("tuple[Node, Any]", node.args)
            values = self._values[source]  # one of several results, or an entry of a list
            if len(values) > 1:
                return (values[index],)
            items = [*values, self._constant(index)]
            return (self._inserted("aten::__getitem__", items, [_native.TensorType.get()]).output(),)
        if isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001 - has no public name
            return self.called(node.target, *node.args, **node.kwargs)
        raise _NotExpressible(f"{node.target} is no operation of ATen's")

    def called(self, overload: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Append an operation with all of its arguments, including those left at their defaults; its results."""
        schema = overload._schema  # noqa: SLF001 - has no public name
        given = dict(zip((formal.name for formal in schema.arguments), args, strict=False)) | kwargs
        arguments = [
            self._argument(given.get(formal.name, formal.default_value), formal.type) for formal in schema.arguments
        ]
        call = self._inserted(schema.name, arguments, [result.type for result in schema.returns])
        # Of a tensor overload that for a number is accepted too: PyTorch makes a tensor of it, and calls this one.
        packet, name = overload.overloadpacket, overload._overloadname  # noqa: SLF001 - has no public name
        names = ("Tensor", "Scalar") if name == "Tensor" else (name,)
        accepted = {str(getattr(packet, each)._schema) for each in names if each in packet.overloads()}  # noqa: SLF001 - as above
        if call.schema() not in accepted:
            raise _NotExpressible(f"{schema} is taken for {call.schema()}")
        return tuple(call.outputs())

    def _argument(self, given: Any, expected: Any) -> Any:
        """A value for an argument of the expected type: another node's, or a constant."""
        if expected.kind() == "OptionalType":
            return self._constant(None) if given is None else self._argument(given, expected.getElementType())
        if isinstance(given, _native.Value):
            return given
        if isinstance(given, Node):
            (value,) = self._values[given]
            return value
        if not isinstance(given, list | tuple):
            return self._constant(float(given) if expected.kind() == "FloatType" else given)
        if given and all(isinstance(item, int | float) for item in given):
            return self._constant(list(given))  # made once; any other list is put together at each call
        items = [self._argument(item, expected.getElementType()) for item in given]
        return self._inserted("prim::ListConstruct", items, [expected]).output()

    def _constant(self, value: Any) -> Any:
        return self._graph.insertConstant(_MEMORY_FORMATS[value] if isinstance(value, torch.memory_format) else value)

    def _inserted(self, name: str, values: Sequence[Any], types: Sequence[Any]) -> Any:
        """An operation at the graph's end, with results of these types."""
        node = self._graph.insertNode(self._graph.create(name, list(values), len(types)))
        for value, value_type in zip(node.outputs(), types, strict=True):
            value.setType(value_type)
        return node


below_autograd: Callable[[], AbstractContextManager[Any]] = getattr(
    _native, "_AutoDispatchBelowAutograd", torch.no_grad
)
"""Makes a context manager to be entered once."""
