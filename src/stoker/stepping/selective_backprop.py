"""Selective backprop: gradients of those samples of a batch alone whose losses are highest.

What: a pass without gradients, in evaluation mode, gives each sample's loss; the share `keep` of the batch with the
highest losses then makes the update, whose loss is their mean. Other updates take the whole batch: those outside of
[start, end) of the run, and every `interrupt`-th. `Job(loss=stoker.Objective(…, selective_backprop=…))`.
Use when: most samples are learned early, and a pass backward costs more than one forward.
Costs: a pass forward over the whole batch; with keep=0.5, a selected update takes about five sixths of the time. Labels
that are wrong are the hardest to learn, and are kept. Such updates are not captured, nor compiled. The loss in progress
is that of the samples kept.
Does not combine with: mix, sync, a step of the job's own, losses of the form loss(model, batch), of tokens or of the
whole batch, optimisers that compute the loss within their step, several processes.
Source: A. Jiang et al., "Accelerating Deep Learning by Focusing on the Biggest Losers", arXiv:1910.00762; there samples
are kept with a probability that grows with their loss. Settings as in MosaicML Composer's SelectiveBackprop.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import nn

from stoker.jobs.objective import SelectiveBackprop
from stoker.loading.batches import Batch
from stoker.loading.fields import take
from stoker.stepping.model import in_evaluation
from stoker.stepping.uncompiled import uncompiled


def selected(
    batch: Batch,
    update: int,
    setting: SelectiveBackprop,
    model: nn.Module,
    sample_losses: Callable[[Batch, int], torch.Tensor],
) -> Batch:
    """The samples of `batch` that make update number `update`, in their order; all of them outside of the interval.

    Args:
        batch: the whole batch of one process.
        update: its number, from 0.
        setting: which share is kept, and when.
        model: the job's.
        sample_losses: the loss of each sample [B] of a batch in an update.
    """
    is_whole = bool(setting.interrupt) and update % setting.interrupt == 0
    if is_whole or not setting.start <= batch.progress < setting.end:
        return batch
    with torch.no_grad(), in_evaluation(model), uncompiled():
        losses_B = sample_losses(batch, update)
    num_kept = math.ceil(setting.keep * batch.size)
    rows = losses_B.argsort(descending=True, stable=True)[:num_kept].sort().values.cpu()
    content = take(batch.content, rows.tolist(), batch.size)
    return dataclasses.replace(batch, content=content, indices=batch.indices[rows.numpy()], whole=num_kept)
