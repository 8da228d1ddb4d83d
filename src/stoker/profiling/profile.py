"""What a job is made of, as far as planning needs to know."""

from __future__ import annotations

from torch import nn

from stoker.jobs import Job
from stoker.jobs.token_batch import TokenBatch
from stoker.loading import Datasets
from stoker.loading.lengths import has_one_shape
from stoker.loading.token_batches import mean_samples
from stoker.records import Coupling, Profile
from stoker.stepping import bytes_of, num_parameters
from stoker.stepping.checkpointing import num_blocks
from stoker.stepping.chunked_loss import worthwhile_chunks
from stoker.stepping.model import is_double
from stoker.stepping.optimizers import implementations


def profile(job: Job, data: Datasets, coupling: Coupling, model: nn.Module, *, device_kind: str) -> Profile:
    """The facts of `job` that planning rests on.

    Args:
        job: what is learned.
        data: its samples.
        coupling: how they influence each other.
        model: its model, which may be an outline: nothing is computed.
        device_kind: `cpu` or `cuda`; it decides which implementations of the optimiser there are.
    """
    return Profile(
        num_train=len(data.train),
        num_valid=sum(map(len, data.held_out.values())),
        num_test=0 if data.test is None else len(data.test),
        batch=job.batch,
        parameters=num_parameters(model),
        parameter_bytes=bytes_of(model.parameters()),
        has_convolutions=any(isinstance(module, nn.Conv2d) for module in model.modules()),
        is_in_memory=data.train.is_in_memory,
        optimizer_implementations=implementations(job, model, device_kind),
        coupling=coupling,
        num_blocks=num_blocks(model),
        is_double=is_double(model),
        loss_chunks=worthwhile_chunks(job, model, data.train),
        has_own_step=job.step is not None,
        most_workers=None if data.train.data_class == "indexed" else 1,
        data_bytes=data.train.num_bytes if device_kind == "cuda" else None,
        mean_batch=mean_samples(job, data.train) if isinstance(job.batch, TokenBatch) else None,
        has_one_shape=has_one_shape(job, data.train),
    )
