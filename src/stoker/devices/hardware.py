"""Figures for forecasts: of a device, attached or of the catalogue; of its links; and how often it fails.

Links: costs of collectives between devices of a model, from the catalogue's figures, by the formulas of rings. In a
ring over n devices each sends to the next: an all-reduce moves 2 (n-1)/n of the tensor through every link in 2 (n-1)
steps, an all-gather and a reduce-scatter (n-1)/n in n-1, as does an all-to-all.
Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH",
International Journal of High Performance Computing Applications 19(1), 2005, sections 4.1 to 4.5; NVIDIA's nccl-tests,
doc/PERFORMANCE.md. Trees and in-network reductions (NVLink SHARP) are faster for short or long messages; the interval
covers them. The share of the datasheet's rate that links reach, and start-up times, are estimates, not measured.

Failures: the interval between checkpoints that loses the least time, given how long one blocks training and how often
devices fail (Young's first order with Daly's correction); and the time that failures are expected to cost. Assumes
independent failures at one rate, each of which costs the work of all devices since the last checkpoint.
Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9),
1974, https://doi.org/10.1145/361147.361115; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", Future Generation Computer Systems 22(3), 2006, https://doi.org/10.1016/j.future.2004.11.016, equation
37; "The Llama 3 Herd of Models", 2024, https://arxiv.org/abs/2407.21783, section 3.3.4.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from stoker.devices.catalogue import Catalogue, CatalogueEntry, catalogue
from stoker.devices.detection import fast_dtypes_of_capability
from stoker.errors import NoDevice
from stoker.records import Device, Hardware, digest
from stoker.records.hardware import LinkCost, Links
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


MTBF_H = {"cuda": 16_384 * 54 * 24 / 419, "cpu": 24.0}
"""Mean time between failures of one device [h], by kind. GPUs: 419 unexpected interruptions of Llama 3's training in 54
days on 16,384 of them, of any cause. CPUs, often a personal machine: one a day is assumed."""

LEAST_INTERVAL_S = 30.0
"""Shortest interval between checkpoints [s]."""

CHEAP_SHARE = 1e-3
"""Share of the time that checkpoints may block training [0 to 1]: up to it, they are saved more often than the failure
rate requires, because other failures happen too."""


def mtbf_h(kind: str, given_h: float | None = None) -> float:
    """Mean time between failures of a device of this kind [h]: the given one, or the default.

    >>> round(mtbf_h("cuda"), -2), mtbf_h("cpu"), mtbf_h("cuda", 100.0)
    (50700.0, 24.0, 100.0)
    """
    return MTBF_H[kind] if given_h is None else given_h


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
    """Expected cost of failures in a run of `run_s` [s]: for each, half an interval's work and the restart."""
    return run_s / mtbf_s * (interval_s / 2 + restart_s)


NODE_DEVICES = 8
"""Number of devices in a node, as in NVIDIA's HGX and DGX servers since 2017."""

_START_S = 1e-5
"""Time until a collective's kernel runs on all devices of a node [s]."""
_OVERLAP = 0.9
"""Share of a collective that overlaps with arithmetic [0 to 1]: its copies take a few multiprocessors."""
_USUAL_PCIE = 15.75
"""Default rate of PCI Express, one way [GB/s]: 3.0 x16."""
_NETWORK_GB_PER_S = 12.5
"""Default rate between nodes for each device [GB/s]: 100 Gbit/s, a tenth of the best clusters'."""
_BRIDGED = 2
"""Number of devices joined by a bridge."""


@dataclass(frozen=True)
class Wire:
    """A link between neighbours: rate one way [bytes/s], time of a step [s], and uncertainty (a factor).

    `pooled` counts the network cards that carry a ring from one node to the next: NCCL opens a ring over each. Data
    from one device to another, or to all others, goes through its own card.
    """

    name: str
    bytes_per_s: float
    hop_s: float
    spread: float
    note: str = ""
    pooled: int = 1


def catalogue_links(entry: CatalogueEntry | None, size: int, stride: int = 1) -> Links:
    """The links between `size` devices of a model.

    Args:
        entry: the model; None if not known.
        size: number of devices, at least 1.
        stride: distance between neighbours in the order of all devices, `NODE_DEVICES` of which are a node.
    """
    wire = _wire(entry, size, stride)
    return Links(
        name=wire.name, world_size=size, costs=ring_costs(wire, size),
        basis="unknown" if wire.note else "datasheet", spread=wire.spread, overlap=_OVERLAP, note=wire.note,
    )  # fmt: skip


def ring_costs(wire: Wire, size: int) -> tuple[LinkCost, ...]:
    """Costs of collectives over a ring of `size` devices; see this module for the source."""
    steps, share = size - 1, (size - 1) / size
    own_s = 1 / wire.bytes_per_s
    once_s = own_s / wire.pooled
    half_s = _START_S + steps * wire.hop_s if steps else 0.0
    return (
        LinkCost(collective="all-reduce", alpha_s=half_s + steps * wire.hop_s, beta_s_per_byte=2 * share * once_s),
        LinkCost(collective="all-gather", alpha_s=half_s, beta_s_per_byte=share * once_s),
        LinkCost(collective="reduce-scatter", alpha_s=half_s, beta_s_per_byte=share * once_s),
        LinkCost(collective="all-to-all", alpha_s=half_s, beta_s_per_byte=share * own_s),
        LinkCost(collective="point-to-point", alpha_s=_START_S + wire.hop_s, beta_s_per_byte=own_s),
    )  # fmt: skip


def _wire(entry: CatalogueEntry | None, size: int, stride: int) -> Wire:
    is_cpu = entry is not None and entry.kind == "cpu"
    if (size - 1) * stride >= NODE_DEVICES or is_cpu:
        rate = f"{_NETWORK_GB_PER_S:g} GB/s each way"
        return Wire(
            "network", _NETWORK_GB_PER_S * 1e9 * 0.8, 5e-6, 3.0,
            f"the network between nodes of {NODE_DEVICES} is not known: {rate} for each device is assumed",
            pooled=1 if is_cpu else max(1, NODE_DEVICES // stride),
        )  # fmt: skip
    cell = None if entry is None else entry.cells.get("link_gb_per_s")
    if cell is not None and ("bridge" not in cell.note.lower() or size * stride <= _BRIDGED):
        # The column has both directions; rings of NCCL reach four fifths of one.
        return Wire(cell.note or "links", cell.value / 2 * 1e9 * 0.8, 1e-6, 1.25)
    pcie = None if entry is None else entry.value("pcie_gb_per_s")
    said = f"no faster link is known of it: PCI Express is assumed, {pcie or _USUAL_PCIE:.0f} GB/s each way"
    return Wire("PCI Express", (pcie or _USUAL_PCIE) * 1e9 * 0.5, 3e-6, 2.0, said)


def unmeasured_links(size: int) -> Links:
    """The links of processes on one CPU over gloo, if not measured.

    From two processes on two cores of one x86-64 machine: 0.3 ms for 4 bytes, 30 ms for 40 MB; wide on either side.
    """
    wire = Wire("gloo", 1.3e9, 1.5e-4, 2.5, "processes here: not measured (`stoker doctor --on Nxhere` does)")
    return Links(
        name=wire.name, world_size=size, costs=ring_costs(wire, size), basis="unknown", spread=wire.spread,
        note=wire.note,
    )  # fmt: skip
