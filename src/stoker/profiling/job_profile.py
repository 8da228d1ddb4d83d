"""The facts of a job that planning needs: its profile, its model's parts, and the time to fetch a sample."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import numpy as np
from torch import nn

from stoker.jobs import Job
from stoker.jobs.batch_size import TokenBatch
from stoker.loading.datasets import Datasets
from stoker.loading.lengths import has_one_shape
from stoker.loading.samples import Samples
from stoker.loading.token_batches import mean_samples
from stoker.loading.transforms import ProgressiveResizing
from stoker.records import Coupling, Profile
from stoker.records.profile import ModelParts, Parameter
from stoker.stepping.activation_checkpointing import num_blocks, repeated_blocks
from stoker.stepping.chunked_loss import worthwhile_chunks
from stoker.stepping.model import bytes_of, is_double, num_parameters
from stoker.stepping.optimizer_offload import offload_problem
from stoker.stepping.torch_optimizers import implementations


def job_profile(job: Job, data: Datasets, coupling: Coupling, model: nn.Module, *, device_kind: str) -> Profile:
    """The facts of `job` that planning rests on.

    Args:
        job: the job.
        data: its samples.
        coupling: how they influence each other.
        model: its model, which may be on the meta device: nothing is computed.
        device_kind: `cpu` or `cuda`; decides the possible implementations of the optimiser.
    """
    return Profile(
        num_train=len(data.train),
        num_valid=sum(map(len, data.held_out.values())),
        num_test=0 if data.test is None else len(data.test),
        batch=job.batch_size,
        parameters=num_parameters(model),
        parameter_bytes=bytes_of(model.parameters()),
        has_convolutions=has_convolutions(model),
        is_in_memory=data.train.is_in_memory,
        optimizer_implementations=implementations(job, model, device_kind),
        coupling=coupling,
        num_blocks=num_blocks(model),
        is_double=is_double(model),
        numerics=tuple(job.numerics),
        loss_chunks=worthwhile_chunks(job, model, data.train),
        has_own_step=job.step is not None,
        most_workers=None if data.train.data_class == "indexed" else 1,
        data_bytes=data.train.num_bytes if device_kind == "cuda" else None,
        mean_batch=mean_samples(job, data.train) if isinstance(job.batch, TokenBatch) else None,
        has_one_shape=has_one_shape(job, data.train),
        relative_cost=_relative_cost(job),
        offload_problem=offload_problem(job),
    )


def has_convolutions(model: nn.Module) -> bool:
    """Whether a model has weights of four dimensions, as 2-d convolutions and their transposes do."""
    return any(parameter.dim() == 4 for parameter in model.parameters())


def _relative_cost(job: Job) -> float:
    """Mean time of an update over the run, as a share of one of the whole batch of whole images."""
    resizing = math.prod(t.relative_cost() for t in job.augment if isinstance(t, ProgressiveResizing))
    selective = job.objective.selective_backprop
    return resizing if selective is None else resizing * selective.relative_cost()


def block_names(model: nn.Module) -> tuple[str, ...]:
    """Dotted names of the model's repeated blocks, in order."""
    names = {id(module): name for name, module in model.named_modules()}
    return tuple(names[id(block)] for block in repeated_blocks(model))


def model_parts(model: nn.Module) -> ModelParts:
    """The parameters of `model`, which may be on the meta device, and its repeated blocks; nothing is divided."""
    blocks = block_names(model)
    parameters = tuple(
        Parameter(
            name=name,
            shape=tuple(parameter.shape),
            item_bytes=parameter.element_size(),
            is_trained=parameter.requires_grad,
            block=next((number for number, block in enumerate(blocks) if name.startswith(f"{block}.")), None),
        )
        for name, parameter in model.named_parameters()
    )
    return ModelParts(
        name=type(model).__name__, parameters=parameters, blocks=blocks, buffer_bytes=bytes_of(model.buffers())
    )


_AT_ONCE = 8
_TURNS = 3


def fetch_seconds(samples: Samples, clock: Callable[[], float] = time.perf_counter) -> float:
    """Median time to fetch one sample [s]; 0 for samples in memory, of which a batch is gathered at once.

    The first turn, in which files are opened, does not count.
    """
    if samples.is_in_memory:
        return 0.0
    times: list[float] = []
    for turn in range(_TURNS + 1):
        indices = (np.arange(_AT_ONCE, dtype=np.int64) + turn * _AT_ONCE) % len(samples)
        started = clock()
        samples.fetch(indices, 0)
        times.append((clock() - started) / _AT_ONCE)
    return statistics.median(times[1:])
