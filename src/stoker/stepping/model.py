"""Making a job's model, and telling two models apart."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Job
from stoker.jobs.freezing import Freeze
from stoker.jobs.weights import Weights
from stoker.loading import Stream, key_of, seed_generators
from stoker.records import Plan
from stoker.stepping.adopting import adopted, is_foreign, naming
from stoker.stepping.freezing import freeze_for_good
from stoker.stepping.initial_weights import take_over
from stoker.stepping.modes import to_training


def build_model(job: Job) -> nn.Module:
    """The job's model with its initial weights, made anew or a copy of the module given; its mode by `to_training`.

    Raises:
        BadJob: the function does not return a module, or the module has nothing to train, or lacks sizes; or what it
            is to start from or leave frozen is not there.
    """
    if isinstance(job.model, nn.Module):
        model = copy.deepcopy(job.model)
    else:
        with torch.random.fork_rng(devices=[]):
            seed_generators(key_of(Stream.INITIAL_WEIGHTS, job.seed))
            with naming():
                model = job.model()
    if not isinstance(model, nn.Module):
        raise BadJob(
            f"Job(model=…) made a {type(model).__name__}, wanted a torch.nn.Module",
            remedy='Set KERAS_BACKEND="torch" before Keras is imported.' if is_foreign(model) else None,
        )
    model = adopted(model)
    require_sizes(model)
    if isinstance(job.init, Weights):
        take_over(model, job.init)
    if isinstance(job.freeze, Freeze):
        freeze_for_good(to_training(model), job.freeze)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        frozen = " that is not frozen" if job.freeze is not None else ""
        raise BadJob(f"{type(model).__name__} has no parameter to train{frozen}")
    return to_training(model)


def require_sizes(model: nn.Module) -> None:
    """Refuse a model with a lazy layer that has seen no batch.

    Raises:
        BadJob: it has one.
    """
    if lazy := [
        name for name, parameter in model.named_parameters() if isinstance(parameter, nn.UninitializedParameter)
    ]:
        raise BadJob(
            f"{lazy[0]} of {type(model).__name__} has no size before the first batch",
            remedy="Give the layer its number of inputs, or pass a batch through the model before handing it over.",
        )


def placed(model: nn.Module, plan: Plan, dtype: torch.dtype | None = None) -> nn.Module:
    """`model` on the plan's device in its memory format, ready to be trained; in `dtype`, or as it is."""
    model = in_dtype(model.to(device=torch.device(plan.device)), dtype)
    if plan.memory_format == "channels_last":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing from the stubs
    return to_training(model)


def in_dtype(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """`model` with its real weights and buffers in `dtype` and its complex ones as precise; None: as it is."""
    if dtype is None:
        return model
    if not any(tensor.is_complex() for tensor in (*model.parameters(), *model.buffers())):
        return model.to(dtype)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():  # `Module.to` would drop the imaginary part
            return tensor.to(dtype.to_complex())
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    model._apply(cast)  # noqa: SLF001 - what `Module.to`, which knows of one dtype only, is made of
    return model


def weights_digest(model: nn.Module) -> str:
    """SHA-256 (hex) of a model's parameters and buffers: names, types, shapes and bytes."""
    state = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        state.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        state.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return state.hexdigest()


def num_parameters(model: nn.Module) -> int:
    """Scalars in all parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def is_double(model: nn.Module) -> bool:
    """Whether all trainable weights are in float64 (or complex128)."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    return bool(dtypes) and dtypes <= {torch.float64, torch.complex128}


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Tensors that a model makes on its way are of `dtype` within the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
