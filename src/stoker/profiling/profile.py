"""What a job's step is made of."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from stoker.jobs import Job
from stoker.loading import Batch, Datasets
from stoker.records import Coupling, Device, Plan, Profile
from stoker.stepping import Step, bytes_of, num_parameters
from stoker.stepping.optimizers import implementations

_PROBED_SAMPLES = 2


def profile(job: Job, data: Datasets, device: Device, coupling: Coupling) -> Profile:
    """The facts of `job` that planning rests on, from one small forward pass in fp32 on the CPU.

    Raises:
        BadJob: the model or the loss cannot be evaluated on these samples.
    """
    plan = Plan(device="cpu", micro_batch=job.batch, loader="memory" if data.train.is_in_memory else "inline")
    step = Step(job, plan, coupling)
    return Profile(
        num_train=len(data.train),
        num_valid=0 if data.valid is None else len(data.valid),
        num_test=0 if data.test is None else len(data.test),
        batch=job.batch,
        parameters=num_parameters(step.model),
        parameter_bytes=bytes_of(step.model.parameters()),
        saved_bytes_per_sample=saved_bytes_per_sample(step, data),
        has_convolutions=any(isinstance(module, nn.Conv2d) for module in step.model.modules()),
        is_in_memory=data.train.is_in_memory,
        optimizer_implementations=implementations(job, device.kind),
        coupling=coupling,
    )


def saved_bytes_per_sample(step: Step, data: Datasets) -> float:
    """Bytes that a forward pass keeps for its backward pass, per sample: distinct storages other than parameters."""
    fewest = step.coupling.group if step.coupling.kind == "whole_group" else None
    size = min(fewest or _PROBED_SAMPLES, len(data.train), step.job.batch)
    indices = np.arange(size, dtype=np.int64)
    batch = Batch(data.train.fetch(indices, 0), indices, 0, step.pipeline(data.train, augmented=True))
    own = {parameter.untyped_storage().data_ptr() for parameter in step.model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        step.loss_of(batch.cut(0, size), size, update=0, first=0)
    return sum(saved.values()) / size
