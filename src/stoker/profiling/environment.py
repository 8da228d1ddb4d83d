"""The determinism class of a run: all that must be equal for two runs to be bit-equal."""

from __future__ import annotations

import os
import platform
import sys

import numpy as np
import torch

from stoker.records import Device, Environment, Plan

_FLAGS = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG")


def environment(device: Device, plan: Plan) -> Environment:
    """The determinism class of a run of `plan` on `device` in this process."""
    flags = {name: os.environ[name] for name in _FLAGS if name in os.environ}
    return Environment(
        device_model=device.model,
        device_kind=device.kind,
        threads=plan.threads,
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        platform=f"{sys.platform}-{platform.machine()}",
        libraries={"numpy": np.__version__, "cuda": str(torch.version.cuda), "driver": device.driver},
        flags={
            **flags,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
            "matmul_precision": torch.get_float32_matmul_precision(),
        },
    )
