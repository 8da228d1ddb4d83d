"""What is attached to this machine, best first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.devices.cpu import attached_cpu
from stoker.devices.nvidia import attached_gpus
from stoker.devices.torch_build import TorchBuild, installed_torch
from stoker.records import Device


@dataclass(frozen=True)
class Survey:
    """The devices of a machine, best first, and what stood in the way of using or seeing more, in words."""

    devices: tuple[Device, ...]
    problems: tuple[str, ...] = ()

    @property
    def usable(self) -> tuple[Device, ...]:
        """Those that PyTorch can use: the CPU, and the GPUs before it."""
        kinds = [device.kind for device in self.devices]
        return self.devices[: kinds.index("cpu") + 1]


def attached_devices() -> tuple[Device, ...]:
    """The devices of this machine, best first: GPUs that PyTorch can use, the CPU, GPUs that it cannot use."""
    return survey().devices


def survey() -> Survey:
    """Look at this machine: at most one call of `nvidia-smi`, otherwise files of the kernel's."""
    gpus, problem = attached_gpus()
    return rank(attached_cpu(), gpus, installed_torch(), problem)


def rank(cpu: Device, gpus: Sequence[Device], torch: TorchBuild | None, problem: str | None = None) -> Survey:
    """Put devices in the order in which a job would want them.

    Args:
        cpu: the CPU.
        gpus: GPUs in CUDA's order, which is kept.
        torch: the installed PyTorch; without CUDA in it, GPUs come after the CPU, because no job could run on them.
        problem: what went wrong in looking for GPUs.
    """
    problems: tuple[str, ...] = (problem,) if problem else ()
    if not gpus:
        return Survey((cpu,), problems)
    if torch is not None and torch.cuda is None:
        seen = f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''} ({gpus[0].model})"
        problems += (f"PyTorch {torch} cannot use {seen}: install a CUDA build of PyTorch.",)
        return Survey((cpu, *gpus), problems)
    return Survey((*gpus, cpu), problems)
