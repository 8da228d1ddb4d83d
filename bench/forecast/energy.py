"""The energy a GPU has used since its driver was loaded, from NVML's own counter.

Source: NVML API reference, nvmlDeviceGetTotalEnergyConsumption (Volta and newer) [mJ]. Called through ctypes, since
the library comes with the driver and a Python package for it may be missing.
"""

from __future__ import annotations

import ctypes
from typing import Self

import torch


class EnergyCounter:
    """Joules of one GPU, counted by its driver."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    @classmethod
    def of_gpu(cls, index: int) -> Self | None:
        """The counter of the GPU that PyTorch numbers `index`; None where there is none."""
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return None
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}".encode()
        handle = ctypes.c_void_p()
        if library.nvmlInit_v2() != 0 or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) != 0:
            return None
        counter = cls(library, handle)
        return counter if counter._read() is not None else None

    def joules(self) -> float:
        """Energy so far [J]; only differences mean something."""
        found = self._read()
        if found is None:
            raise OSError("NVML stopped counting energy")
        return found

    def _read(self) -> float | None:
        millijoules = ctypes.c_ulonglong()
        if self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules)) != 0:
            return None
        return millijoules.value / 1e3
