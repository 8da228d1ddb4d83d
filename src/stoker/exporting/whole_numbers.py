"""ONNX nodes of operators on whole numbers that PyTorch's exporter writes so that their answers differ in silence.

What: quotients with a rounding mode pass through float32 there (100000007 becomes 100000008), `fmod` through float64 in
ONNX Runtime, and a mean with a `dtype` of floats is one of whole numbers. ONNX Runtime 1.31 gives numbers from 2^31 to
2^32 the sign -1, and ends the process over the least number divided by -1, which a request could ask for. Remainders of
floats, which `ids % 7.0` are, were a difference of two large numbers.
Costs: at most ten nodes for each; up to three where the divisor is a number.
Source: PyTorch 2.13 and onnxscript 0.6.0 to 0.7.2, compared number by number with ONNX Runtime.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

_KNOWN = "onnxscript.function_libs.torch_lib.ops.core"
"""Private to onnxscript: the nodes for other types. Without it these operators are written as ever."""
_WHOLE = frozenset({"INT8", "INT16", "INT32", "INT64", "UINT8"})
_NARROW = frozenset({"INT8", "INT16", "UINT8"})
_FLOATS = frozenset({"FLOAT", "DOUBLE"})

Write = Callable[..., Any]
"""Takes an operator's arguments, and gives its ONNX nodes' result."""


def translations() -> dict[Callable[..., Any], Write]:
    """Functions that write ONNX nodes, by PyTorch's operator."""
    try:
        known = importlib.import_module(_KNOWN)
    except ImportError:
        return {}
    aten = torch.ops.aten
    table: dict[str, tuple[Write, tuple[Callable[..., Any], ...]]] = {
        "aten_div_mode": (_rounded, (aten.div.Tensor_mode, aten.div.Scalar_mode)),
        "aten_floor_divide": (_floored, (aten.floor_divide.default,)),
        "aten_fmod": (_fmod, (aten.fmod.Tensor, aten.fmod.Scalar)),
        "aten_remainder": (_remainder, (aten.remainder.Tensor,)),
        "aten_remainder_scalar": (_remainder, (aten.remainder.Scalar,)),
        "aten_remainder_scalar_tensor": (_remainder, (aten.remainder.Scalar_Tensor,)),
        "aten_sign": (_sign, (aten.sign.default,)),
        "aten_mean_dim": (_mean, (aten.mean.dim,)),
    }
    return {
        operator: write(getattr(known, name))
        for name, (write, operators) in table.items()
        if hasattr(known, name)
        for operator in operators
    }


def _rounded(usual: Write) -> Write:
    def write(self: Any, other: Any, rounding_mode: str | None = None) -> Any:
        if rounding_mode is None or _kind(self, other) not in _WHOLE:
            return usual(self, other, rounding_mode=rounding_mode)
        return _divided(self, other, rounding_mode)

    return write


def _floored(usual: Write) -> Write:
    return lambda self, other: _divided(self, other, "floor") if _kind(self, other) in _WHOLE else usual(self, other)


def _fmod(usual: Write) -> Write:
    return lambda self, other: _divided(self, other, "fmod") if _kind(self, other) in _WHOLE else usual(self, other)


def _remainder(usual: Write) -> Write:
    def write(self: Any, other: Any) -> Any:
        kind = _kind(self, other)
        if kind in _WHOLE:
            return _divided(self, other, "remainder")
        if kind not in _FLOATS:
            return usual(self, other)
        op, dividend, divisor, zero = _operands(self, other)
        remainder = op.Mod(dividend, divisor, fmod=1)  # exact, with the dividend's sign
        is_other_side = op.Xor(op.Less(remainder, zero), op.Less(divisor, zero))
        corrected = op.And(is_other_side, op.Not(op.Equal(remainder, zero)))
        return op.Where(corrected, op.Add(remainder, divisor), remainder)

    return write


def _sign(usual: Write) -> Write:
    def write(self: Any) -> Any:
        if self.dtype.name not in _WHOLE:
            return usual(self)
        op = _opset()
        zero = op.CastLike(op.Constant(value_int=0), self)
        return op.Sub(op.CastLike(op.Greater(self, zero), self), op.CastLike(op.Less(self, zero), self))

    return write


def _mean(usual: Write) -> Write:
    def write(self: Any, *dims: Any, dtype: int = -1, **settings: Any) -> Any:
        numbers = self if dtype == -1 else _opset().Cast(self, to=dtype)
        return usual(numbers, *dims, **settings)

    return write


def _divided(self: Any, other: Any, result: str) -> Any:
    """The quotient (`trunc`, `floor`), or its remainder with the dividend's sign (`fmod`) or the divisor's."""
    op, dividend, divisor, zero = _operands(self, other)
    is_least, divided_by = None, divisor
    if not isinstance(other, int) or other == -1:  # the least number divided by -1 ends ONNX Runtime's process
        one = op.CastLike(op.Constant(value_int=1), dividend)
        is_least = op.Equal(divisor, op.Neg(one))
        divided_by = op.Where(is_least, one, divisor)
    if result != "trunc":
        remainder = op.Mod(dividend, divided_by)
        is_other_side = op.Equal(op.Less(dividend, zero), op.Greater(divisor, zero))
        is_corrected = op.And(is_other_side, op.Not(op.Equal(remainder, zero)))
    if result in ("trunc", "floor"):
        answer = op.Div(dividend, divided_by)
        if is_least is not None:
            answer = op.Where(is_least, op.Neg(dividend), answer)
        if result == "floor":
            answer = op.Sub(answer, op.CastLike(is_corrected, answer))
    else:
        answer = op.Where(is_corrected, op.Sub(remainder, divisor), remainder) if result == "fmod" else remainder
    return op.CastLike(answer, self if _is_tensor(self) else other)


def _operands(self: Any, other: Any) -> tuple[Any, Any, Any, Any]:
    """ONNX's operators, both operands as tensors of one type, and its zero; narrow whole numbers have 64 bits."""
    op, like = _opset(), self if _is_tensor(self) else other
    tensors = [value if value is like else op.CastLike(_number(value), like) for value in (self, other)]
    if like.dtype.name in _NARROW:
        tensors = [op.CastLike(tensor, op.Constant(value_int=0)) for tensor in tensors]
    return op, *tensors, op.CastLike(op.Constant(value_int=0), tensors[0])


def _number(value: Any) -> Any:
    """A tensor as it is, and a number as one of 64 bits."""
    if _is_tensor(value):
        return value
    ir = importlib.import_module("onnx_ir")
    kind = ir.DataType.INT64 if isinstance(value, int) else ir.DataType.DOUBLE
    return _opset().Constant(value=ir.tensor(value, dtype=kind))


def _kind(self: Any, other: Any) -> str:
    """The type of numbers, by ONNX's name."""
    return str((self if _is_tensor(self) else other).dtype.name)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "dtype")


def _opset() -> Any:
    return importlib.import_module("onnxscript").opset20
