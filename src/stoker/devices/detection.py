"""The devices attached to this machine, best first; and the installed PyTorch, found without importing it.

NVIDIA GPUs are found by one call of `nvidia-smi`. Assumed and not checked: `nvidia-smi` numbers GPUs by PCI bus, CUDA
by default fastest first; the two agree if all GPUs are of one model, or if CUDA_DEVICE_ORDER=PCI_BUS_ID. Slices of a
GPU (MIG) are left out.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stoker.devices.catalogue import Catalogue, catalogue
from stoker.devices.cpu import attached_cpu
from stoker.records import Device
from stoker.units import MIB


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


_FIELDS = ("index", "uuid", "name", "memory.total", "compute_cap", "driver_version")
QUERY = ("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
"""The command. `compute_cap` needs a driver of 2021 or later, as does every CUDA build of PyTorch >= 2.11."""

TIMEOUT_S = 10.0

_DTYPES_FROM_CAPABILITY: tuple[tuple[tuple[int, int], str], ...] = (
    ((8, 0), "tf32"),
    ((8, 0), "bf16"),
    ((7, 0), "fp16"),
    ((8, 9), "fp8"),
    ((7, 2), "int8"),
)
"""The compute capability from which matrix units multiply a dtype. Source: CUDA C++ Programming Guide, "Compute
Capabilities", table of data types supported by tensor cores."""


@dataclass(frozen=True)
class GpuAnswer:
    """The output of `nvidia-smi`: its table, or the problem; neither if the program is absent."""

    table: str = ""
    problem: str | None = None


def ask_nvidia_smi(command: Sequence[str] = QUERY, timeout_s: float = TIMEOUT_S) -> GpuAnswer:
    """Run `nvidia-smi` once; a machine without the program has no GPUs, which is not a problem."""
    if shutil.which(command[0]) is None:
        return GpuAnswer()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return GpuAnswer(problem=f"nvidia-smi did not answer within {timeout_s:g} s: GPUs are left out.")
    except OSError as problem:
        return GpuAnswer(problem=f"nvidia-smi could not be started ({problem}): GPUs are left out.")
    if done.returncode != 0:
        said = " ".join((done.stdout + done.stderr).split()) or "no message"
        return GpuAnswer(problem=f"nvidia-smi failed with exit code {done.returncode}: {said}. GPUs are left out.")
    return GpuAnswer(table=done.stdout)


def describe_gpus(table: str, visible: str | None = None) -> tuple[Device, ...]:
    """The GPUs of a table of `QUERY`, as CUDA will number them in this process.

    Args:
        table: lines of `index, uuid, name, memory [MiB], compute capability, driver`; a line that does not begin
            with a number is a message and not a GPU.
        visible: value of CUDA_VISIBLE_DEVICES; None if not set.

    Returns:
        Devices in CUDA's order. `cores` counts multiprocessors, 0 if the catalogue does not have the model;
        `memory_bytes` is 0 if the driver does not say.
    """
    known = catalogue()
    gpus = [
        _describe_gpu([cell.strip() for cell in row], known)
        for row in csv.reader(table.splitlines(), skipinitialspace=True)
        if len(row) == len(_FIELDS) and row[0].strip().isdigit()
    ]
    chosen = _visible(gpus, visible)
    return tuple(replace(device, name=f"cuda:{i}", index=i) for i, device in enumerate(chosen))


def attached_gpus() -> tuple[tuple[Device, ...], str | None]:
    """The NVIDIA GPUs of this machine that CUDA shows to this process, and the problem, if any."""
    answer, visible = ask_nvidia_smi(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return describe_gpus(answer.table, visible), answer.problem or slice_problem(visible)


def slice_problem(visible: str | None) -> str | None:
    """The problem with a value of CUDA_VISIBLE_DEVICES that names slices of GPUs (MIG); None if it names none.

    >>> slice_problem("0,1")
    """
    slices = [word.strip() for word in (visible or "").split(",") if word.strip().startswith("MIG-")]
    if not slices:
        return None
    return (
        f"CUDA_VISIBLE_DEVICES names a slice of a GPU ({slices[0]}): slices are left out; ask for a whole GPU, "
        "by its number or GPU-…."
    )


def fast_dtypes_of_capability(capability: str) -> tuple[str, ...]:
    """The dtypes that GPUs of a compute capability such as `9.0` multiply in matrix units, and fp32.

    >>> fast_dtypes_of_capability("7.5")
    ('fp32', 'fp16', 'int8')
    """
    has = _capability_numbers(capability)
    return ("fp32", *(dtype for needs, dtype in _DTYPES_FROM_CAPABILITY if has and has >= needs))


def _capability_numbers(capability: str) -> tuple[int, int] | None:
    """`8.9` as (8, 9); None for a text such as `[N/A]`."""
    major, _, minor = capability.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _describe_gpu(row: list[str], known: Catalogue) -> tuple[str, Device]:
    """One row as (UUID, device)."""
    index, uuid, model, memory_mib, capability, driver = row
    device = Device(
        name=f"cuda:{index}",
        kind="cuda",
        index=int(index),
        model=model,
        cores=0,
        memory_bytes=int(memory_mib) * MIB if memory_mib.isdigit() else 0,
        fast_dtypes=fast_dtypes_of_capability(capability),
        driver=driver,
        compute_capability=capability if _capability_numbers(capability) else "",
    )
    entry = known.describing(device)
    return uuid, device if entry is None else replace(device, cores=entry.multiprocessors or 0)


def _visible(gpus: list[tuple[str, Device]], visible: str | None) -> list[Device]:
    """The GPUs that CUDA shows, in its order; as in CUDA, the list ends at the first entry that names no GPU.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    if visible is None:
        return [device for _, device in gpus]
    shown: list[Device] = []
    for word in (part.strip() for part in visible.split(",")):
        named = [g for uuid, g in gpus if (word == str(g.index)) or (word.startswith("GPU-") and uuid.startswith(word))]
        if len(named) != 1 or named[0] in shown:
            break
        shown.append(named[0])
    return shown
