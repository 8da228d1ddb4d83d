"""The devices attached to this machine, best first; and the installed PyTorch, found without importing it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.devices.cpu import attached_cpu
from stoker.devices.nvidia import attached_gpus
from stoker.records import Device


@dataclass(frozen=True)
class TorchBuild:
    """An installed PyTorch: its version, and the CUDA release it was built for (None for a build without CUDA)."""

    version: str
    cuda: str | None

    def __str__(self) -> str:
        """Version and CUDA release: `2.13.0+cpu (no CUDA)`."""
        return f"{self.version} ({f'CUDA {self.cuda}' if self.cuda else 'no CUDA'})"


def installed_torch() -> TorchBuild | None:
    """The PyTorch that `import torch` would load; None if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        return parse_torch_version(Path(spec.origin).with_name("version.py").read_text())
    except OSError:
        return None


def parse_torch_version(text: str) -> TorchBuild | None:
    r"""The build in the text of PyTorch's own `torch/version.py`; None if it has no version.

    >>> parse_torch_version("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'")
    TorchBuild(version='2.13.0+cu130', cuda='13.0')
    """
    version = re.search(r"^__version__\s*(?::[^=]*)?=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\s*(?::[^=]*)?=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return TorchBuild(version.group(1), cuda.group(1) if cuda else None) if version else None


@dataclass(frozen=True)
class DeviceSurvey:
    """The devices of a machine, best first, and problems with using or finding more."""

    devices: tuple[Device, ...]
    problems: tuple[str, ...] = ()

    @property
    def usable(self) -> tuple[Device, ...]:
        """The devices that PyTorch can use: the CPU, and the GPUs before it."""
        kinds = [device.kind for device in self.devices]
        return self.devices[: kinds.index("cpu") + 1]


def attached_devices() -> tuple[Device, ...]:
    """The devices of this machine, best first: GPUs that PyTorch can use, the CPU, GPUs that it cannot use."""
    return survey().devices


def survey() -> DeviceSurvey:
    """Survey this machine, by at most one call of `nvidia-smi` and files of the kernel."""
    gpus, problem = attached_gpus()
    return rank(attached_cpu(), gpus, installed_torch(), problem)


def rank(cpu: Device, gpus: Sequence[Device], torch: TorchBuild | None, problem: str | None = None) -> DeviceSurvey:
    """Order devices by preference for a job.

    Args:
        cpu: the CPU.
        gpus: GPUs in CUDA's order, which is kept.
        torch: the installed PyTorch; without CUDA, GPUs come after the CPU, because no job can run on them.
        problem: a problem with finding GPUs.
    """
    problems: tuple[str, ...] = (problem,) if problem else ()
    if not gpus:
        return DeviceSurvey((cpu,), problems)
    if torch is not None and torch.cuda is None:
        seen = f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''} ({gpus[0].model})"
        problems += (f"PyTorch {torch} cannot use {seen}: install a CUDA build of PyTorch.",)
        return DeviceSurvey((cpu, *gpus), problems)
    return DeviceSurvey((*gpus, cpu), problems)
