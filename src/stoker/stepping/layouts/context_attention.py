"""Attention of tokens that several processes hold parts of: keys and values are gathered, queries divided evenly.

Each process holds T / P tokens in a row. Keys and values of all of them are gathered; their gradients are summed and
scattered. Causal attention of the last tokens is most of the work: of 2 P equal pieces of the sequence, process r
computes the queries of pieces r and 2 P - 1 - r, which are sent to it, and sends the results back. So all processes do
the same work, while everything outside of attention stays in the order of the sequence.
Source: A. Grattafiori et al., "The Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.2 (all-gather of keys and
values, pieces from both ends); there the tokens themselves are divided so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention.bias import CausalBias, CausalVariant

from stoker.stepping.layouts.experts import exchanged
from stoker.stepping.layouts.tensor_layers import gather_from_group

Attention = Callable[..., torch.Tensor]
"""`scaled_dot_product_attention`, PyTorch's or what stands in its place."""


def attention_over(
    group: dist.ProcessGroup,
    attend: Attention,
    q_BHTE: torch.Tensor,
    k_BKTE: torch.Tensor,
    v_BKTE: torch.Tensor,
    *,
    is_causal: bool,
    **named: Any,
) -> torch.Tensor:
    """What the queries of this process's tokens get from the tokens of all processes of a group [B, H, T, E].

    Args:
        group: whose ranks are in the order of the sequence.
        attend: computes attention in one process.
        q_BHTE: queries of this process's T tokens, an even number if `is_causal`.
        k_BKTE: their keys.
        v_BKTE: their values.
        is_causal: tokens see those before them, and themselves.
        named: other arguments of `attend`.
    """
    if (dtype := _autocast_to(q_BHTE)) is not None:  # before they are sent
        q_BHTE, k_BKTE, v_BKTE = (each.to(dtype) for each in (q_BHTE, k_BKTE, v_BKTE))
    k_BKSE, v_BKSE = _gathered(k_BKTE, v_BKTE, group)
    if not is_causal:
        return attend(q_BHTE, k_BKSE, v_BKSE, **named)
    size, rank, piece = group.size(), group.rank(), q_BHTE.shape[-2] // 2
    sends, receives, is_reversed = _pieces(rank, size)
    there, back = [piece * count for count in sends], [piece * count for count in receives]
    first, second = q_BHTE.movedim(-2, 0).split(piece)
    pair_TBHE = exchanged(torch.cat([second, first] if is_reversed else [first, second]), there, back, group)
    mixed = []
    for number, q_TBHE in zip((rank, 2 * size - 1 - rank), pair_TBHE.split(piece), strict=True):
        seen = (number + 1) * piece
        out = _causal(attend, q_TBHE.movedim(0, -2), k_BKSE[..., :seen, :], v_BKSE[..., :seen, :], named)
        mixed.append(out.movedim(-2, 0))
    first, second = exchanged(torch.cat(mixed), back, there, group).split(piece)
    return torch.cat([second, first] if is_reversed else [first, second]).movedim(0, -2)


def prepare_masks(rank: int, size: int, length: int) -> None:
    """Make what says to a GPU's kernel which tokens are seen: PyTorch cannot within dispatch modes.

    Args:
        rank: of this process among `size` of them.
        size: number of processes.
        length: number of tokens of each sample here.
    """
    for number in (rank, 2 * size - 1 - rank):
        _seen(length // 2, (number + 1) * (length // 2))


@functools.lru_cache(maxsize=64)
def _seen(queries: int, keys: int) -> torch.Tensor:
    """PyTorch's `causal_lower_right(queries, keys)`, without memory for numbers that it never has."""
    mask: Any = torch.empty(0).as_subclass(CausalBias)
    mask.variant, mask.seq_len_q, mask.seq_len_kv = CausalVariant.LOWER_RIGHT, queries, keys
    seen: torch.Tensor = mask
    return seen


def _causal(
    attend: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, named: dict[str, Any]
) -> torch.Tensor:
    """Attention of the last of the tokens; on a GPU by a kernel that needs no mask."""
    queries, keys = q.shape[-2], k.shape[-2]
    if queries == keys:
        return attend(q, k, v, is_causal=True, **named)
    if q.device.type == "cuda":
        return attend(q, k, v, attn_mask=_seen(queries, keys), **named)
    mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    return attend(q, k, v, attn_mask=mask, **named)


def _gathered(k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all tokens, in one message where their heads have one size."""
    if k.shape[:-3] == v.shape[:-3] and k.shape[-1] == v.shape[-1] and k.dim() >= 3:
        both = gather_from_group(torch.cat([k, v], dim=-3), k.dim() - 2, group, is_shared=True)
        keys, values = both.split([k.shape[-3], v.shape[-3]], dim=-3)
        return keys, values
    keys, values = (gather_from_group(each, each.dim() - 2, group, is_shared=True) for each in (k, v))
    return keys, values


def _pieces(rank: int, size: int) -> tuple[list[int], list[int], bool]:
    """How many pieces a process sends to each, and receives from each; and whether it sends its second one first.

    >>> _pieces(0, 2), _pieces(1, 2)
    (([1, 1], [1, 1], False), ([1, 1], [1, 1], True))
    >>> _pieces(1, 4)
    ([0, 0, 1, 1], [1, 0, 0, 1], False)
    """
    mine = [number if number < size else 2 * size - 1 - number for number in (2 * rank, 2 * rank + 1)]
    owners = [number // 2 for number in (rank, 2 * size - 1 - rank)]
    sends, receives = ([to.count(other) for other in range(size)] for to in (mine, owners))
    return sends, receives, mine[0] > mine[1]


def _autocast_to(tensor: torch.Tensor) -> torch.dtype | None:
    """The dtype that autocast gives attention; None outside of it."""
    kind = tensor.device.type
    is_on = torch.is_autocast_enabled(kind) and tensor.dtype == torch.float32
    return torch.get_autocast_dtype(kind) if is_on else None
