"""The record of an ATen call (shapes, FLOPs, bytes, attributes that affect its time), and its line of source."""

from __future__ import annotations

import functools
import math
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

import torch
from torch.utils.flop_counter import flop_registry

from stoker.profiling.tracing.target_kernels import recurrent_flops
from stoker.records import Operation, TensorShape

aten = torch.ops.aten

_DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}
_ATTRIBUTES = (
    "approximate",
    "dilation",
    "dim",
    "dropout_p",
    "groups",
    "is_causal",
    "output_mask",
    "padding",
    "stride",
    "transposed",
)
"""Parameters kept as attributes, by their names in ATen's schemas."""
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "_scaled_mm": (0, 1)}
"""Matrix products, and the argument indices of their two factors."""
_LAID_OUT = ("convolution", "batch_norm", "group_norm", "pool")
"""Operations whose speed depends on the memory format of images."""
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Channels-last by the number of dimensions."""
_LOOKUPS = ("embedding", "gather", "index", "index_select", "take")
"""Operations that read as much of their first input as they write."""
_UNTAGGED = ("_to_copy", "clone", "copy_", "masked_fill_", "rsub", "where")
"""Elementwise operations of several tensors, not all forms of which PyTorch tags as such."""
_OVERWRITING = ("bernoulli_", "copy_", "exponential_", "fill_", "normal_", "random_", "uniform_", "zero_")
"""Operations that do not read the tensor they overwrite."""
_NEVER_FILLED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_READ_ONLY = {"_fused_adam_": "grads", "_fused_adamw_": "grads", "_fused_sgd_": "grads", "_fused_adagrad_": "grads"}
"""Arguments marked as written in the schema, but written only with a gradient scaler."""


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among arguments or results, lists of them flattened."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_in(value)
    return tensors


def signature_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """A key of everything an operation's record depends on; None where an argument cannot be hashed."""
    key = (func, *map(_frozen, args), *((name, _frozen(value)) for name, value in kwargs.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def operation_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, num_outside: int = 0, is_again: bool = False
) -> Operation:
    """The record of one call, whose results were `out`.

    `num_outside` of the inputs that have one shape are not what operations since the last product read or made.
    `is_again`: it copies what the pass has copied into the same dtype before.
    """
    name = func.overloadpacket.__name__
    given = _named_arguments(func, args, kwargs)
    inputs = tensors_in((args, kwargs.values()))
    written = written_arguments(func, args, kwargs)
    outputs = tensors_in([out]) or written
    ignored = {id(tensor) for tensor in written} if name in _OVERWRITING else set()
    read = {id(tensor): _num_bytes(tensor) for tensor in inputs if id(tensor) not in ignored}
    bytes_written = 0 if name in _NEVER_FILLED else sum(map(_num_bytes, outputs))
    if name in _LOOKUPS and inputs:
        read[id(inputs[0])] = min(read[id(inputs[0])], bytes_written)
    if name.startswith("nll_loss"):  # forward one element for each target, backward none
        is_backward = name.endswith("_backward")
        read[id(given["self"])] = 0 if is_backward else given["target"].numel() * given["self"].element_size()
    outside = ({"num_outside": num_outside} if num_outside else {}) | ({"is_again": True} if is_again else {})
    return Operation(
        name=name,
        inputs=tuple(map(_shape, inputs)),
        outputs=tuple(map(_shape, outputs)),
        flops=_flops(func, args, kwargs, out),
        bytes_read=0 if name.startswith(_NEVER_FILLED) or name.startswith(_FILLED) else sum(read.values()),
        bytes_written=bytes_written,
        attributes=tuple(sorted((_attributes(func, given, inputs, outputs, args) | outside).items())),
    )


_FILLED = ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "rand", "randn")
"""Operations that read no tensor, although `…_like` takes one."""


@functools.cache
def is_mutation(func: Any) -> bool:
    """Whether an operation changes the contents of an argument; changes of metadata do not count."""
    return func._schema.is_mutable and func.overloadpacket.__name__ not in _METADATA_ONLY  # noqa: SLF001


_METADATA_ONLY = (
    "as_strided_",
    "detach_",
    "resize_",
    "set_",
    "squeeze_",
    "swapaxes_",
    "t_",
    "transpose_",
    "unsqueeze_",
    "_resize_output_",
)


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that the operation writes to."""
    given = _named_arguments(func, args, kwargs)
    read_only = _READ_ONLY.get(func.overloadpacket.__name__)
    written = [name for name, is_written in _parameters(func) if is_written and name in given and name != read_only]
    return tensors_in(given[name] for name in written)


@functools.cache
def _parameters(func: Any) -> tuple[tuple[str, bool], ...]:
    """Name of each parameter, and whether it is written to."""
    parameters = func._schema.arguments  # noqa: SLF001 - there is no public access
    return tuple((each.name, each.alias_info is not None and each.alias_info.is_write) for each in parameters)


def _named_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: arg for (name, _), arg in zip(_parameters(func), args, strict=False)} | kwargs


def _attributes(
    func: Any, given: dict[str, Any], inputs: list[torch.Tensor], outputs: list[torch.Tensor], args: tuple[Any, ...]
) -> dict[str, Any]:
    name = func.overloadpacket.__name__
    attributes = {key: given[key] for key in _ATTRIBUTES if key in given}
    attributes = {key: list(value) if isinstance(value, list | tuple) else value for key, value in attributes.items()}
    if name in _PRODUCTS:
        a, b = (args[place] for place in _PRODUCTS[name])
        attributes |= {"transpose_a": _is_transposed(a), "transpose_b": _is_transposed(b)}
    if any(part in name for part in _LAID_OUT):
        attributes["channels_last"] = any(_is_channels_last(tensor) for tensor in inputs[:2])
    if "convolution" in name and (reordered := _reordered_bytes(*inputs[: 3 if "backward" in name else 2])):
        attributes["reordered_bytes"] = reordered
    if len(outputs) == 1 and _is_elementwise(func) and _is_indexed(outputs[0], inputs):
        attributes["is_indexed"] = True
    return attributes


@functools.cache
def _is_elementwise(func: Any) -> bool:
    """Whether an operation is one, by its own name and not by shapes, which may be as those of one by chance."""
    return torch.Tag.pointwise in func.tags or func.overloadpacket.__name__ in _UNTAGGED


def _is_indexed(result: torch.Tensor, operands: list[torch.Tensor]) -> bool:
    """Whether a GPU's elementwise kernel computes addresses from indices, for each element and operand.

    It need not where all tensors are dense and in one order, or single numbers. The answer is the same for each number
    of samples, so that traces of several numbers agree.
    """
    if result.device.type != "cuda":
        return False
    order = _order(result)
    is_dense = math.prod(size for size, _ in order) == 1 + sum((size - 1) * stride for size, stride in order)
    return not is_dense or any(_order(operand) != order for operand in operands if operand.numel() > 1)


def _order(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Sizes and strides of the dimensions that have more than one element."""
    return [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _reordered_bytes(*tensors: torch.Tensor) -> int:
    """Bytes of images that PyTorch copies before a convolution on a GPU; the last of `tensors` is its weight.

    One of them in channels-last is enough for all to be brought there: what a group norm returns is contiguous,
    whatever it was given.
    """
    memory_format = _FORMATS.get(tensors[0].dim())
    if tensors[0].device.type != "cuda" or memory_format is None or not any(map(_is_channels_last, tensors)):
        return 0
    return sum(_num_bytes(image) for image in tensors[:-1] if not image.is_contiguous(memory_format=memory_format))


def _is_transposed(matrix: torch.Tensor) -> bool:
    """Whether the last dimension but one is contiguous."""
    return matrix.stride(-2) == 1 and matrix.stride(-1) != 1


def _is_channels_last(tensor: torch.Tensor) -> bool:
    if tensor.dim() not in _FORMATS or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=_FORMATS[tensor.dim()])


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    own = _FLOPS.get(func.overloadpacket)
    if own is not None:
        return int(own(*args))
    formula = flop_registry.get(func.overloadpacket)
    return recurrent_flops(func, args, out) if formula is None else int(formula(*args, **kwargs, out_val=out))


def _convolution_backward_flops(*args: Any) -> int:
    """FLOPs of the requested gradients: each has the multiply-adds of the forward pass, positions times weights.

    Positions of the output count, or of the input of a transposed convolution. PyTorch's formula ignores groups in the
    weight's gradient: for a depthwise convolution of 384 channels it is 384 times too high.
    """
    output, image, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    positions = int(math.prod((image if transposed else output).shape[2:]))
    num_gradients = bool(mask[0]) + bool(mask[1])
    return 2 * int(image.shape[0]) * positions * int(weight.numel()) * num_gradients


def _grouped_product_flops(a: torch.Tensor, b: torch.Tensor, *_: Any) -> int:
    """FLOPs of matrices [.., M, K] by [.., K, N]; groups divide the rows, columns or depth of an ungrouped operand."""
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> int:
    """FLOPs of two products of all pairs; the ones that a causal mask hides count too, as PyTorch counts them.

    PyTorch's CPU kernel really computes them. PyTorch 2.11's own formula refuses fewer heads of keys than of queries.
    """
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward_flops(
    _gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> int:
    """FLOPs of five products: the scores again, and the gradients of scores, values, queries and keys."""
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


_FLOPS: dict[Any, Callable[..., int]] = {
    aten.convolution_backward: _convolution_backward_flops,
    aten._grouped_mm: _grouped_product_flops,  # noqa: SLF001 - ATen's own names, as in the next ones
    **dict.fromkeys(
        (
            aten._scaled_dot_product_flash_attention_for_cpu,  # noqa: SLF001
            aten._scaled_dot_product_flash_attention,  # noqa: SLF001
            aten._scaled_dot_product_efficient_attention,  # noqa: SLF001
        ),
        _attention_flops,
    ),
    **dict.fromkeys(
        (
            aten._scaled_dot_product_flash_attention_for_cpu_backward,  # noqa: SLF001
            aten._scaled_dot_product_flash_attention_backward,  # noqa: SLF001
            aten._scaled_dot_product_efficient_attention_backward,  # noqa: SLF001
        ),
        _attention_backward_flops,
    ),
    aten.addbmm: lambda _sum, a, b, *_: 2 * a.numel() * b.shape[-1],
    aten.mv: lambda matrix, _vector: 2 * matrix.numel(),
    aten.addmv: lambda _sum, matrix, *_: 2 * matrix.numel(),
    aten.dot: lambda a, _b: 2 * a.numel(),
    aten.vdot: lambda a, _b: 2 * a.numel(),
}
"""FLOPs of operations for which PyTorch has no formula or a wrong one; a multiply-add counts as two."""


def _num_bytes(tensor: torch.Tensor) -> int:
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count


def _shape(tensor: torch.Tensor) -> TensorShape:
    dtype = _DTYPES.get(tensor.dtype)
    return TensorShape(shape=tuple(tensor.shape), dtype=dtype or str(tensor.dtype).removeprefix("torch."))


_TORCH = f"{Path(torch.__file__).parent}/"
_STOKER = f"{Path(__file__).parents[2]}/"
_TRACING = f"{Path(__file__).parent}/"

_Owner = Literal["user", "library", "machinery", "hidden"]
"""Whose code is: the job's, a library's or one of Stoker's models', Stoker's other code, PyTorch's."""


class SourceLines:
    """Numbers the source lines of operations; `names` are written as `train_me.py:42`.

    The line is in the nearest frame of the user's own code inside the traced step, else in that of a library or of
    Stoker's models, else in the nearest frame outside PyTorch, as Stoker's optimisers.
    """

    def __init__(self) -> None:
        self.names: list[str] = [""]
        self._places: dict[tuple[str, int], int] = {}

    def here(self) -> int:
        """Index of the running line [index into `names`]."""
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the stack as it is, without making a copy
        nearest: dict[_Owner, FrameType] = {}
        while frame is not None:
            owner = _owner(frame.f_code.co_filename)
            if owner == "user":
                return self._place(frame)
            if owner != "hidden":
                nearest.setdefault(owner, frame)
            elif frame.f_code.co_name == TRACED_ENTRY and frame.f_code.co_filename.startswith(_TRACING):
                break
            frame = frame.f_back
        found = nearest.get("library") or nearest.get("machinery")
        return 0 if found is None else self._place(found)

    def name_here(self) -> str:
        """As `here`, the name itself."""
        return self.names[self.here()]

    def of_error(self, error: BaseException) -> str:
        """The innermost line of the user's code that `error` came through; empty if none."""
        lines = [
            f"{_file_name(frame.f_code.co_filename)}:{number}"
            for frame, number in traceback.walk_tb(error.__traceback__)
            if is_users_code(frame.f_code)
        ]
        return lines[-1] if lines else ""

    def _place(self, frame: FrameType) -> int:
        key = frame.f_code.co_filename, frame.f_lineno
        place = self._places.get(key)
        if place is None:
            name = f"{_file_name(frame.f_code.co_filename)}:{frame.f_lineno}"
            if name not in self.names:
                self.names.append(name)
            place = self._places[key] = self.names.index(name)
        return place


TRACED_ENTRY = "run_traced"
"""Name of the tracer's function that calls the step: frames beyond it are not part of the traced step."""


@functools.lru_cache(maxsize=4096)
def _owner(name: str) -> _Owner:
    """Whose the file of this name is. Not by code objects: their hash takes longer than the rest."""
    if name.startswith((_TORCH, _TRACING, "<")):
        return "hidden"
    if name.startswith(_STOKER):
        return "library" if name.startswith(f"{_STOKER}zoo/") else "machinery"
    is_installed = "/site-packages/" in name or "/dist-packages/" in name
    return "library" if is_installed or name.startswith(_STANDARD_LIBRARY) else "user"


def is_users_file(path: str) -> bool:
    """Whether a file is neither PyTorch's, nor of an installed library, nor of Stoker."""
    return _owner(path) == "user"


def is_users_code(code: CodeType) -> bool:
    """Whether a function is neither PyTorch's, nor of an installed library, nor of Stoker."""
    return _owner(code.co_filename) == "user"


_STANDARD_LIBRARY = f"{Path(functools.__file__).parent}/"


def _file_name(path: str) -> str:
    """Path within Stoker or the library, or the name of a user's file."""
    if path.startswith(_STOKER):
        return f"stoker/{path.removeprefix(_STOKER)}"
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in path:
            return path.rpartition(folder)[2]
    return Path(path).name
