"""A job's model: built with its initial weights or on the meta device, placed, digested, switched between modes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from stoker.errors import BadJob
from stoker.imports import collector_paused
from stoker.jobs import Job
from stoker.jobs.freezing import Freeze
from stoker.jobs.initial_weights import Weights, load_initial_weights
from stoker.loading.order import RandomStream, key_of, seed_generators
from stoker.records import Plan
from stoker.stepping.foreign_models import adopt_model, fresh_keras_names, is_foreign
from stoker.stepping.frozen_parameters import freeze_for_good
from stoker.stepping.model_copies import copied


def build_model(job: Job) -> nn.Module:
    """The job's model with its initial weights, newly made or a copy of the given module; its mode by `to_training`.

    Raises:
        BadJob: the function does not return a module, the module has nothing to train, lacks sizes or has tensors that
            no checkpoint can hold, or its initial weights or frozen parameters do not exist.
    """
    if isinstance(job.model, nn.Module):
        try:
            model = copied(job.model)
        except Exception as error:
            raise BadJob(
                f"Job(model=…): what is trained is a copy of the given {type(job.model).__name__}, which cannot be "
                f"made: {error}",
                remedy="Give a function that makes the model (model=lambda: …), or remove from its attributes what "
                "cannot be copied, such as results of a pass.",
            ) from error
    else:
        with torch.random.fork_rng(devices=[]):
            seed_generators(key_of(RandomStream.INITIAL_WEIGHTS, job.seed))
            with fresh_keras_names():
                model = job.model()
    if not isinstance(model, nn.Module):
        raise BadJob(
            f"Job(model=…) made a {type(model).__name__}, wanted a torch.nn.Module",
            remedy='Set KERAS_BACKEND="torch" before Keras is imported.' if is_foreign(model) else None,
        )
    model = adopt_model(model)
    require_sizes(model)
    _require_storable(model)
    if isinstance(job.init, Weights):
        load_initial_weights(model, job.init)
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
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.UninitializedParameter)]
    if lazy:
        raise BadJob(
            f"{lazy[0]} of {type(model).__name__} has no size before the first batch",
            remedy="Give the layer its number of inputs, or pass a batch through the model before handing it over.",
        )


def _require_storable(model: nn.Module) -> None:
    """Refuse weights and buffers that safetensors, which checkpoints are written in, has no form for.

    Sparse buffers also where they are not in the state: they are compared, to find which ones passes change.
    """
    state = model.state_dict()
    for name, value in {**dict(model.named_buffers()), **state}.items():
        if not isinstance(value, torch.Tensor):
            kind, remedy = f"a {type(value).__name__}", "Make it a tensor, or leave it out and keep a plain attribute."
        elif value.layout is not torch.strided:
            kind = f"a sparse tensor ({str(value.layout).removeprefix('torch.')})"
            remedy = (
                "Keep its indices and values as two buffers, and make it of them in forward(): "
                "torch.sparse_coo_tensor(indices, values, size)."
            )
        elif value.dtype is torch.complex128 and name in state:
            kind, remedy = "a tensor of complex128", "Use complex64, or real and imaginary parts as two tensors."
        else:
            continue
        raise BadJob(f"{name} of {type(model).__name__} is {kind}, which checkpoints do not hold", remedy=remedy)


def place_model(model: nn.Module, plan: Plan, dtype: torch.dtype | None = None) -> nn.Module:
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
    """Number of scalars in all parameters, tied ones once [1]."""
    return sum(parameter.numel() for parameter in model.parameters())


def is_double(model: nn.Module) -> bool:
    """Whether all trainable weights are in float64 (or complex128)."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    return bool(dtypes) and dtypes <= {torch.float64, torch.complex128}


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Size of the tensors' elements [bytes]."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within the context, tensors that a model creates have `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def meta_model(job: Job) -> nn.Module:
    """The job's model with its parameters on PyTorch's meta device, or the given module; frozen as the job says.

    A function that cannot make its model there, because it reads values, makes the real one.

    Raises:
        BadJob: a parameter that the job freezes does not exist.
        Exception: whatever the function raises when it makes the real one.
    """
    if not isinstance(job.model, nn.Module):
        model = _made_on_meta(job.model)
    elif isinstance(job.freeze, Freeze):
        model = on_meta(job.model)
    else:
        model = job.model
    return freeze_for_good(model, job.freeze) if isinstance(job.freeze, Freeze) else model


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of a model on the meta device, which takes no memory."""
    memo: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    return copied(model, memo)


def _made_on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    # The function may import packages on its first call.
    with torch.random.fork_rng(devices=[]), collector_paused():
        # Reading values fails in many ways, `.numpy()` by a TypeError; if the job is wrong, the real one fails too.
        with contextlib.suppress(Exception), torch.device("meta"), _NormalDrawsLeftOut():
            return adopt_model(make())
        return adopt_model(make())


_ZEROED: dict[Any, Callable[..., torch.Tensor]] = {
    torch.Tensor.normal_: torch.Tensor.zero_,
    nn.init.normal_: nn.init.zeros_,
}


class _NormalDrawsLeftOut(TorchFunctionMode):
    """Tensors without memory are not filled with normal draws, as embeddings are at first, nor are draws scaled.

    PyTorch does both in Python, for which it imports symbolic shapes, and sympy with 432 modules.
    """

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The call; for draws, and tensors times a number, a tensor of their size, whose values are nowhere."""
        kwargs = kwargs or {}
        if func in _ZEROED and (tensor := args[0] if args else kwargs["tensor"]).is_meta:
            return _ZEROED[func](tensor)
        if func is torch.randn and all(kwargs.get(name) is None for name in ("device", "generator", "out")):
            func = torch.empty  # on the meta device, as everything that names none
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        is_product = getattr(func, "__name__", "") in ("mul", "__mul__", "__rmul__") and len(args) == 2 and not kwargs
        if is_product and _is_scaling(*args):
            return torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
        return func(*args, **kwargs)


def _is_scaling(tensor: Any, factor: Any) -> bool:
    """Whether a product is one of a tensor without memory and a number, as large and of the same type as the tensor."""
    is_plain = isinstance(tensor, torch.Tensor) and tensor.is_meta and tensor.is_contiguous()
    return is_plain and isinstance(factor, int | float) and tensor.is_floating_point() and not tensor.requires_grad


def to_training(model: nn.Module) -> nn.Module:
    """`model` in training mode, in place, except modules in evaluation mode within a frozen part.

    A part is frozen if it has parameters and none of them requires a gradient. In evaluation mode its batch norms
    normalise by their running statistics, which then do not move, and its dropout is off: a frozen backbone as it is
    usually meant, kept as the user set it. Anywhere else evaluation mode is left over from loading, and is undone.
    """
    kept: list[nn.Module] = []
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            kept += [part for part in module.modules() if not part.training]
    model.train()
    for part in kept:
        part.training = False
    return model


@contextlib.contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Within the context `model` is in evaluation mode; afterwards each module is in its previous mode.

    By `train()`, as in a loop of the user's own: adapters merge their weights in evaluation, and there undo it.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        if modes[0][1]:
            model.train()
        for module, was_training in modes:
            module.training = was_training
