"""Samples of different lengths: padded in a batch, bucketed, or packed into rows. What a job says of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stoker.errors import BadJob
from stoker.jobs import Job
from stoker.jobs.lengths import Bucketed, Packed, bucketed, packed
from stoker.jobs.token_batch import TokenBatch
from stoker.loading.fields import Content
from stoker.loading.filling import holding
from stoker.loading.samples import Samples

__all__ = ["Bucketed", "Packed", "Padded", "bucketed", "has_one_shape", "packed", "padded", "segment_mask"]


@dataclass(frozen=True)
class Padded:
    """Makes a batch of samples whose tensors differ in their first dimension; see `padded`."""

    pad: float | Mapping[Any, float] = 0
    to: int | None = None
    multiple_of: int = 1
    mask: str | None = None

    def __post_init__(self) -> None:
        settings: tuple[tuple[str, object], ...] = (("to", self.to), ("multiple_of", self.multiple_of))
        for name, value in settings:
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise BadJob(f"padded({name}=…) is a whole number, 1 or more, got {value!r}")

    def __call__(self, items: list[Any]) -> Content:
        """The batch: of each entry that has a length, a tensor [B, longest, ...]; others as PyTorch collates them."""
        first = items[0]
        if isinstance(first, Mapping):
            batch = {key: self._entry([item[key] for item in items], key) for key in first}
            return batch if self.mask is None else {**batch, self.mask: self._mask(items)}
        if self.mask is not None:
            raise BadJob("padded(mask=…) names an entry, and samples are no dicts", remedy="Give samples as dicts.")
        if isinstance(first, tuple):
            columns = zip(*items, strict=True)
            return tuple(self._entry(list(column), place) for place, column in enumerate(columns))
        return self._entry(items, 0)

    def _entry(self, values: list[Any], key: Any) -> Any:
        if not all(_has_length(value) for value in values):
            return torch.utils.data.default_collate(values)
        tensors = [torch.as_tensor(value) for value in values]
        fill = self.pad.get(key, 0) if isinstance(self.pad, Mapping) else self.pad
        told = [tensor for tensor, value in zip(tensors, values, strict=True) if not _is_empty_list(value)] or tensors
        rest = {tuple(tensor.shape[1:]) for tensor in told}
        if len(rest) > 1:
            raise ValueError(f"samples differ beyond their first dimension: {', '.join(map(str, sorted(rest)))}")
        dtype = holding(functools.reduce(torch.promote_types, [tensor.dtype for tensor in told]), fill)
        padded_BT = told[0].new_full((len(tensors), self._longest(tensors), *rest.pop()), fill, dtype=dtype)
        for row, tensor in enumerate(tensors):
            if len(tensor):
                padded_BT[row, : len(tensor)] = tensor
        return padded_BT

    def _longest(self, tensors: list[torch.Tensor]) -> int:
        longest = max(map(len, tensors))
        if self.to is None:
            return -(-longest // self.multiple_of) * self.multiple_of
        if longest > self.to:
            raise ValueError(f"a sample is {longest} long, and samples are padded to {self.to}")
        return self.to

    def _mask(self, items: list[Any]) -> torch.Tensor:
        """1 where a sample has a value, 0 where it is padded, int64 [B, longest], by its first entry with a length."""
        key = next((key for key, value in items[0].items() if _has_length(value)), None)
        if key is None:
            raise BadJob("padded(mask=…): no entry of a sample has a length")
        ones = [torch.ones(len(item[key]), dtype=torch.int64) for item in items]
        longest = self._longest(ones)
        return torch.stack([torch.cat([one, one.new_zeros(longest - len(one))]) for one in ones])


def padded(
    pad: float | Mapping[Any, float] = 0, *, to: int | None = None, multiple_of: int = 1, mask: str | None = None
) -> Padded:
    """A `collate` for samples whose tensors differ in their first dimension: padded to the longest of the batch.

    Args:
        pad: what is filled in, or that for each entry by its key (of a tuple: its place; else 0), such as
            `{"labels": -100}`, which losses do not count.
        to: pad to this length whatever the batch, so that every batch has one shape and the forecast is of it.
        multiple_of: pad to a multiple of this.
        mask: of samples that are dicts, the name of an entry to add: 1 where a sample has a value, 0 where it is
            padded.

    Raises:
        BadJob: `to` or `multiple_of` is no positive whole number.
    """
    return Padded(pad, to, multiple_of, mask)


def has_one_shape(job: Job, train: Samples) -> bool:
    """Whether whole batches of the job are all of one shape, as far as its settings tell."""
    if isinstance(job.batch, TokenBatch) and not isinstance(job.lengths, Packed):
        return False
    if train.is_in_memory or isinstance(job.lengths, Packed):
        return True
    pads_as_it_comes = isinstance(job.collate, Padded) and job.collate.to is None
    return not (pads_as_it_comes or isinstance(job.lengths, Bucketed))


def segment_mask(segment_ids_BT: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
    """Which tokens of packed rows may attend to which: bool [B, 1, T, T], true within one sample.

    Padding attends to padding, so that no row of scores is empty. It goes into
    `torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=…)`.

    Args:
        segment_ids_BT: the samples' numbers in their row, 0 for padding.
        causal: whether a token attends to itself and those before it alone.
    """
    mask_BTT = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    if causal:
        num_tokens = segment_ids_BT.shape[1]
        mask_BTT = mask_BTT & torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=mask_BTT.device).tril()
    return mask_BTT[:, None]


def _is_empty_list(value: Any) -> bool:
    """Whether it is a list without numbers, which does not tell what they would be."""
    return isinstance(value, list) and not value


def _has_length(value: Any) -> bool:
    return isinstance(value, list) or (hasattr(value, "shape") and len(value.shape) > 0)
