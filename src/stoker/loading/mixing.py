"""Mixup and CutMix: samples mixed with partners from the same optimiser batch, however it is split and cut.

Partners and proportions are drawn for the whole batch from (seed, epoch, update). A process that takes a part of a
batch also fetches those partners that belong to other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from stoker.errors import BadJob
from stoker.jobs.fields import Fields
from stoker.jobs.regularization import CutMix, Mix
from stoker.loading.fields import Content
from stoker.loading.order import (
    Indices,
    KeyedPermutation,
    Numbers,
    RandomStream,
    key_of,
    keys_of_samples,
    symmetric_beta,
    uniform,
)
from stoker.loading.transforms.geometric import boxes

_SHARES, _CENTRES, _CHANCES = range(3)
"""Keys of the drawn numbers."""


class MixedTarget(NamedTuple):
    """The target of a mixed sample: `share` [B] of the first target, and the rest of the second.

    The loss of the output with each target is mixed in the same shares.
    """

    first: Any
    second: Any
    share: torch.Tensor


@dataclass(frozen=True)
class Pairing:
    """The partners of a process's samples [B], and how they are mixed.

    `rows` [B] are the partners' places among the fetched samples: the process's own, then those at the places `extra`
    of the whole batch. `shares` [B] are what remains of each sample itself, `centres` [2, B] the centres of boxes as
    shares of height and width.
    """

    mix: Mix
    rows: Indices
    extra: Indices
    shares: Numbers
    centres: Numbers

    def mixed(self, own: Content, partners: Content, start: int, stop: int, fields: Fields) -> Content:
        """Samples start..stop mixed with their partners, both ready for the model.

        Raises:
            BadJob: their inputs or targets cannot be mixed.
        """
        theirs = _only_input(partners, fields)
        target = fields.target_of(own)
        if target is None:
            raise BadJob("Job(mix=…) mixes samples and their targets, and these have none")
        inputs = _only_input(own, fields)
        if not (isinstance(inputs, torch.Tensor) and inputs.is_floating_point()):
            kind = inputs.dtype if isinstance(inputs, torch.Tensor) else type(inputs).__name__
            raise BadJob(
                f"Job(mix=…) mixes inputs that are floating numbers, got {kind}",
                remedy="Token numbers and the like have no mean; leave mix out.",
            )
        if not (isinstance(target, torch.Tensor) and target.dim() > 0 and target.shape[0] == inputs.shape[0]):
            kind = type(target).__name__
            raise BadJob(f"Job(mix=…) takes targets in a tensor with an entry for each sample, got {kind}")
        mix = self._pasted if isinstance(self.mix, CutMix) else self._blended
        mixed, shares = mix(inputs, theirs, start, stop)
        content = fields.map_inputs(own, lambda _inputs: mixed)
        return fields.map_target(content, lambda first: MixedTarget(first, fields.target_of(partners), shares))

    def _blended(
        self, own: torch.Tensor, theirs: torch.Tensor, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The mixed inputs, and each sample's own share of them (float32 [B])."""
        shares = torch.from_numpy(self.shares[start:stop].astype(np.float32)).to(own.device, non_blocking=True)
        by_sample = shares.to(own.dtype).view(-1, *[1] * (own.dim() - 1))
        # In two products: `lerp` may round the last few elements otherwise, and which these are depends on the cut.
        mixed = own * by_sample + theirs * (1 - by_sample)
        return _laid_out(mixed, own), shares

    def _pasted(
        self, own: torch.Tensor, theirs: torch.Tensor, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs with a box of their partners', and each sample's own share of the area (float32 [B])."""
        if own.dim() != 4:
            raise BadJob(f"CutMix takes images [B, C, H, W], got inputs of shape {list(own.shape)}")
        sides = np.array(own.shape[2:], dtype=np.float64)[:, None]
        lengths = np.floor(sides * np.sqrt(1 - self.shares[start:stop]))
        begins = np.floor(self.centres[:, start:stop] * sides) - lengths // 2
        ends = np.minimum(begins + lengths, sides)
        begins = np.maximum(begins, 0)
        pasted_B1HW = boxes(own, begins[0], begins[1], ends[0], ends[1])
        area = np.prod(ends - begins, axis=0) / np.prod(sides)
        shares = torch.from_numpy((1 - area).astype(np.float32)).to(own.device, non_blocking=True)
        return _laid_out(torch.where(pasted_B1HW, theirs, own), own), shares


def pairing_of(
    mixes: Sequence[Mix], *, seed: int, epoch: int, update: int, size: int, held: Sequence[int] | None = None
) -> Pairing:
    """The pairing of the batch of `size` samples of update number `update`.

    Args:
        mixes: the ways of mixing, one of which is drawn for the batch.
        seed: of the job.
        epoch: from 0.
        update: from 0.
        size: samples of the whole batch.
        held: the places held by this process (default: all).

    >>> from stoker.jobs.regularization import Mixup
    >>> whole = pairing_of((Mixup(),), seed=0, epoch=0, update=0, size=6)
    >>> part = pairing_of((Mixup(),), seed=0, epoch=0, update=0, size=6, held=[3, 4, 5])
    >>> whole.rows.tolist(), part.rows.tolist(), part.extra.tolist()  # 3, 4 and 5 are mixed with 3, 1 and 0
    ([2, 4, 5, 3, 1, 0], [0, 4, 3], [0, 1])
    """
    places = np.arange(size, dtype=np.int64)
    key = key_of(RandomStream.MIXING, seed, epoch, update)
    mix = mixes[key_of(RandomStream.MIXING, key) % len(mixes)]
    # Drawn for all places, held or not: the last bits of a logarithm may depend on the position within an array.
    keys = keys_of_samples(key, places)
    shares = np.where(uniform(keys, _CHANCES) < mix.p, symmetric_beta(mix.alpha, keys, _SHARES), 1.0)
    centres = np.stack([uniform(keys, _CENTRES, axis) for axis in (0, 1)])
    partners = KeyedPermutation(size, key)(places)
    here = places if held is None else np.array(held, dtype=np.int64)
    extra = np.setdiff1d(partners[here], here)
    row_of = np.zeros(size, dtype=np.int64)
    row_of[here] = np.arange(len(here))
    row_of[extra] = len(here) + np.arange(len(extra))
    return Pairing(mix, row_of[partners[here]], extra, shares[here], centres[:, here])


def _only_input(content: Content, fields: Fields) -> Any:
    given: tuple[Any, ...] = fields.call(lambda *inputs, **named: (*inputs, *named.values()), content)
    if len(given) != 1:
        raise BadJob(
            f"Job(mix=…) goes with one input, and the model takes {len(given)}",
            remedy="Name the one that the model takes: stoker.Fields(inputs=…), or leave mix out.",
        )
    return given[0]


def _laid_out(mixed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """In the memory format of `like`, which the plan chose."""
    return mixed if mixed.stride() == like.stride() else torch.empty_like(like).copy_(mixed)
