"""Costs of collectives between devices of a model, from the catalogue's figures, by the formulas of rings.

In a ring over n devices each sends to the next: an all-reduce moves 2 (n-1)/n of the tensor through every link in
2 (n-1) steps, an all-gather and a reduce-scatter (n-1)/n in n-1, as does an all-to-all.
Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH",
International Journal of High Performance Computing Applications 19(1), 2005, sections 4.1 to 4.5; NVIDIA's nccl-tests,
doc/PERFORMANCE.md. Trees and in-network reductions (NVLink SHARP) are faster for short or long messages; the interval
covers them. The share of the datasheet's rate that links reach, and start-up times, are estimates, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.devices.catalogue import CatalogueEntry
from stoker.records.hardware import LinkCost, Links

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
