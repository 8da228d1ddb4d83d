"""Memory-bound calls of the micro-benchmark: element-wise, rows, normalisation, pooling, tables, optimisers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch._ops import OpOverload

from stoker.profiling.benchmark_calls import Arguments, Call, OperandPool, aten, limited, multiple, spread

_ATEN = torch.ops.aten
_BF16 = torch.bfloat16
_CAST = aten("_to_copy")
_ELEMENTWISE: tuple[tuple[OpOverload, int, tuple[object, ...]], ...] = (
    (_ATEN.add.Tensor, 2, ()),
    (_ATEN.mul.Tensor, 2, ()),
    (_ATEN.relu.default, 1, ()),
    (_ATEN.threshold_backward.default, 2, (0.0,)),
    (_ATEN.gelu.default, 1, ()),
    (_ATEN.gelu_backward.default, 2, ()),
    (_ATEN.silu.default, 1, ()),
    (_ATEN.silu_backward.default, 2, ()),
    (_ATEN.sigmoid.default, 1, ()),
    (_ATEN.tanh.default, 1, ()),
    (_ATEN.exp.default, 1, ()),
    (_ATEN.hardtanh.default, 1, (0.0, 6.0)),
    (_ATEN.hardtanh_backward.default, 2, (0.0, 6.0)),
    (_ATEN.clone.default, 1, ()),
)
_IN_PLACE: tuple[tuple[OpOverload, int, tuple[object, ...]], ...] = (
    (_ATEN.add_.Tensor, 2, ()),
    (_ATEN.relu_.default, 1, ()),
    (_ATEN.copy_.default, 2, ()),
    (_ATEN.zero_.default, 1, ()),
)
_WRITING = frozenset(row[0] for row in _IN_PLACE)
_BY_TANH: dict[str, object] = {"approximate": "tanh"}


def elementwise_calls(sizes: Sequence[int]) -> list[Call]:
    """Common element-wise functions at several sizes [elements]; some in bf16 too, and the casts."""
    calls = [_of_elements(*row, size) for size in sizes for row in (*_ELEMENTWISE, *_IN_PLACE)]
    for size in sizes:
        for dtype in (torch.float32, _BF16):
            calls += [_of_elements(*row, size, dtype, _BY_TANH) for row in _ELEMENTWISE if "gelu" in row[0].name()]
    calls += [_of_elements(*row, size, _BF16) for size in sizes[1:] for row in (*_ELEMENTWISE[:7:2], *_IN_PLACE[:1])]
    for size in sizes[1:]:
        calls.append(_simple(_CAST, (size,), dtype=_BF16))
        calls.append(Call(_CAST, functools.partial(_widened, size=size)))
        calls.append(Call(_ATEN.add.Tensor, functools.partial(_mixed, size=size)))
    return calls


def row_calls(most: int, num: int) -> list[Call]:
    """Layer norm, softmax and sums over rows and columns, of `num` shapes of at most `most` elements."""
    calls = []
    for sizes in spread(num, (64, 16384), (16, 4096)):
        rows, columns = limited(sizes, most)
        calls += [*_layer_norm(rows, columns), *_softmax(rows, columns)]
        for dims in ([0], [1]):
            calls.append(_simple(_ATEN.sum.dim_IntList, (rows, columns), dims))
        calls.append(_simple(_ATEN.sum.dim_IntList, (rows, columns), [0], dtype=_BF16))
    return calls


def image_calls(most: int, num: int, *, channels_last: bool) -> list[Call]:
    """Batch and group norm, and poolings, of `num` shapes of at most `most` elements."""
    calls = []
    for sizes in spread(num, (4, 128), (16, 256), (6, 48)):
        channels, size = multiple(sizes[1], 16), sizes[2]
        shape = (limited((sizes[0], channels * size**2), most)[0], channels, size, size)
        calls += _batch_norm(shape, channels_last=channels_last)
        calls += _pooling(shape, channels_last=channels_last)
        if not channels_last:
            calls += _group_norm(shape)
    if channels_last:
        shape = (32, 64, 16, 16)
        calls += _batch_norm(shape, channels_last=True, dtype=_BF16) + _pooling(shape, channels_last=True, dtype=_BF16)
    return calls


def table_calls(most: int, num: int) -> list[Call]:
    """Embeddings and their gradients, and losses over classes, of `num` shapes of at most `most` elements."""
    calls = []
    for sizes in spread(num, (256, 8192), (32, 768), (200, 20000)):
        tokens, width = limited(sizes[:2], most)
        rows = min(sizes[2], most // width)
        calls += _embedding(tokens, width, rows)
    return calls


def fresh_calls(num_bytes: int) -> list[Call]:
    """Zeros in memory that the system has to map first: on a CPU, the cost of page faults."""
    shape = [num_bytes // 4]
    return [Call(_ATEN.zeros.default, lambda _: ((shape,), {"dtype": torch.float32}))]


def _of_elements(
    function: OpOverload,
    inputs: int,
    settings: tuple[object, ...],
    size: int,
    dtype: torch.dtype = torch.float32,
    keywords: dict[str, object] | None = None,
) -> Call:
    def arguments(pool: OperandPool) -> Arguments:
        is_written = function in _WRITING
        first = pool.scratch(size, dtype=dtype) if is_written else pool.random(size, dtype=dtype)
        others = [pool.random(size, dtype=dtype) for _ in range(inputs - 1)]
        return (first, *others, *settings), keywords or {}

    return Call(function, arguments)


def _simple(function: OpOverload, shape: tuple[int, ...], *settings: object, dtype: torch.dtype | None = None) -> Call:
    """A function of one tensor; a cast takes fp32 to `dtype`, anything else computes in it."""
    is_cast = function is _CAST
    keywords = {"dtype": dtype} if is_cast else {}
    of = torch.float32 if dtype is None or is_cast else dtype
    return Call(function, lambda pool: ((pool.random(*shape, dtype=of), *settings), keywords))


def _widened(pool: OperandPool, size: int) -> Arguments:
    return (pool.random(size, dtype=_BF16),), {"dtype": torch.float32}


def _mixed(pool: OperandPool, size: int) -> Arguments:
    """As in adding autocast's result to an fp32 tensor."""
    return (pool.random(size), pool.random(size, dtype=_BF16)), {}


def _layer_norm(rows: int, columns: int) -> list[Call]:
    def forward(pool: OperandPool) -> Arguments:
        return (pool.random(rows, columns), [columns], pool.random(columns), pool.random(columns), 1e-5), {}

    def backward(pool: OperandPool) -> Arguments:
        saved = (pool.random(rows, 1), pool.random(rows, 1), pool.random(columns), pool.random(columns))
        x, gradient = pool.random(rows, columns), pool.random(rows, columns)
        return (gradient, x, [columns], *saved, [True, True, True]), {}

    return [Call(_ATEN.native_layer_norm.default, forward), Call(_ATEN.native_layer_norm_backward.default, backward)]


def _softmax(rows: int, columns: int) -> list[Call]:
    def forward(pool: OperandPool) -> Arguments:
        return (pool.random(rows, columns), 1, False), {}

    def backward(pool: OperandPool) -> Arguments:
        return (pool.random(rows, columns), pool.random(rows, columns), 1, torch.float32), {}

    forwards = (aten("_log_softmax"), aten("_softmax"))
    backwards = (aten("_log_softmax_backward_data"), aten("_softmax_backward_data"))
    return [*(Call(function, forward) for function in forwards), *(Call(function, backward) for function in backwards)]


def _batch_norm(shape: tuple[int, ...], *, channels_last: bool, dtype: torch.dtype = torch.float32) -> list[Call]:
    channels = shape[1]

    def forward(pool: OperandPool) -> Arguments:
        x = pool.random(*shape, dtype=dtype, channels_last=channels_last)
        means = [pool.random(channels) for _ in range(4)]
        return (x, *means, True, 0.1, 1e-5), {}

    def backward(pool: OperandPool) -> Arguments:
        x, gradient = (pool.random(*shape, dtype=dtype, channels_last=channels_last) for _ in range(2))
        means = [pool.random(channels) for _ in range(5)]
        return (gradient, x, *means, True, 1e-5, [True, True, True]), {}

    return [Call(_ATEN.native_batch_norm.default, forward), Call(_ATEN.native_batch_norm_backward.default, backward)]


def _group_norm(shape: tuple[int, ...]) -> list[Call]:
    images, channels, height, width = shape
    sizes = (images, channels, height * width, 8)

    def forward(pool: OperandPool) -> Arguments:
        return (pool.random(*shape), pool.random(channels), pool.random(channels), *sizes, 1e-5), {}

    def backward(pool: OperandPool) -> Arguments:
        means = (pool.random(images, 8), pool.random(images, 8), pool.random(channels))
        return (pool.random(*shape), pool.random(*shape), *means, *sizes, [True, True, True]), {}

    return [Call(_ATEN.native_group_norm.default, forward), Call(_ATEN.native_group_norm_backward.default, backward)]


def _pooling(shape: tuple[int, ...], *, channels_last: bool, dtype: torch.dtype = torch.float32) -> list[Call]:
    settings = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    pooled_shape = (*shape[:2], shape[2] // 2, shape[3] // 2)

    def maximum(pool: OperandPool) -> Arguments:
        return (pool.random(*shape, dtype=dtype, channels_last=channels_last), *settings), {}

    def its_gradient(pool: OperandPool) -> Arguments:
        (x, *_), _ = maximum(pool)
        _, indices = _ATEN.max_pool2d_with_indices.default(x, *settings)
        gradient = pool.random(*pooled_shape, dtype=dtype, channels_last=channels_last)
        return (gradient, x, *settings, indices), {}

    def mean(pool: OperandPool) -> Arguments:
        return (pool.random(*shape, dtype=dtype, channels_last=channels_last), [2, 2], [2, 2]), {}

    pooled: list[tuple[OpOverload, Callable[[OperandPool], Arguments]]] = [
        (_ATEN.max_pool2d_with_indices.default, maximum),
        (_ATEN.max_pool2d_with_indices_backward.default, its_gradient),
        (_ATEN.avg_pool2d.default, mean),
    ]
    return [Call(function, arguments) for function, arguments in pooled]


def _embedding(tokens: int, width: int, rows: int) -> list[Call]:
    def forward(pool: OperandPool) -> Arguments:
        return (pool.random(rows, width), pool.indices(tokens, below=rows)), {}

    def backward(pool: OperandPool) -> Arguments:
        return (pool.random(tokens, width), pool.indices(tokens, below=rows), rows, -1, False), {}

    return [Call(_ATEN.embedding.default, forward), Call(_ATEN.embedding_dense_backward.default, backward)]


_ADAM = {"lr": 1e-9, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
_SGD = {"weight_decay": 0.0, "momentum": 0.9, "lr": 1e-9, "dampening": 0.0, "nesterov": False, "maximize": False}
_FOREACH: tuple[tuple[OpOverload, int, tuple[object, ...]], ...] = (
    (aten("_foreach_add_", "List"), 2, ()),
    (aten("_foreach_mul_", "Scalar"), 1, (1.0,)),
    (aten("_foreach_lerp_", "Scalar"), 2, (0.1,)),
    (aten("_foreach_addcdiv_", "Scalar"), 3, ()),
    (aten("_foreach_sqrt"), 1, ()),
)


def optimizer_calls(sizes: Sequence[tuple[int, int]]) -> list[Call]:
    """For each (number of tensors, elements of each): fused AdamW and SGD, and the operations of foreach variants."""
    calls = []
    for num, numel in sizes:
        calls += [_adamw(num, numel), _sgd(num, numel)]
        calls += [_foreach(*row, num, numel) for row in _FOREACH]
    return calls


def _positive(pool: OperandPool, num: int, numel: int) -> list[torch.Tensor]:
    """Memory of their own: these are written, and roots are taken of them."""
    return [torch.ones(numel, device=pool.device) for _ in range(num)]


def _adamw(num: int, numel: int) -> Call:
    def arguments(pool: OperandPool) -> Arguments:
        tensors = [_positive(pool, num, numel) for _ in range(4)]
        steps = [torch.ones((), device=pool.device) for _ in range(num)]
        return (*tensors, [], steps), dict(_ADAM)

    return Call(aten("_fused_adamw_"), arguments)


def _sgd(num: int, numel: int) -> Call:
    def arguments(pool: OperandPool) -> Arguments:
        return tuple(_positive(pool, num, numel) for _ in range(3)), {**_SGD, "is_first_step": False}

    return Call(aten("_fused_sgd_"), arguments)


def _foreach(function: OpOverload, inputs: int, settings: tuple[object, ...], num: int, numel: int) -> Call:
    def arguments(pool: OperandPool) -> Arguments:
        return (*(_positive(pool, num, numel) for _ in range(inputs)), *settings), {}

    return Call(function, arguments)
