"""Attention and recurrent layers, forward and backward."""

from __future__ import annotations

import torch

from stoker.profiling.operations.call import Arguments, Call, Pool, aten
from stoker.profiling.operations.shapes import Limits, limited, multiple, spread

_ATEN = torch.ops.aten
_SLOWER = 4
"""How many times as long as a matrix product of as many FLOPs attention takes, about."""


def attention_calls(dtype: torch.dtype, limits: Limits, num: int, device_kind: str) -> list[Call]:
    """`num` shapes with and without a causal mask, by the kernel that PyTorch takes on this kind of device."""
    calls = []
    for index, (images, heads, tokens, width) in enumerate(spread(num, (1, 64), (2, 12), (32, 512), (24, 112))):
        head_dim, is_causal = multiple(width, 32 if index % 3 else 16), index % 2 == 0
        # Windows of text are powers of two or nearly; patches of an image and a class token are not.
        length = tokens if index % 3 == 1 else multiple(tokens, 32)
        smallest = limited((images, 4 * heads * length**2 * head_dim), limits.flops / _SLOWER)[0]
        shape = (smallest, heads, length, head_dim)
        if device_kind == "cpu":
            calls += _on_cpu(shape, dtype, is_causal=is_causal)
        elif dtype is not torch.float32:
            calls += _flash(shape, dtype, is_causal=is_causal)
    return calls


def recurrent_calls(limits: Limits, num: int) -> list[Call]:
    """`num` LSTM layers over whole sequences, by oneDNN, as PyTorch runs them on a CPU."""
    calls = []
    for length, batch, size, hidden in spread(num, (12, 128), (4, 64), (24, 384), (32, 384)):
        batch_size = limited((batch, 8 * length * hidden * (size + hidden)), limits.flops)[0]
        calls += _lstm(length, batch_size, size, hidden)
    return calls


def _heads(shape: tuple[int, int, int, int], pool: Pool, dtype: torch.dtype) -> torch.Tensor:
    """[B, H, T, E] as a linear layer leaves it: tokens before heads in memory."""
    images, heads, length, width = shape
    return pool.random(images, length, heads, width, dtype=dtype).transpose(1, 2)


def _on_cpu(shape: tuple[int, int, int, int], dtype: torch.dtype, *, is_causal: bool) -> list[Call]:
    forward = aten("_scaled_dot_product_flash_attention_for_cpu")

    def inputs(pool: Pool) -> Arguments:
        return (*(_heads(shape, pool, dtype) for _ in range(3)), 0.0, is_causal), {}

    def gradients(pool: Pool) -> Arguments:
        (q, k, v, *_), _ = inputs(pool)
        out, logsumexp = forward(q, k, v, 0.0, is_causal)
        return (torch.randn_like(out), q, k, v, out, logsumexp, 0.0, is_causal), {}

    backward = aten("_scaled_dot_product_flash_attention_for_cpu_backward")
    return [Call(forward, inputs), Call(backward, gradients)]


def _flash(shape: tuple[int, int, int, int], dtype: torch.dtype, *, is_causal: bool) -> list[Call]:
    forward = aten("_scaled_dot_product_flash_attention")

    def inputs(pool: Pool) -> Arguments:
        return (*(_heads(shape, pool, dtype) for _ in range(3)), 0.0, is_causal), {}

    def gradients(pool: Pool) -> Arguments:
        (q, k, v, *_), _ = inputs(pool)
        out, logsumexp, cum_q, cum_k, most_q, most_k, seed, offset, _ = forward(q, k, v, 0.0, is_causal)
        saved = (out, logsumexp, cum_q, cum_k, most_q, most_k, 0.0, is_causal, seed, offset)
        return (torch.randn_like(out), q, k, v, *saved), {}

    return [Call(forward, inputs), Call(aten("_scaled_dot_product_flash_attention_backward"), gradients)]


def _lstm(length: int, batch: int, size: int, hidden: int) -> list[Call]:
    forward = _ATEN.mkldnn_rnn_layer.default
    lstm = 2  # the mode

    def inputs(pool: Pool) -> Arguments:
        shapes = ((4 * hidden, size), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,))
        weights = [pool.random(*shape) for shape in shapes]
        states = (pool.random(batch, hidden), pool.random(batch, hidden))
        x = pool.random(length, batch, size)
        return (x, *(w * 0.05 for w in weights), *states, False, [], lstm, hidden, 1, True, False, False, True), {}

    def gradients(pool: Pool) -> Arguments:
        args, _ = inputs(pool)
        output, hy, cy, workspace = forward(*args)
        grads = (torch.randn_like(output), torch.randn_like(hy), torch.randn_like(cy))
        settings: tuple[object, ...] = (False, lstm, hidden, 1, True, True, False, [], False, workspace)
        return (*args[:7], output, hy, cy, *grads, *settings), {}

    return [Call(forward, inputs), Call(_ATEN.mkldnn_rnn_layer_backward.default, gradients)]
