"""ONNX nodes of operators on whole numbers whose answers would differ in silence from PyTorch's.

What: quotients with a rounding mode pass through float32 in PyTorch's exporter (100,000,001 floor-divided by -7 is one
too much), `fmod` through float64 in ONNX Runtime, a mean with a `dtype` of floats is one of whole numbers, and the
remainder of floats, as in `ids % 7.0`, a difference of two large numbers. Of two int64 that are equal above bit 31 and
differ in it, ONNX Runtime 1.31 takes the wrong one for the larger: 2^31 has the sign -1, and max(1, 2^31) is 1. It ends
the process over the least number divided by -1, which a request could ask for.
Costs: nine nodes for a floored quotient by a number, fourteen by a tensor; one to seven for the others.
Source: PyTorch 2.13, onnxscript 0.7.2 and ONNX Runtime 1.31 on a CPU with AVX2, compared number by number.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

_KNOWN = "onnxscript.function_libs.torch_lib.ops.core"
"""Private to onnxscript: the nodes for other types. Without it these operators are written as ever."""
_NARROW = frozenset({"INT8", "INT16", "UINT8"})
_WHOLE = _NARROW | {"INT32", "INT64"}
_FLOATS = frozenset({"FLOAT", "DOUBLE"})
_LONG = frozenset({"INT64"})

Write = Callable[..., Any]
"""Takes an operator's arguments, and gives its ONNX nodes' results."""


def translations() -> dict[Callable[..., Any], Write]:
    """Functions that write ONNX nodes, by PyTorch's operator."""
    try:
        known = importlib.import_module(_KNOWN)
    except ImportError:
        return {}
    aten = torch.ops.aten
    floor, fmod = partial(_divided, result="floor"), partial(_divided, result="fmod")
    table: tuple[tuple[Callable[..., Any], str, Write, frozenset[str]], ...] = (
        (aten.div.Tensor_mode, "aten_div_mode", _rounded, _WHOLE),
        (aten.div.Scalar_mode, "aten_div_mode", _rounded, _WHOLE),
        (aten.floor_divide.default, "aten_floor_divide", floor, _WHOLE),
        (aten.floor_divide.Scalar, "aten_floor_divide", floor, _WHOLE),
        (aten.fmod.Tensor, "aten_fmod", fmod, _WHOLE),
        (aten.fmod.Scalar, "aten_fmod", fmod, _WHOLE),
        (aten.remainder.Tensor, "aten_remainder", _remainder, _WHOLE | _FLOATS),
        (aten.remainder.Scalar, "aten_remainder_scalar", _remainder, _WHOLE | _FLOATS),
        (aten.remainder.Scalar_Tensor, "aten_remainder_scalar_tensor", _remainder, _WHOLE | _FLOATS),
        (aten.mean.dim, "aten_mean_dim", _mean, _WHOLE | {"BOOL"}),
        (aten.sign.default, "aten_sign", _sign, _LONG),
        (aten.maximum.default, "aten_maximum", _larger, _LONG),
        (aten.minimum.default, "aten_minimum", _smaller, _LONG),
        (aten.clamp.default, "aten_clamp", _clamped, _LONG),
        (aten.clamp.Tensor, "aten_clamp_tensor", _clamped, _LONG),
        (aten.clamp_min.default, "aten_clamp_min", _larger, _LONG),
        (aten.clamp_min.Tensor, "aten_clamp_min_tensor", _larger, _LONG),
        (aten.clamp_max.default, "aten_clamp_max", _smaller, _LONG),
        (aten.clamp_max.Tensor, "aten_clamp_max_tensor", _smaller, _LONG),
        (aten.amax.default, "aten_amax", partial(_extreme, largest=1), _LONG),
        (aten.amin.default, "aten_amin", partial(_extreme, largest=0), _LONG),
        (aten.max.dim, "aten_max_dim", _max, _LONG),
        (aten.min.dim, "aten_min_dim", _min, _LONG),
    )
    return {
        operator: _by_type(exact, getattr(known, name), types)
        for operator, name, exact, types in table
        if hasattr(known, name)
    }


def _by_type(exact: Write, usual: Write, types: frozenset[str]) -> Write:
    def write(*arguments: Any, **settings: Any) -> Any:
        return (exact if _kind(*arguments) in types else usual)(*arguments, **settings)

    return write


def _rounded(self: Any, other: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is not None:
        return _divided(self, other, rounding_mode)
    op, dividend, divisor, _ = _operands(self, other)
    single = op.Constant(value_float=1.0)
    return op.Div(op.CastLike(dividend, single), op.CastLike(divisor, single))


def _remainder(self: Any, other: Any) -> Any:
    if _kind(self, other) in _WHOLE:
        return _divided(self, other, "remainder")
    op, dividend, divisor, zero = _operands(self, other)
    remainder = op.Mod(dividend, divisor, fmod=1)  # exact, with the dividend's sign
    is_other_side = op.Xor(op.Less(remainder, zero), op.Less(divisor, zero))
    is_corrected = op.And(is_other_side, op.Not(op.Equal(remainder, zero)))
    return op.Where(is_corrected, op.Add(remainder, divisor), remainder)


def _divided(self: Any, other: Any, result: str) -> Any:
    """The quotient (`trunc`, `floor`), or its remainder with the dividend's sign (`fmod`) or the divisor's."""
    op, dividend, divisor, zero = _operands(self, other)
    is_minus_one, divided_by = None, divisor
    if _kind(self, other) not in _NARROW and (_is_tensor(other) or other == -1):
        one = op.CastLike(op.Constant(value_int=1), dividend)
        is_minus_one = op.Equal(divisor, op.Neg(one))
        divided_by = op.Where(is_minus_one, one, divisor)
    remainder = op.Mod(dividend, divided_by)
    is_other_side = op.Equal(op.Less(dividend, zero), op.Greater(divisor, zero))
    is_corrected = op.And(is_other_side, op.Not(op.Equal(remainder, zero)))
    quotient = op.Div(dividend, divided_by)
    if is_minus_one is not None:
        quotient = op.Where(is_minus_one, op.Neg(dividend), quotient)
    if result == "floor":
        quotient = op.Sub(quotient, op.CastLike(is_corrected, quotient))
    elif result == "fmod":
        remainder = op.Where(is_corrected, op.Sub(remainder, divisor), remainder)
    return op.CastLike(quotient if result in ("trunc", "floor") else remainder, self if _is_tensor(self) else other)


def _mean(self: Any, dim: Sequence[int] | None, *keepdim: bool, dtype: int) -> Any:
    op = _opset()
    axes = [op.Constant(value_ints=list(dim))] if dim else []
    return op.ReduceMean(op.Cast(self, to=dtype), *axes, keepdims=any(keepdim))


def _sign(self: Any) -> Any:
    op = _opset()
    zero = op.Constant(value_int=0)
    return op.Sub(op.CastLike(op.Greater(self, zero), self), op.CastLike(op.Less(self, zero), self))


def _larger(self: Any, other: Any) -> Any:
    op, first, second, _ = _operands(self, other)
    return op.Where(op.Less(first, second), second, first)


def _smaller(self: Any, other: Any) -> Any:
    op, first, second, _ = _operands(self, other)
    return op.Where(op.Greater(first, second), second, first)


def _clamped(self: Any, min: Any = None, max: Any = None) -> Any:  # noqa: A002 - PyTorch's names
    bounded = self if min is None else _larger(self, min)
    return bounded if max is None else _smaller(bounded, max)


def _extreme(self: Any, dim: Sequence[int] = (), keepdim: int = 0, *, largest: int) -> Any:
    op, values = _opset(), self
    axes = list(dim) or list(range(len(self.shape)))
    for axis in axes if len(self.shape) else ():
        values, _ = op.TopK(values, op.Constant(value_ints=[1]), axis=axis, largest=largest)
    return values if keepdim or not len(self.shape) else op.Squeeze(values, op.Constant(value_ints=axes))


def _max(self: Any, dim: int, keepdim: int = 0) -> Any:
    return _extreme(self, [dim], keepdim, largest=1), _opset().ArgMax(self, axis=dim, keepdims=int(keepdim))


def _min(self: Any, dim: int, keepdim: int = 0) -> Any:
    return _extreme(self, [dim], keepdim, largest=0), _opset().ArgMin(self, axis=dim, keepdims=int(keepdim))


def _operands(self: Any, other: Any) -> tuple[Any, Any, Any, Any]:
    """ONNX's operators, both operands as tensors of one type, and its zero; narrow whole numbers have 64 bits."""
    op, like = _opset(), self if _is_tensor(self) else other
    tensors = [value if value is like else op.CastLike(_number(value), like) for value in (self, other)]
    if _kind(like) in _NARROW:
        tensors = [op.CastLike(tensor, op.Constant(value_int=0)) for tensor in tensors]
    return op, *tensors, op.CastLike(op.Constant(value_int=0), tensors[0])


def _number(value: Any) -> Any:
    """A tensor as it is, and a number as one of 64 bits."""
    if _is_tensor(value):
        return value
    ir = importlib.import_module("onnx_ir")
    kind = ir.DataType.INT64 if isinstance(value, int) else ir.DataType.DOUBLE
    return _opset().Constant(value=ir.tensor(value, dtype=kind))


def _kind(*values: Any) -> str:
    """The type of the first tensor, by ONNX's name."""
    tensor = next(value for value in values if _is_tensor(value))
    return "" if tensor.dtype is None else str(tensor.dtype.name)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "dtype")


def _opset() -> Any:
    return importlib.import_module("onnxscript").opset20
