"""A list of operations that PyTorch's own interpreter carries out in one call, instead of Python in many.

What: a graph of ATen operations, as capture notes it, is written as a TorchScript graph: operation by operation, the
same overloads with the same arguments, nothing fused or left out. Use when: operations are short, so that calling each
from Python (2 to 4 µs more than from C++) takes a share of the time. Costs: milliseconds, once. Does not combine with:
operations that are not ATen's, or arguments that TorchScript has no constants for; such a graph is None, and is called
from Python as before. Source: `torch/csrc/jit/runtime/interpreter.cpp`, behind `torch._C.Graph`, which is not public:
where that is gone nothing is interpreted. `torch.jit` itself, with its tracer and its optimiser, is deprecated and not
used.

Operations called without autograd's part in each call.

What: within the block, operations go past the layer that would note them for a backward pass; what they give requires
no gradient, what they write to counts its version up as ever. Use when: many short operations follow each other:
`torch.no_grad` lets each of them ask that layer, 5 % of a pass of a small MLP (docs/log.md, 2026-11-22).
Costs: nothing. Does not combine with: anything that is to be differentiated.
Source: `at::AutoDispatchBelowAutograd` in `ATen/core/LegacyTypeDispatch.h`. Its binding is not public: where it is gone
this is `torch.no_grad`, which gives the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import GraphModule, Node

from stoker.stepping.step_failures import ran_out_of_memory

Repeat = Callable[..., tuple[torch.Tensor, ...]]
"""From a graph's inputs to its outputs, without autograd."""

_native: Any = torch._C  # noqa: SLF001 - the one place that does
_NEEDED = ("Graph", "_create_function_from_graph", "_get_graph_executor_optimize", "_set_graph_executor_optimize")
_IS_THERE = all(hasattr(_native, name) for name in _NEEDED)

_MEMORY_FORMATS = {
    torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2, torch.channels_last_3d: 3,
}  # fmt: skip
"""TorchScript's numbers of them. Source: `c10/core/MemoryFormat.h`."""


def interpreted(graph: GraphModule) -> Repeat | None:
    """What `graph.forward` does below autograd, in one call; None where it cannot be told to the interpreter.

    The graph's outputs must be tensors. Gradients may stay enabled, and must for oneDNN's LSTM: what its backward pass
    reads it keeps only then.
    """
    if not _IS_THERE:
        return None
    script = _Script(graph)
    try:
        function = script.function()
    except (_NotExpressible, RuntimeError, TypeError):  # the last two are the builder's own refusals
        return None
    kept, called = script.kept, called_from_python(graph)

    def repeat(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        is_optimising = _native._get_graph_executor_optimize()  # noqa: SLF001 - as above
        _native._set_graph_executor_optimize(False)  # noqa: SLF001 - it would fuse products
        try:
            with below_autograd():
                outputs: tuple[torch.Tensor, ...] = function(*inputs, *kept)
        except RuntimeError as problem:
            if not ran_out_of_memory(problem):
                called(*inputs)  # fails likewise, under the error's own class and in its own words
            raise
        finally:
            _native._set_graph_executor_optimize(is_optimising)  # noqa: SLF001 - as above
        return outputs

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


class _Script:
    """A graph's operations told to TorchScript, one after the other.

    `kept` are the tensors that the graph holds itself, such as weights. They go in as inputs behind its own, so that
    they stay what they are wherever they lie.
    """

    def __init__(self, graph: GraphModule) -> None:
        self._source = graph
        self._graph = _native.Graph()
        self._values: dict[Node, tuple[Any, ...]] = {}
        """What each node gives: several values where its operation returns several."""
        self.kept: list[torch.Tensor] = []

    def function(self) -> Callable[..., Any]:
        """The whole graph as a function.

        Raises:
            _NotExpressible, RuntimeError, TypeError: it has no form in TorchScript.
        """
        for node in self._source.graph.nodes:
            if node.op == "output":
                self._returned(node.args[0])
            else:
                self._values[node] = self._told(node)
        function: Callable[..., Any] = _native._create_function_from_graph("repeat", self._graph)  # noqa: SLF001
        return function

    def _told(self, node: Node) -> tuple[Any, ...]:
        if node.op == "placeholder":
            return (self._graph.addInput(),)
        if node.op == "get_attr":
            tensor = operator.attrgetter(str(node.target))(self._source)
            if not isinstance(tensor, torch.Tensor):
                raise _NotExpressible(f"{node.target} is a {type(tensor).__name__}")
            self.kept.append(tensor)
            return (self._graph.addInput(),)
        if node.target is operator.getitem:
            return (self._picked(*node.args),)
        if isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001 - has no public name
            return self._called(node.target, node)
        raise _NotExpressible(f"{node.target} is no operation of ATen's")

    def _called(self, overload: Any, node: Node) -> tuple[Any, ...]:
        """An operation with all of its arguments, those too that were left at their defaults."""
        schema = overload._schema  # noqa: SLF001 - has no public name
        given = dict(zip((one.name for one in schema.arguments), node.args, strict=False)) | node.kwargs
        arguments = [self._argument(given.get(one.name, one.default_value), one.type) for one in schema.arguments]
        call = self._inserted(schema.name, arguments, [one.type for one in schema.returns])
        if call.schema() not in _meant(overload):
            raise _NotExpressible(f"{schema} is taken for {call.schema()}")
        return tuple(call.outputs())

    def _argument(self, given: Any, wanted: Any) -> Any:
        """A value for an argument of that type: another node's, or a constant."""
        if wanted.kind() == "OptionalType":
            return self._constant(None) if given is None else self._argument(given, wanted.getElementType())
        if isinstance(given, Node):
            (value,) = self._values[given]
            return value
        if isinstance(given, list | tuple):
            return self._listed(given, wanted)
        return self._constant(float(given) if wanted.kind() == "FloatType" else given)

    def _listed(self, given: Sequence[Any], wanted: Any) -> Any:
        """Plain numbers as one constant, which is made once; anything else put together at each call."""
        if given and all(isinstance(one, int | float) for one in given):
            return self._constant(list(given))
        items = [self._argument(one, wanted.getElementType()) for one in given]
        return self._inserted("prim::ListConstruct", items, [wanted]).output()

    def _constant(self, value: Any) -> Any:
        return self._graph.insertConstant(_MEMORY_FORMATS[value] if isinstance(value, torch.memory_format) else value)

    def _picked(self, node: Any, at: Any) -> Any:
        """One of several results, or an entry of a list."""
        values = self._values[node]
        if len(values) > 1:
            return values[at]
        return self._inserted("aten::__getitem__", [*values, self._constant(at)], [_native.TensorType.get()]).output()

    def _returned(self, outputs: Sequence[Any]) -> None:
        values = [self._values[one][0] for one in outputs]
        types = _native.TupleType([value.type() for value in values])
        self._graph.registerOutput(self._inserted("prim::TupleConstruct", values, [types]).output())

    def _inserted(self, name: str, values: Sequence[Any], types: Sequence[Any]) -> Any:
        """An operation at the graph's end, with results of these types."""
        node = self._graph.insertNode(self._graph.create(name, list(values), len(types)))
        for value, its in zip(node.outputs(), types, strict=True):
            value.setType(its)
        return node


def _meant(overload: Any) -> set[str]:
    """The overload, and the one for a number where this has a tensor: PyTorch makes a tensor of it, and calls this."""
    packet, name = overload.overloadpacket, overload._overloadname  # noqa: SLF001 - has no public name
    names = ("Tensor", "Scalar") if name == "Tensor" else (name,)
    return {str(getattr(packet, one)._schema) for one in names if one in packet.overloads()}  # noqa: SLF001 - as above


below_autograd: Callable[[], AbstractContextManager[Any]] = getattr(
    _native, "_AutoDispatchBelowAutograd", torch.no_grad
)
"""Makes a context manager to be entered once."""
