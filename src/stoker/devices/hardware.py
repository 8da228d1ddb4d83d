"""Figures for forecasts, for an attached device or one of the catalogue; and the cache key of measurements."""

from __future__ import annotations

import re

from stoker.devices.catalogue import Catalogue, CatalogueEntry, catalogue
from stoker.devices.nvidia import fast_dtypes_of_capability
from stoker.errors import NoDevice
from stoker.records import Device, Hardware, digest
from stoker.units import MIB

_REDUCED = ("bf16", "fp16", "int8")


def hardware_of(device: Device | CatalogueEntry, known: Catalogue | None = None) -> Hardware:
    """A device's figures for forecasts; unknown ones are None or left out.

    If this process may use only some cores of a CPU, rates and watts are the cores' share; the memory bandwidth, shared
    with neighbours, is then unknown. The caller fills in `Hardware.benchmark`.

    Args:
        device: an attached device, looked up by its driver's name, or an entry of the catalogue.
        known: the catalogue; the user's if None.

    Raises:
        NoDevice: there is no time model for the entry; see `CatalogueEntry.can_be_planned`.
    """
    if isinstance(device, CatalogueEntry):
        return _figures(device_of(device), device)
    entry = (catalogue() if known is None else known).called(device.model)
    if entry is not None:
        return _figures(device, entry)
    counted = device.cores if device.kind == "cuda" and device.cores else None
    return Hardware(device=device, dense_flops={}, bandwidth_bytes_per_s=None, multiprocessors=counted)


def device_of(entry: CatalogueEntry) -> Device:
    """The device to plan for if an entry's model is not attached; its memory is `usable_memory_bytes`.

    Raises:
        NoDevice: there is no time model for it.
    """
    if entry.kind == "cuda":
        cores, fast_dtypes = entry.multiprocessors or 0, fast_dtypes_of_capability(entry.compute_capability or "")
    elif entry.kind == "cpu":
        cores = entry.cores or 1
        fast_dtypes = ("fp32", *(dtype for dtype in _REDUCED if dtype in entry.dense_flops))
    else:
        vendor = "AMD's GPUs" if entry.kind == "rocm" else "TPUs"
        raise NoDevice(
            f"{entry.title} cannot be planned for: there is no time model for {vendor} yet.",
            remedy=f"`stoker devices {entry.name}` shows what is known of it.",
        )
    return Device(
        name=entry.name, kind=entry.kind, model=entry.driver_names[0] if entry.driver_names else entry.title,
        cores=cores, memory_bytes=entry.usable_memory_bytes, fast_dtypes=fast_dtypes,
    )  # fmt: skip


def _figures(device: Device, entry: CatalogueEntry) -> Hardware:
    """An entry's figures for a device of that model, scaled to its usable cores."""
    share = min(1.0, device.cores / entry.cores) if entry.cores else 1.0
    is_whole = share == 1.0
    power, idle, l2, pcie = (entry.value(name) for name in ("power_w", "idle_w", "l2_mib", "pcie_gb_per_s"))
    return Hardware(
        device=device,
        dense_flops={dtype: rate * share for dtype, rate in entry.dense_flops.items()},
        bandwidth_bytes_per_s=entry.bandwidth_bytes_per_s if is_whole else None,
        multiprocessors=entry.multiprocessors,
        compute_capability=entry.compute_capability,
        l2_bytes=int(l2 * MIB) if l2 is not None and is_whole else None,
        power_w=None if power is None else power * share,
        idle_w=None if idle is None else idle * share,
        host_link_bytes_per_s=None if pcie is None else pcie * 1e9,
    )


def cache_key(device: Device, torch_version: str) -> str:
    """Key of the measurements of `device`, usable as a file name: `cuda-nvidia-h200-1f2e3d4c5b6a`.

    It depends on the model, the GPU's index, usable cores, fast dtypes, driver and PyTorch; not on the bytes of memory,
    which differ from boot to boot. Machines with one home directory and the same CPU model share a key, although
    virtual machines whose model is a family name may differ.

    Args:
        device: the measured device.
        torch_version: `torch.__version__`, including the build suffix.
    """
    speed = [device.kind, device.index, device.model, device.cores, list(device.fast_dtypes), device.driver,
             torch_version]  # fmt: skip
    slug = re.sub(r"[^a-z0-9]+", "-", device.model.lower()).strip("-")[:48] or "unknown"
    return f"{device.kind}-{slug}-{digest(speed)[:12]}"
