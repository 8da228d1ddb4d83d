"""What makes two devices the same device, as far as measured speed goes."""

from __future__ import annotations

import re

from stoker.records import Device, digest


def cache_key(device: Device, torch_version: str) -> str:
    """Name under which measurements of `device` are kept, fit for a file name: `cuda-nvidia-h200-1f2e3d4c5b6a`.

    It changes with the model, which of several GPUs it is, usable cores, fast dtypes, driver and PyTorch; not with the
    bytes of memory, which differ from boot to boot. Two machines with one home directory and the same CPU model share
    a key: virtual machines whose model is a family name may really differ.

    Args:
        device: what was measured.
        torch_version: as `torch.__version__` gives it, build suffix included.
    """
    speed = [
        device.kind,
        device.index,
        device.model,
        device.cores,
        list(device.fast_dtypes),
        device.driver,
        torch_version,
    ]
    slug = re.sub(r"[^a-z0-9]+", "-", device.model.lower()).strip("-")[:48] or "unknown"
    return f"{device.kind}-{slug}-{digest(speed)[:12]}"
