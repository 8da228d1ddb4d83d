"""A plan applied to a model and its optimisers, for a training loop that stays the user's own: `stoker.prepare`.

What: model and optimisers are changed in place as a plan says; the loop around them stays as it is.
Use when: a Job cannot express the loop, or the loop cannot be rewritten. A Job does more: its order, its checkpoints
and its forecast are Stoker's.
Costs: settings of the process (threads, tf32 products, memory) stay set. The loop still decides itself how a batch is
cut (`micro_batch`), where batches come from (`loader`), and when a checkpoint is written.
Does not combine with: `float16` and a gradient scaler; autocast here is bf16, which needs none.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stoker.devices import attached_devices, resolve_place
from stoker.devices.malloc import apply_malloc
from stoker.errors import BadJob
from stoker.jobs import Job, Loss
from stoker.jobs.objective import Objective
from stoker.loading.fields import map_tensors, tensors_of
from stoker.planning.decision import decide, given_plan
from stoker.planning.model.search_space import precisions
from stoker.planning.resolved_job import resolve_job
from stoker.records import Decision, Device, Plan
from stoker.stepping.activation_checkpointing import checkpoint
from stoker.stepping.model import is_double
from stoker.stepping.precision import autocasting, require_precision
from stoker.stepping.torch_compile import Compilation, compile_in_place
from stoker.stepping.torch_optimizers import use_implementation
from stoker.units import updates

OwnLoss = Callable[[nn.Module, Any], torch.Tensor]
"""The mean loss of a batch, as the loop computes it: `loss(model, batch)`."""

_MEASURED_FOR = updates(2_000)
"""Length of the run that a measured plan is chosen for; it bounds the time of measuring."""


@dataclass(frozen=True, eq=False)
class OwnLoop:
    """A model and its optimisers under a plan, for a user's own loop.

    `model` and `optimizer` are the objects given to `prepare`, changed in place. `notes` name what of the plan could
    not be applied, and why. `decision` holds the measurements of the plan, or None. `compilation` belongs to a compiled
    plan: from the first pass on, its `problem` is why the model runs uncompiled, if it does.
    """

    model: nn.Module
    optimizer: Any
    plan: Plan
    notes: tuple[str, ...] = ()
    decision: Decision | None = None
    compilation: Compilation | None = None

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return torch.device(self.plan.device)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context for the forward pass and the loss; the backward pass belongs outside."""
        return autocasting(self.plan.precision, self.device, dtype=None, draws=True)

    def to_device(self, batch: Any) -> Any:
        """`batch` (a tensor, or tuples, lists and dicts of them) on the device, images in the plan's memory format.

        Copies from pinned memory do not block.

        Args:
            batch: tensors of any shape, on the host or the device.
        """

        def place(tensor: torch.Tensor) -> torch.Tensor:
            placed = tensor.to(self.device, non_blocking=True)
            is_image = placed.dim() == 4 and self.plan.memory_format == "channels_last"
            return placed.contiguous(memory_format=torch.channels_last) if is_image else placed

        return map_tensors(batch, place)


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    plan: Plan | str | Path = "auto",
    *,
    loss: OwnLoss | None = None,
    example_batch: Any = None,
    on: str = "here",
) -> OwnLoop:
    """Apply a plan to `model` and `optimizer`, in a training loop that stays your own.

    The model goes to the device and its memory format, its blocks are checkpointed, and it is compiled. The optimiser
    gets its implementation. Threads, tf32 products and memory of the process are set. What is learned stays the same,
    up to the rounding of the plan's precision. Optimisers keep their identity, their state and their schedulers.

    Args:
        model: changed in place; its parameters stay the objects that the optimiser holds.
        optimizer: one, or several.
        plan: a Plan; a file with one; or "auto": measured on copies where `loss` and `example_batch` are given, else
            the plan that is usually fastest on the device, whose reduced precision is not compared with fp32.
        loss: the mean loss of a batch, `loss(model, batch)`; for a measured plan.
        example_batch: a batch of the loop: a tensor, or a tuple or dict of tensors [B, ...].
        on: the device for "auto": `here`, `cpu`, `cuda:1`, …

    Raises:
        BadJob: the plan asks for what the model or the device does not have, or the optimiser is not the model's.
        DoesNotFit: the plan is compiled and there is no compiler, or no measured plan fits.
        NoDevice: `on` is unknown or not attached.
    """
    optimizers = _as_list(model, optimizer)
    if (loss is None) != (example_batch is None):
        raise BadJob(
            "a plan is measured by a loss on a batch, and one of them is missing",
            remedy="Call stoker.prepare(model, optimizer, loss=…, example_batch=…), or leave both out.",
        )
    decision: Decision | None = None
    if plan != "auto":
        if loss is not None:
            raise BadJob("the plan is given, so that nothing is measured", remedy='Leave plan out ("auto"), or loss.')
        given = given_plan(plan) if isinstance(plan, Plan | Path) or str(plan).endswith(".json") else None
        if not isinstance(given, Plan):
            raise BadJob(
                f"plan={plan!r} is no plan",
                remedy="Give a stoker.plan(…).chosen.plan, a file that `stoker plan JOB --json > plan.json` made, "
                'or "auto".',
            )
        chosen = given
    else:
        device = resolve_place(on, attached_devices())
        if loss is not None:
            decision = _measured(model, optimizers, loss, example_batch, device)
        chosen = decision.chosen.plan if decision is not None else _usual(model, device)
        chosen = dataclasses.replace(chosen, optimizer_implementation="fused", captured=False)
    notes = _apply(chosen, model, optimizers)
    compilation = compile_in_place(model, torch.device(chosen.device)) if chosen.compile else None
    return OwnLoop(model, optimizer, chosen, notes, decision, compilation)


def _as_list(model: nn.Module, optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimisers; refuses parameters that are not the model's, which would not move to the device."""
    if not isinstance(model, nn.Module):
        raise BadJob(f"prepare(…) was given a {type(model).__name__}, wanted a torch.nn.Module")
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    own = set(map(id, model.parameters()))
    for single in optimizers:
        if not isinstance(single, torch.optim.Optimizer):
            raise BadJob(f"prepare(model, optimizer): got a {type(single).__name__}, wanted a torch.optim.Optimizer")
        held = [p for group in single.param_groups for p in group["params"]]
        if strange := sum(id(p) not in own for p in held):
            raise BadJob(
                f"{strange} of the {len(held)} parameters that {type(single).__name__} steps are not the model's",
                remedy="Make the optimiser from model.parameters() after the model is as you want it; several modules "
                "go in as one: nn.ModuleList([encoder, decoder]).",
            )
    return optimizers


def _usual(model: nn.Module, device: Device) -> Plan:
    """The plan that is usually fastest on the device and fits any loop."""
    has_images = any(isinstance(module, nn.Conv2d) for module in model.modules())
    return Plan(
        device=device.torch_name,
        micro_batch=1,
        precision="fp64" if is_double(model) else precisions(device)[0],
        memory_format="channels_last" if has_images else "contiguous",
        threads=device.cores if device.kind == "cpu" else 1,
    )


def _measured(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], loss: OwnLoss, batch: Any, device: Device
) -> Decision:
    """The plan that trials of the loop's own update confirm, with copies of model and optimiser."""
    if len(optimizers) > 1:
        raise BadJob(
            f"a plan is measured with one optimiser, here are {len(optimizers)}",
            remedy="Describe the update as Job(step=…) and call stoker.plan, or leave loss and example_batch out.",
        )
    trainable = [p for p in model.parameters() if p.requires_grad]
    sizes = {size for tensor in tensors_of(batch) for size in tensor.shape[:1]}
    if len(sizes) != 1:
        raise BadJob(
            f"example_batch has tensors of {', '.join(map(str, sorted(sizes))) or 'no'} samples",
            remedy="Give a tensor, or a tuple or dict of tensors with the samples in their first dimension.",
        )
    (size,) = sizes

    def mean_loss(model: nn.Module, batch: Any) -> Loss:
        return Loss(loss(model, batch) * size, size)

    def copied(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        # With the copies of the parameters, and without the state of a loop that is resumed.
        twins = {id(own): twin for own, twin in zip(trainable, parameters, strict=True)}
        twin = copy.deepcopy(optimizers[0], twins)
        twin.state.clear()
        return twin

    job = Job(
        model=model,
        data=batch,
        optimizer=copied,
        batch=size,
        until=_MEASURED_FOR,
        name="own loop",
        loss=Objective(mean_loss, scope="batch"),  # a loop computes the loss of whole batches
    )
    return decide(resolve_job(job), device)[0]


def _apply(plan: Plan, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[str, ...]:
    """Apply the plan; returns notes on what could not be applied."""
    device = torch.device(plan.device)
    require_precision(plan.precision, device)
    if plan.precision == "fp16":
        raise BadJob(
            "the plan's precision is fp16, and a loop of your own has no loss scale",
            remedy='Use precision "bf16", "tf32" or "fp32".',
        )
    if plan.precision == "fp8":
        raise BadJob(
            "the plan's precision is fp8, and the layers of your loop's own model are as you wrote them",
            remedy='Use precision "bf16", "tf32" or "fp32".',
        )
    if plan.optimizer_states != "full":
        raise BadJob(
            f"the plan has {plan.optimizer_states} optimizer_states, and the optimiser is your loop's own",
            remedy="Use a plan of full optimizer_states.",
        )
    if plan.is_offloaded:
        raise BadJob(
            "the plan has optimizer_offload, and the optimiser is your loop's own, on the device",
            remedy="Use a plan without it.",
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadJob(f"the plan is for {device}, which this process does not have", remedy="Make a plan for `here`.")
    notes: list[str] = []
    if problem := apply_malloc(plan.malloc):
        notes.append(f"memory is had as it is by default: {problem}")
    torch.set_num_threads(plan.threads)
    if device.type == "cuda":
        allows_tf32 = plan.precision == "tf32"  # in products and convolutions of fp32 tensors
        torch.set_float32_matmul_precision("high" if allows_tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = allows_tf32
    model.to(device)
    if plan.memory_format == "channels_last":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing from the stubs
    if plan.loss_chunks > 1 or plan.captured:
        notes.append("the loss and the passes are the loop's own: they are neither cut into chunks nor captured")
    reports = map(functools.partial(use_implementation, implementation=plan.optimizer_implementation), optimizers)
    notes += [problem for problem in reports if problem]
    checkpoint(
        model,
        plan.checkpointed_blocks,
        checkpointing=plan.checkpointing,
        offloaded_from=device if plan.activation_offload else None,
    )
    return tuple(notes)
