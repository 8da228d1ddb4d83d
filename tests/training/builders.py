"""Small jobs and steps for the tests of training."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import stoker
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import Datasets, datasets_of
from stoker.records import CheckpointManifest, Coupling, Plan, Position
from stoker.stepping.step import Step
from stoker.store import CheckpointStore
from stoker.training.checkpoints import Checkpointer

SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="known")
PLAN = Plan(device="cpu", micro_batch=16)


def blobs(num_samples: int = 80) -> tuple[torch.Tensor, torch.Tensor]:
    """Points [N, 6] and the sign of their sum [N]."""
    inputs = torch.randn(num_samples, 6, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs.sum(1) > 0).long()


def net() -> nn.Module:
    """Two layers with dropout between them."""
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def tiny_job(**changes) -> stoker.Job:
    """A classifier of `blobs` in batches of 16, for three epochs."""
    settings = {
        "model": net,
        "data": blobs(),
        "loss": "cross_entropy",
        "optimizer": stoker.SGD(lr=0.1, momentum=0.9),
        "batch": 16,
        "until": stoker.epochs(3),
        "metrics": ["accuracy"],
    }
    return stoker.Job(**(settings | changes))


def step_of(job: stoker.Job, plan: Plan = PLAN, coupling: Coupling = SEPARABLE) -> Step:
    """A fresh step."""
    return Step(job, plan, coupling)


def source_of(step: Step, data: Datasets | None = None) -> BatchSource:
    """The batches of the step's job."""
    data = data or datasets_of(step.job)
    pipeline = step.pipeline(data.train, augmented=True)
    return BatchSource(data.train, pipeline, data.extent(step.job), step.job.seed, step.plan)


def advance(step: Step, start: int, stop: int) -> None:
    """Make updates number `start` up to `stop`."""
    source = source_of(step)
    total = source.extent.updates_in(step.job.until)
    for update, batch in enumerate(source.batches(source.extent.position(start), stop), start=start):
        step.update(batch, update, update / total)


def saved(step: Step, folder: Path, updates: int, progress: dict | None = None) -> tuple[Path, CheckpointManifest]:
    """A checkpoint of the step after so many updates, as read back from the disk."""
    store = CheckpointStore(folder)
    checkpointer = Checkpointer(store, spec_digest="s", version="0")
    position = Position(samples=16 * updates, updates=updates)
    checkpointer.save(step, position, progress or {}, best=False)
    checkpointer.close()
    found = store.newest()
    assert found is not None
    return found


def everything_of(step: Step) -> dict[str, torch.Tensor]:
    """Every tensor of the step's state by name: weights, buffers, the optimiser's state and the average."""
    found = {f"model.{name}": tensor for name, tensor in step.model.state_dict().items()}
    parameters = [p for group in step.optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        for name, value in step.optimizer.state.get(parameter, {}).items():
            for at, one in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(one, torch.Tensor):
                    found[f"optimizer.{number}.{name}.{at}"] = one
    if step.average is not None:
        found |= {f"average.{name}": tensor for name, tensor in step.average.weights.items()}
    return found


def assert_bit_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """The same names, dtypes, layouts and bits."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        twin = other[name]
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (twin.dtype, twin.shape, twin.stride()), name
        bits, others = (each.contiguous().view(-1).view(torch.uint8) for each in (tensor, twin))
        assert torch.equal(bits, others), name
