"""Optimizer offload: the optimiser's state in the host's memory, and its updates on the host's CPU (ZeRO-Offload).

What: masters of the weights and the optimiser's state lie in the host's memory. A gradient goes there on a stream of
its own as soon as the backward pass has made it final, one parameter at a time, and leaves the device; in an update of
several micro-batches gradients are summed on the device, and go in the last one. Under `optimizer_offload: gradients`
those of every micro-batch go, and the sum so far comes back to be added to. PyTorch's optimiser updates the masters on
all cores, some MiB at a time, and new weights go back while it updates the next ones. In precision bf16 the device has
bf16 weights alone and computes in bf16 throughout, as under shards (`stepping/bf16_weights.py`); masters, sums of
gradients and state are fp32. Same mathematics: only rounding differs from an update on the device.
Use when: the state does not fit on the device, whatever else is saved. Adam in fp32 takes 16 bytes a parameter there,
offloaded 4 and in bf16 2, and the gradients in flight (4 more while micro-batches are summed on the device).
Costs: 14 to 16 bytes of the host's memory a parameter, and as much again as a checkpoint has while one is written; an
update takes as long as the CPU's memory needs for some 40 bytes a parameter, and under `gradients` each micro-batch
after the first 8 bytes a parameter over the link. Only memory that copies go through is pinned.
Does not combine with: several processes (shards divide the state already); captured or compiled passes; fp16; averages
of weights, penalties on them, and gradual unfreezing, all of which need weights or gradients on the device;
optimisers that are not element by element.
Source: J. Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", arXiv:2101.06840, sections 4 and 5,
of which ours differs: the CPU's update is PyTorch's own, and never a step late.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Job, Optimizer
from stoker.jobs.freezing import Freeze
from stoker.jobs.optimizers import ScheduleFree
from stoker.loading.batches import Batch
from stoker.records import Plan
from stoker.records.plan import ALIGNED_BYTES, IN_FLIGHT_BYTES, PIECE, PINNED_BYTES, STAGED_BYTES
from stoker.stepping.bf16_weights import Bf16Weights
from stoker.stepping.distributed_tensors import buckets
from stoker.stepping.gradient_clipping import GradientClipping
from stoker.stepping.layouts.base import SingleProcess, Strategy
from stoker.stepping.loss_pass import LossPass
from stoker.stepping.model import in_dtype
from stoker.stepping.torch_optimizers import FLUSH_EVERY, flush_denormals
from stoker.stepping.update_rule import UpdateRule
from stoker.stepping.weight_averaging import ModelWeights


def offload_problem(job: Job) -> str | None:
    """Why the state of the job's optimiser cannot be on the host; None if it can."""
    optimizer = job.optimizer
    if job.step is not None:
        return "the job's own step calls its optimisers itself"
    if not isinstance(optimizer, Optimizer):
        return "the job's optimiser is its own, which may need all gradients at once, on their device"
    if not optimizer.is_elementwise or isinstance(optimizer, ScheduleFree):
        why = "keeps weights of its own on the device" if optimizer.is_elementwise else "multiplies whole matrices"
        return f"{type(optimizer).__name__} {why}; AdamW, SGD and others that go element by element can be offloaded"
    reasons = {
        "sites make updates of their own, and exchange weights on the device": job.sync is not None,
        "an average of the weights follows them on the device": job.average is not None,
        "a penalty on the weights adds to gradients that have left the device": job.objective.penalty is not None,
        "frozen layers thaw during the run": isinstance(job.freeze, Freeze) and job.freeze.is_gradual,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def require_offload(job: Job, plan: Plan) -> None:
    """Refuse an offloaded plan for a job whose state has to be on the device.

    Raises:
        BadJob: the plan is offloaded, and the job's optimiser cannot be.
    """
    if plan.is_offloaded and (problem := offload_problem(job)) is not None:
        raise BadJob(f"the plan has optimizer_offload, and {problem}", remedy="Use a plan without it.")


@dataclass(eq=False)
class _Offloaded:
    """A trained parameter on the device, its master on the host, and pinned memory for its way there and back.

    `gradient` is the part of that memory which this update's gradient arrives in, by the event `has_arrived`, in
    `sum_dtype`; None before it has left the device.
    """

    parameter: nn.Parameter
    master: nn.Parameter
    pinned: torch.Tensor
    sum_dtype: torch.dtype
    gradient: torch.Tensor | None = None
    has_arrived: Any = None

    @property
    def master_bytes(self) -> int:
        """Size of the master [bytes]."""
        return self.master.numel() * self.master.element_size()

    def pinned_as(self, dtype: torch.dtype) -> torch.Tensor:
        """The pinned memory as a tensor of the parameter's shape."""
        shape = self.parameter.shape
        return self.pinned[: shape.numel() * dtype.itemsize].view(dtype).view(shape)


class HostState:
    """Masters of a model's weights in the host's memory; its parameters go to the plan's device.

    Args:
        model: on the host; what its parameters hold is replaced in place, so that ties stay.
        plan: an offloaded one.
        dtype: of weights, for proofs; None leaves the model's own.
        sums_gradients: an update has several micro-batches.
    """

    def __init__(self, model: nn.Module, plan: Plan, dtype: torch.dtype | None, *, sums_gradients: bool) -> None:
        in_dtype(model, dtype)
        self.device, self._model, self._memory = torch.device(plan.device), model, _PinnedMemory()
        self.sends_all = plan.optimizer_offload == "gradients"
        """Whether gradients go to the host in every micro-batch, and are summed there."""
        self.stream = torch.cuda.Stream(self.device)
        """Copies in both directions, one after the other: pinned memory is not written before it was read."""
        is_bf16 = plan.precision == "bf16" and dtype is None
        if is_bf16:
            Bf16Weights(model)
        self.masters: dict[str, nn.Parameter] = {}
        """Trained and frozen weights by name, tied ones once, as the optimiser and checkpoints have them."""
        self.offloaded: list[_Offloaded] = []
        for name, parameter in model.named_parameters():
            held, is_cast = parameter.detach().cpu().contiguous(), is_bf16 and parameter.dtype == torch.float32
            if not is_cast and parameter.requires_grad:  # copies to the device are made from here
                held = self._memory.view(held.shape, held.dtype).copy_(held)
            self.masters[name] = nn.Parameter(held, requires_grad=parameter.requires_grad)
            self.masters[name].__dict__.update(parameter.__dict__)  # by which groups of the optimiser may choose
            parameter.data = held.to(self.device, torch.bfloat16 if is_cast else held.dtype)
            if parameter.requires_grad:
                self.offloaded.append(_Offloaded(parameter, self.masters[name], self._memory.take(0), held.dtype))
        self.sum_gradients(is_on=sums_gradients)
        most = max(STAGED_BYTES, *(_aligned(entry.master_bytes) for entry in self.offloaded))
        self._wide = torch.empty(most, dtype=torch.uint8)  # gradients in the masters' dtype

    def sum_gradients(self, *, is_on: bool) -> None:
        """Let gradients be of the masters' dtype, where several micro-batches are summed, or of the weights'.

        Those that are summed on the host are of the weights' dtype on the device.
        """
        for entry in self.offloaded:
            like = entry.master if is_on else entry.parameter
            entry.sum_dtype = like.dtype
            entry.parameter.grad_dtype = entry.parameter.dtype if self.sends_all else like.dtype
            if entry.pinned.numel() < (num_bytes := like.numel() * like.element_size()):
                entry.pinned = self._memory.take(num_bytes)

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's weights and buffers by name, weights as their masters."""
        masters = {id(p): self.masters[name].detach() for name, p in self._model.named_parameters()}
        state = self._model.state_dict(keep_vars=True)
        return {name: masters.get(id(tensor), tensor.detach()) for name, tensor in state.items()}

    @torch.no_grad()
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Put weights and buffers back, by name."""
        self._model.load_state_dict(dict(weights))
        for name, master in self.masters.items():
            master.copy_(weights[name])

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer, arrived: Sequence[_Offloaded], factor: float) -> None:
        """Make the optimiser's step on masters by `factor` times their gradients; the device then has the new weights.

        Args:
            optimizer: of the masters.
            arrived: parameters whose gradients have left the device, in that order.
            factor: of all gradients [1].
        """
        computing = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(computing)  # the rest of the backward pass may need a weight whose gradient is final
        for bucket in buckets(arrived, lambda entry: _aligned(entry.master_bytes), STAGED_BYTES):
            begin = 0
            for entry in bucket:
                assert entry.gradient is not None, "it has arrived"
                entry.has_arrived.synchronize()
                wide = self._wide[begin : begin + entry.master_bytes].view(entry.master.dtype).view(entry.master.shape)
                entry.master.grad = wide.copy_(entry.gradient)
                begin += _aligned(entry.master_bytes)
                if factor != 1:
                    wide.mul_(factor)
            optimizer.step()  # of those that have a gradient
            with torch.cuda.stream(self.stream):
                for entry in bucket:
                    entry.master.grad, sent = None, entry.master.detach()
                    if entry.parameter.dtype != sent.dtype:
                        sent = entry.pinned_as(entry.parameter.dtype).copy_(sent)
                    entry.parameter.copy_(sent, non_blocking=True)
        computing.wait_stream(self.stream)


class _PinnedMemory:
    """Pinned memory, cut from large pieces; never given back."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """So many bytes."""
        size = _aligned(num_bytes)
        if self._left.numel() < size:
            self._left = torch.empty(max(size, PINNED_BYTES), dtype=torch.uint8, pin_memory=True)
        taken, self._left = self._left[:num_bytes], self._left[size:]
        return taken

    def view(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor."""
        return self.take(shape.numel() * dtype.itemsize).view(dtype).view(shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


class OffloadedProcess(SingleProcess):
    """One process that sends gradients to the host as they become final; within `sending`, else as any other.

    `arrived` are the parameters whose gradients have left the device, in that order, `factor` is what those are to be
    multiplied by.
    """

    def __init__(self, model: nn.Module, host: HostState) -> None:
        super().__init__(model)
        self.host = host
        self.arrived: list[_Offloaded] = []
        self.factor = 1.0
        self._is_sending = self._is_final = False
        self._norms: dict[_Offloaded, torch.Tensor] = {}
        self._in_flight: deque[tuple[Any, torch.Tensor]] = deque()
        for entry in host.offloaded:
            entry.parameter.register_post_accumulate_grad_hook(functools.partial(self._accumulated, entry))

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Within the context, gradients go to the host; at its end the last one has left the device."""
        self.arrived, self.factor, self._is_final = [], 1.0, False
        self._norms.clear()
        for entry in self.host.offloaded:
            entry.gradient = None
        self._is_sending = True
        try:
            yield
            for entry in self.host.offloaded:
                if entry.parameter.grad is not None:  # of earlier micro-batches alone
                    self._send(entry)
        finally:
            self._is_sending = False
            torch.cuda.current_stream(self.host.device).wait_stream(self.host.stream)
            self._in_flight.clear()

    def before_backward(self, *, is_last: bool) -> None:
        """As `Strategy.before_backward`."""
        self._is_final = is_last

    def divide(self, parameters: Sequence[nn.Parameter], divisor: Any) -> None:
        """As `Strategy.divide`; what has left the device is divided on the host."""
        if not self._is_sending:
            super().divide(parameters, divisor)
            return
        count = float(divisor)
        self.factor = 1 / count if count else math.inf  # as the device divides by none

    def norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """As `Strategy.norm`; computed on the device, before gradients left it."""
        if not self._norms:
            return super().norm(parameters)
        whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(list(self._norms.values())))
        return whole * self.factor

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """As `Strategy.clip`."""
        if not self._norms:
            return super().clip(parameters, max_norm)
        norm = self.norm(parameters)
        self.factor *= min(1.0, max_norm / (float(norm) + 1e-6))
        return norm

    def _accumulated(self, entry: _Offloaded, _parameter: torch.Tensor) -> None:
        if self._is_sending and (self._is_final or self.host.sends_all):
            self._send(entry)

    @torch.no_grad()
    def _send(self, entry: _Offloaded) -> None:
        """Copy a gradient to the host, or add it to what is there of it; the device's memory is free after that."""
        gradient, entry.parameter.grad = entry.parameter.grad, None
        assert gradient is not None
        computing, stream = torch.cuda.current_stream(self.host.device), self.host.stream
        held = gradient.nbytes + sum(other.nbytes for _, other in self._in_flight)
        while self._in_flight and held > IN_FLIGHT_BYTES:
            has_left, left = self._in_flight.popleft()
            computing.wait_event(has_left)
            held -= left.nbytes
        stream.wait_stream(computing)
        has_some, norms = entry.gradient is not None, []
        entry.gradient = entry.pinned_as(entry.sum_dtype)
        with torch.cuda.stream(stream):
            pieces = zip(*(tensor.view(-1).split(PIECE) for tensor in (gradient, entry.gradient)), strict=True)
            for piece, there in pieces:
                total = piece.to(there.dtype)
                if has_some:
                    total = total.add_(there.to(self.host.device, non_blocking=True))
                norms.append(torch.linalg.vector_norm(total, dtype=torch.promote_types(total.dtype, torch.float32)))
                there.copy_(total, non_blocking=True)
            self._norms[entry] = torch.linalg.vector_norm(torch.stack(norms))
            entry.has_arrived = stream.record_event()
        if not has_some:
            self.arrived.append(entry)
        self._in_flight.append((entry.has_arrived, gradient))


class OffloadedUpdate(UpdateRule):
    """An update by the optimiser of the host's masters, in the order of the contract."""

    def __init__(
        self,
        loss_pass: LossPass,
        clipping: GradientClipping,
        optimizer: torch.optim.Optimizer,
        process: OffloadedProcess,
    ) -> None:
        self._pass, self._clipping, self._optimizer, self._process = loss_pass, clipping, optimizer, process

    def __call__(self, batch: Batch, update: int) -> torch.Tensor:
        """As `UpdateRule`."""
        self.is_moving = False
        process = self._process
        with process.sending():
            loss = self._pass.gradients(batch, update)  # accumulated; divided on the host
        self._clipping(loss, update)
        self.is_moving = True
        process.host.update(self._optimizer, process.arrived, process.factor)
        if update % FLUSH_EVERY == FLUSH_EVERY - 1:
            flush_denormals(self._optimizer)
        return loss


class MasterWeights(ModelWeights):
    """The host's masters of the model's weights."""

    def __init__(self, model: nn.Module, host: HostState) -> None:
        super().__init__(model)
        self._host = host

    def weights(self) -> dict[str, torch.Tensor]:
        """As `SavedWeights`."""
        return self._host.weights()

    def whole(self, strategy: Strategy) -> dict[str, torch.Tensor]:
        """As `SavedWeights`."""
        return self._host.weights()
