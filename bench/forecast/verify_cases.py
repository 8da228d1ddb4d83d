"""Which jobs are verified on a device, under which plans, and how near to the limit of its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from bench.forecast.jobs import JOBS, Size
from stoker.jobs import Job
from stoker.records import Plan, Precision
from stoker.stepping.activation_checkpointing import num_blocks
from stoker.stepping.model import meta_model

COMPILED = ("cnn", "gpt", "mlp", "vit")
"""Jobs that are compiled as well: one for each family of kernels."""

COMPILED_FIRST = "gpt"
"""The job whose compiled plan is measured before the other jobs'."""

IN_TF32 = ("cnn", "gpt", "mlp")

NEAR_THE_LIMIT = ("cnn", "gpt", "encoder", "unet")
"""Jobs that are tried with less and less memory."""

SHARES_OF_RESERVED = (0.94, 0.98, 1.0, 1.02, 1.06, 1.12)
"""Memory given in those trials, as a share of what is forecast to be reserved."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job under a plan."""

    schema: ClassVar[int] = 1
    job: str
    size: Size
    plan: Plan

    def in_words(self) -> str:
        """`gpt: bf16 · micro-batch 16 · …`."""
        return f"{self.job}: {self.plan.in_words()}"


def cases(size: Size, device: str) -> list[Case]:
    """Job x plan pairs for a device as PyTorch calls it; on a CPU those that it can do without a compiler."""
    return [Case(job=name, size=size, plan=plan) for name in JOBS[size] for plan in _plans(name, size, device)]


def _plans(name: str, size: Size, device: str) -> Iterator[Plan]:
    job = JOBS[size][name]()
    model = meta_model(job)
    has_images = any(type(module).__name__ == "Conv2d" for module in model.modules())
    plain = Plan(device=device, micro_batch=job.batch)
    fast = replace(
        plain,
        precision="bf16",
        optimizer_implementation="fused",
        memory_format="channels_last" if has_images else "contiguous",
    )
    yield plain
    yield fast
    yield replace(fast, micro_batch=_quarter(job))
    if has_images:
        yield replace(fast, memory_format="contiguous")
    if blocks := num_blocks(model):
        yield replace(fast, checkpointed_blocks=blocks, optimizer_implementation="foreach")
    if device != "cpu":
        yield from _of_gpus(name, plain, fast)


def _of_gpus(name: str, plain: Plan, fast: Plan) -> Iterator[Plan]:
    if name in IN_TF32:
        tf32: Precision = "tf32"
        yield replace(plain, precision=tf32)
    if name in COMPILED:
        yield replace(fast, compile=True)


def _quarter(job: Job) -> int:
    """A quarter of the batch: of a coupled job, one group."""
    return job.coupling_group or job.batch // 4
