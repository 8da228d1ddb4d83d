"""Figures for forecasts: of a device, attached or of the catalogue; and how often it fails, and what that costs.

Failures: the interval between checkpoints that loses the least time, given how long one blocks training and how often
devices fail (Young's first order with Daly's correction); and the time that failures are expected to cost. Assumes
independent failures at one rate, each of which costs the work of all devices since the last checkpoint.
Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9),
1974, https://doi.org/10.1145/361147.361115; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", Future Generation Computer Systems 22(3), 2006, https://doi.org/10.1016/j.future.2004.11.016, equations
20 and 37; "The Llama 3 Herd of Models", 2024, https://arxiv.org/abs/2407.21783, section 3.3.4.
"""

from __future__ import annotations

import math
import re

from stoker.devices.catalogue import Catalogue, CatalogueEntry, catalogue
from stoker.devices.detection import fast_dtypes_of_capability
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
    return Hardware(
        device=device,
        dense_flops={},
        bandwidth_bytes_per_s=None,
        multiprocessors=counted,
        compute_capability=device.compute_capability or None,
    )


def with_similar_figures(hardware: Hardware, known: Catalogue | None = None) -> tuple[Hardware, CatalogueEntry] | None:
    """The figures of the GPU most like an attached one that the catalogue lacks: of its compute capability, in memory.

    The device stays itself, with its own memory. None if no GPU has its capability, or the catalogue has the device.
    """
    device, entries = hardware.device, (catalogue() if known is None else known).entries
    same_capability = [
        entry
        for entry in entries
        if device.compute_capability and entry.compute_capability == device.compute_capability
    ]
    if hardware.dense_flops or not same_capability:
        return None
    nearest = min(
        same_capability, key=lambda entry: abs(math.log(entry.usable_memory_bytes / max(1, device.memory_bytes)))
    )
    return _figures(device, nearest), nearest


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
        name=entry.name,
        kind=entry.kind,
        model=entry.driver_names[0] if entry.driver_names else entry.title,
        cores=cores,
        memory_bytes=entry.usable_memory_bytes,
        fast_dtypes=fast_dtypes,
    )


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


MTBF_H = {"cuda": 16_384 * 54 * 24 / 419, "cpu": 24.0}
"""Mean time between failures of one device [h], by kind. GPUs: 419 unexpected interruptions of Llama 3's training in 54
days on 16,384 of them, of any cause. CPUs, often a personal machine: one a day is assumed."""

LEAST_INTERVAL_S = 30.0
"""Shortest interval between checkpoints [s]."""

RESTART_S, MACHINES_RESTART_S, PREEMPTED_S = 60.0, 300.0, 900.0
"""Time from a failure until training goes on [s], without reading the state back: processes of one machine; of several,
where the failure is noticed, the machine replaced or left out, and all processes meet again; and after a machine was
taken away, until another is found and started. Judgements: Z. Jiang et al., "MegaScale", NSDI 2024, section 6.3, notice
and diagnose failures of large runs in less than 10 minutes, automatically; links time out after 10 minutes in NCCL."""

_HOPELESS = 50.0
"""Mean times between failures in one interval from which a run is taken never to end."""

CHEAP_SHARE = 1e-3
"""Share of the time that checkpoints may block training [0 to 1]: up to it, they are saved more often than the failure
rate requires, because other failures happen too."""


def mtbf_h(kind: str, given_h: float | None = None) -> float:
    """Mean time between failures of a device of this kind [h]: the given one, or the default.

    >>> round(mtbf_h("cuda"), -2), mtbf_h("cpu"), mtbf_h("cuda", 100.0)
    (50700.0, 24.0, 100.0)
    """
    return MTBF_H[kind] if given_h is None else given_h


def restart_s(devices: int, machine_devices: int) -> float:
    """Time until `devices` go on after one of them failed [s], by whether they stand in one machine.

    >>> restart_s(8, 8), restart_s(16, 8)
    (60.0, 300.0)
    """
    return RESTART_S if devices <= machine_devices else MACHINES_RESTART_S


def daly_interval_s(blocked_s: float, mtbf_s: float) -> float:
    """The interval between checkpoints that loses the least time [s].

    >>> round(daly_interval_s(1.0, 99 * 3600.0))  # 512 GPUs at Llama 3's rate
    844

    Args:
        blocked_s: time that one checkpoint blocks training [s].
        mtbf_s: mean time between failures of the whole run [s].
    """
    if blocked_s >= 2 * mtbf_s:
        return mtbf_s
    share = blocked_s / (2 * mtbf_s)
    return math.sqrt(2 * blocked_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - blocked_s


def checkpoint_interval_s(blocked_s: float, write_s: float, mtbf_s: float) -> float:
    """Time between checkpoints [s], in whole seconds.

    It is `daly_interval_s`, or less if that is cheap (CHEAP_SHARE); at least LEAST_INTERVAL_S and the time that writing
    takes during training, since the next checkpoint would wait for it.

    >>> checkpoint_interval_s(2e-3, 0.04, 24 * 3600.0), checkpoint_interval_s(1.0, 50.0, 6337 * 3600.0)
    (30.0, 1000.0)
    """
    least = max(LEAST_INTERVAL_S, write_s)
    return float(round(max(least, min(daly_interval_s(blocked_s, mtbf_s), blocked_s / CHEAP_SHARE))))


def lost_s(run_s: float, interval_s: float, restart_s: float, mtbf_s: float) -> float:
    """Expected cost of failures in a run of `run_s` [s]: work done again, and restarts, during which more may fail.

    For rare failures it is, for each of them, half an interval's work and the restart. Infinite where failures come
    so fast that an interval is hardly ever finished.

    >>> round(lost_s(1e6, 1000.0, 100.0, 1e6)), lost_s(1e6, 1e5, 100.0, 10.0)
    (600, inf)
    """
    exponent = interval_s / mtbf_s
    if exponent + restart_s / mtbf_s > _HOPELESS:
        return math.inf
    expected_s = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent) / interval_s
    return run_s * (expected_s - 1)
