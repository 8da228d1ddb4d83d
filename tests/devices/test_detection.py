from __future__ import annotations

import subprocess
import sys

import pytest

from stoker.devices import TorchBuild, attached_devices, installed_torch
from stoker.devices.detection import parse_torch_version, rank
from stoker.records import Device

CPU = Device(name="cpu", kind="cpu", model="AMD EPYC", cores=2, memory_bytes=2**34, fast_dtypes=("fp32",))
GPU = Device(
    name="cuda:0", kind="cuda", model="NVIDIA L4", cores=58, memory_bytes=23034 * 2**20, fast_dtypes=("fp32", "bf16")
)


def test_gpus_come_first_where_pytorch_can_use_them():
    """`here` is the best device a job can run on."""
    survey = rank(CPU, [GPU], TorchBuild("2.13.0+cu130", "13.0"))
    assert survey.devices == survey.usable == (GPU, CPU)
    assert rank(CPU, [], TorchBuild("2.13.0+cpu", None)).devices == (CPU,)


def test_gpus_pytorch_cannot_use_come_last_and_are_named():
    """With a CPU build a GPU is shown, never chosen, and the remedy is reported."""
    survey = rank(CPU, [GPU, GPU], TorchBuild("2.13.0+cpu", None))
    assert survey.devices == (CPU, GPU, GPU)
    assert survey.usable == (CPU,)
    assert len(survey.problems) == 1
    assert "2 GPUs (NVIDIA L4)" in survey.problems[0]
    assert "2.13.0+cpu" in survey.problems[0]
    assert "CUDA build" in survey.problems[0]


def test_problems_of_looking_are_kept():
    """A failed nvidia-smi is reported though the CPU is all there is."""
    assert rank(CPU, [], None, "nvidia-smi failed").problems == ("nvidia-smi failed",)


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", TorchBuild("2.13.0+cpu", None)),
        ("__version__ = '2.11.0'\ndebug = False\ncuda: Optional[str] = '12.6'\n", TorchBuild("2.11.0", "12.6")),
        ("cuda = '12.6'\n", None),
    ],
)
def test_build_is_read_from_the_text_of_the_version_file(text, build):
    """The version and the CUDA release are read without running the file."""
    assert parse_torch_version(text) == build


def test_installed_torch_is_what_import_gives():
    """Reading without importing gives the same as importing."""
    import torch

    build = installed_torch()
    assert (build.version, build.cuda) == (torch.__version__, torch.version.cuda)


def test_this_machine_has_a_cpu():
    """The survey of any machine ends with something a job can run on."""
    assert "cpu" in {device.kind for device in attached_devices()}


def test_devices_never_import_torch():
    """Describing the machine and the installed PyTorch leaves torch unloaded."""
    code = (
        "import sys, stoker.devices as d; d.survey(); d.installed_torch(); d.catalogue(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
