"""Clusters: machines of several devices, the network between them, and the time of collectives over both.

Collectives are rings within a machine and over machines: in a ring over n devices each sends to the next: an all-reduce
moves 2 (n-1)/n of the tensor through every link, an all-gather and a reduce-scatter (n-1)/n. Between machines NCCL
opens a ring over each network card, so that a group with k devices in each machine has k cards of them, and a
collective takes as long as the slower of its two levels. Of an all-to-all, what goes to other machines passes each
device's share of the cards. Starting: a hop for each link of a ring, or the depth of a tree for a sum, whichever is
shorter.
Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH",
International Journal of High Performance Computing Applications 19(1), 2005, sections 4.1 to 4.5; NVIDIA's nccl-tests,
doc/PERFORMANCE.md; P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", Parallel Computing 35(12), 2009, which NCCL's trees follow. In-network reductions (NVLink SHARP) are faster; the
interval covers them. The share of the datasheet's rate that links reach is an estimate; hops are NCCL's own.

A machine's shape comes from the catalogue's row (`node_devices`, `domain_devices`, `network_cards`, `network_gbit`:
what the vendor's own machine has; clouds sell less), or from the user: `--on 4x4xa100` are four machines of four, and
`--network` takes words or a file of the same keys.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.devices.catalogue import CatalogueEntry
from stoker.errors import BadJob, NoDevice, nearest
from stoker.records.hardware import LinkCost, Links

NODE_DEVICES = 8
"""Number of devices in a machine where nothing else is known, as in NVIDIA's HGX and DGX servers since 2017."""

_REACHED = 0.8
"""Share of a link's printed rate, one way, that rings of NCCL reach."""
_START_S = 8.4e-6
"""Time until a collective's kernel runs on all devices [s], as of `_HOP_S`."""
_OVERLAP = 0.8
"""Share of a collective that overlaps with arithmetic [0 to 1]: its copies take multiprocessors and bandwidth, which
slows both. Source: X. Miao et al., "Galvatron", VLDB 2023, section 3.3: up to 1.3 times."""
_HOP_S, _PCIE_HOP_S, _NETWORK_HOP_S = 3.4e-6, 5.7e-6, 14e-6
"""Time of a step to the next device by NVLink and by PCI Express, and to the next machine [s]. Source: NCCL 2.30,
src/graph/tuning.cc, `baseLatencies` and `hwLatencies` of rings under Simple, the protocol of large messages. Chosen
among NCCL's protocols by one measurement: Llama-2-7B in shards over 2,048 H100 reaches 37 % fewer tokens a second and
device than over 128 (J. Fernandez et al., arXiv:2411.13055); forecasts are 32 % with these
(`bench.forecast.scaling`). When they were chosen that was 35 %; 11 % with those of LL128, which NCCL's own model of
costs would take for such messages, and 8 % with the guesses of before."""
_USUAL_PCIE = 15.75
"""Default rate of PCI Express, one way [GB/s]: 3.0 x16."""
_USUAL_GBIT = 100.0
"""Default rate of a machine's network [Gbit/s], for all of its devices: what AWS's machines of eight A10G
(g5.48xlarge), L4 (g6.48xlarge) or T4 (g4dn.metal) have. Source: Amazon EC2 User Guide, "Accelerated computing
instances". Those of eight L40S (g6e.48xlarge) have 400; what the vendor's servers have is in the catalogue."""
_BRIDGED = 2
"""Number of devices joined by a bridge, where the pair has one."""
_PCIE_SPREAD = 2.0
_GIVEN_SPREAD, _PRINTED_SPREAD, _ASSUMED_SPREAD = 1.3, 1.6, 3.0
"""Uncertainty of the time between machines (a factor): of a network that was stated, of the vendor's machine (clouds
sell the same device with an eighth of it to all), and of one that is not known."""
_MOST_DEVICES, _MOST_CARDS, _MOST_GBIT = 4096, 64, 10_000.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines of `node_devices` devices, `domain_devices` of which are joined by the devices' own links.

    A domain may be a part of a machine (islands, such as pairs with a bridge; PCI Express joins them), a machine, or
    several.

    Each machine has `cards` network cards of `gbit` [Gbit/s, one way]; None: not known. Groups over more than
    `leaf_nodes` machines share an `oversubscription` times smaller network above the first switches (1: none).
    `is_given`: the user stated the network; `source` says where it comes from otherwise.
    """

    node_devices: int = NODE_DEVICES
    domain_devices: int = NODE_DEVICES
    cards: int | None = None
    gbit: float | None = None
    oversubscription: float = 1.0
    leaf_nodes: int = 1
    is_given: bool = False
    source: str = ""

    @classmethod
    def of(cls, entry: CatalogueEntry | None) -> Cluster:
        """The vendor's machine of a catalogue row."""
        if entry is None:
            return cls()
        node, domain, cards = (
            None if (value := entry.value(name)) is None else int(value)
            for name in ("node_devices", "domain_devices", "network_cards")
        )
        cell, link = entry.cells.get("network_gbit"), entry.cells.get("link_gb_per_s")
        node = node or (1 if entry.kind == "cpu" else NODE_DEVICES)
        if domain is None:
            domain = min(node, _BRIDGED) if link is not None and "bridge" in link.note.lower() else node
        return cls(
            node_devices=node,
            domain_devices=domain,
            cards=cards,
            gbit=None if cell is None else cell.value,
            source="" if cell is None else cell.note or cell.source.title,
        )

    def with_nodes(self, node_devices: int) -> Cluster:
        """The same network with machines of so many devices, each with its share of the cards of the vendor's."""
        if node_devices == self.node_devices:
            return self
        cards = self.cards
        if cards is not None and not self.is_given:
            cards = max(1, cards * node_devices // self.node_devices)
        domain = self.domain_devices
        if domain <= self.node_devices:  # all of a machine, or islands within it
            domain = node_devices if domain == self.node_devices else min(domain, node_devices)
        return dataclasses.replace(self, node_devices=node_devices, domain_devices=domain, cards=cards)

    @property
    def device_bytes_per_s(self) -> float:
        """Rate of a device's share of its machine's cards, one way [bytes/s], as printed."""
        gbit = _USUAL_GBIT if self.cards is None or self.gbit is None else self.cards * self.gbit
        return gbit / 8 * 1e9 / self.node_devices

    def in_words(self) -> str:
        """`8 cards of 400 Gbit/s for 8 devices`."""
        num_cards = self.cards if self.cards is not None and self.gbit is not None else 1
        cards = f"{num_cards} card{'' if num_cards == 1 else 's'} of {self.gbit or _USUAL_GBIT:g} Gbit/s"
        devices = f" for {self.node_devices} device{'' if self.node_devices == 1 else 's'}"
        over = f", 1/{self.oversubscription:g} of it beyond {self.leaf_nodes}" if self.oversubscription > 1 else ""
        return cards + devices + over


USUAL_MACHINES = Cluster()
"""Where nothing is known."""

_KEYS = ("network", "oversubscription", "leaf", "domain")
_EXAMPLE = "8x400gbit, or 8x400gbit,oversubscription=2,leaf=16, or a TOML file with these keys"


def parse_network(text: str, cluster: Cluster) -> Cluster:
    """`cluster` with the network of `text`: words such as `8x400gbit,oversubscription=2,leaf=16,domain=72`, or a file.

    `leaf` is the number of machines under one first switch, `domain` that of devices joined by links such as NVLink,
    which may be a part of a machine, or several. What is left out stays the cluster's. A file is TOML with the keys
    network, oversubscription, leaf and domain.

    Raises:
        BadJob: a key is unknown, or a number cannot be; the text says which and what could be.
    """
    if text.endswith(".toml") or "/" in text:
        try:
            given: Mapping[str, object] = tomllib.loads(Path(text).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
            raise BadJob(
                f"--network {text}: {problem}", remedy='Give a TOML file such as: network = "8x400gbit"'
            ) from problem
    else:
        first, *others = [word.strip() for word in text.split(",") if word.strip()] or [""]
        given = {key: value for key, _, value in (word.partition("=") for word in others)}
        key, equals, value = first.partition("=")
        given = {key: value, **given} if equals else {"network": first, **given}
    for key in given:
        if key not in _KEYS:
            raise BadJob(f"--network: there is no key {key!r}", remedy=nearest(key, _KEYS) or f"Try {_EXAMPLE}.")
    cards, gbit, is_given = cluster.cards, cluster.gbit, cluster.is_given
    if "network" in given:
        cards, gbit = _cards(str(given["network"]).strip().lower())
        is_given = True
    oversubscription = _number(given, "oversubscription", 1.0, 1.0, 1000.0)
    leaf = int(_number(given, "leaf", 1, 1, 1e6))
    domain = int(_number(given, "domain", cluster.domain_devices, 1, _MOST_DEVICES))
    node = cluster.node_devices
    if max(domain, node) % min(domain, node):
        raise BadJob(
            f"--network: a domain of {domain} devices does not divide machines of {node}, nor they it",
            remedy=f"Give domain={node}, or a multiple or divisor of it.",
        )
    return dataclasses.replace(
        cluster,
        cards=cards,
        gbit=gbit,
        oversubscription=oversubscription,
        leaf_nodes=leaf,
        domain_devices=domain,
        is_given=is_given,
        source="as stated" if is_given else cluster.source,
    )


def _cards(words: str) -> tuple[int, float]:
    """`8x400gbit` as (8, 400.0): cards of a machine, and the rate of each [Gbit/s]."""
    match = re.fullmatch(r"(?:(\d+)x)?(\d+(?:\.\d+)?)\s*(gbit|gb)(?:/?s)?", words)
    if match is None:
        raise BadJob(f"--network {words!r}: wanted cards of a machine times their rate", remedy=f"Try {_EXAMPLE}.")
    count, rate, unit = match.groups()
    cards, gbit = int(count or 1), float(rate) * (8 if unit == "gb" else 1)
    if not (1 <= cards <= _MOST_CARDS and 0 < gbit <= _MOST_GBIT):
        raise BadJob(
            f"--network {words!r}: {cards} cards of {gbit:g} Gbit/s in a machine",
            remedy=f"Give 1 to {_MOST_CARDS} cards of up to {_MOST_GBIT:g} Gbit/s each.",
        )
    return cards, gbit


def _number(given: Mapping[str, object], key: str, default: float, low: float, high: float) -> float:
    try:
        value = float(str(given.get(key, default)))
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise BadJob(f"--network: {key} is {given[key]!r}", remedy=f"Give a number from {low:g} to {high:g}.")
    return value


def require_whole_nodes(count: int, cluster: Cluster, name: str) -> None:
    """Raise NoDevice if `count` devices over several machines do not fill them."""
    node = cluster.node_devices
    if count > node and count % node:
        whole = count // node * node
        raise NoDevice(
            f"{count} devices do not fill machines of {node} {name}: {count // node} and {count % node} devices over.",
            remedy=f"Use --on {whole}x{name} or {whole + node}x{name}, or say the machines: --on NODESxGPUSx{name}.",
        )


@dataclass(frozen=True)
class Wire:
    """A level of a group's links: `members` devices, or groups of them, joined by them; 0: all.

    `bytes_per_s` is the rate of each device one way, `pooled` the number of devices that carry one ring together,
    `hop_s` the time of a step [s], `spread` the uncertainty (a factor). NCCL sums over a network by trees.
    """

    name: str
    bytes_per_s: float
    hop_s: float
    spread: float
    note: str = ""
    pooled: int = 1
    members: int = 0
    is_network: bool = False


def catalogue_links(entry: CatalogueEntry | None, size: int, stride: int = 1, cluster: Cluster | None = None) -> Links:
    """The links between `size` devices of a model.

    Args:
        entry: the model; None if not known.
        size: number of devices, at least 1.
        stride: distance between neighbours in the order of all devices, in which machines follow each other.
        cluster: the machines and their network; None: those of the model.
    """
    wires = _wires(entry, size, stride, cluster or Cluster.of(entry))
    slowest = wires[-1]
    return Links(
        name=slowest.name,
        world_size=size,
        costs=ring_costs(wires, size),
        basis="unknown" if slowest.spread >= _PCIE_SPREAD else "datasheet",
        spread=slowest.spread,
        overlap=_OVERLAP,
        note=slowest.note,
    )


def ring_costs(wires: tuple[Wire, ...], size: int) -> tuple[LinkCost, ...]:
    """Costs of collectives over `size` devices on the levels of `wires`, the closest first; see this module."""
    share, outer = (size - 1) / size, wires[-1]
    own_s = 1 / outer.bytes_per_s
    once_s = max(1 / (wire.bytes_per_s * wire.pooled) for wire in wires)
    ring_s = tree_s = 0.0
    groups, sent_s = float(size), 0.0
    for wire in wires:
        members = wire.members or size
        ring_s += (groups - groups / members) * wire.hop_s
        tree_s += (math.log2(members) if wire.is_network else members - 1) * wire.hop_s
        # Of what a device sends to all, each level carries what goes to its other members.
        sent_s = max(sent_s, (members - 1) / groups / wire.bytes_per_s)
        groups /= members
    start_s, sum_s = _START_S + ring_s, 2 * min(ring_s, tree_s)
    return (
        LinkCost(collective="all-reduce", alpha_s=_START_S + sum_s, beta_s_per_byte=2 * share * once_s),
        LinkCost(collective="all-gather", alpha_s=start_s, beta_s_per_byte=share * once_s),
        LinkCost(collective="reduce-scatter", alpha_s=start_s, beta_s_per_byte=share * once_s),
        LinkCost(collective="all-to-all", alpha_s=start_s, beta_s_per_byte=sent_s),
        LinkCost(collective="point-to-point", alpha_s=_START_S + outer.hop_s, beta_s_per_byte=own_s),
    )


def _wires(entry: CatalogueEntry | None, size: int, stride: int, cluster: Cluster) -> tuple[Wire, ...]:
    """The levels that a group's messages pass, the closest first."""
    domain, machine = cluster.domain_devices, max(cluster.node_devices, cluster.domain_devices)
    wires: list[Wire] = []
    inner = 1  # `inner`: members of the group that the levels so far join
    for level in dict.fromkeys((domain, machine)):
        together = size if (size - 1) * stride < level else max(1, level // stride)
        if together > inner or size == 1 > len(wires):
            wires.append(_within(entry, -(-together // inner), cluster, is_domain=level == domain))
            inner = together
    if inner < size:
        wires.append(_network(inner, -(-size // inner), cluster))
    return tuple(wires)


def _within(entry: CatalogueEntry | None, members: int, cluster: Cluster, *, is_domain: bool) -> Wire:
    """Links within a domain, and between the domains of a machine."""
    cell = None if entry is None else entry.cells.get("link_gb_per_s")
    if cell is not None and is_domain:
        spread, note = 1.25, ""
        if "bridge" in cell.note.lower():
            spread = _PCIE_SPREAD
            note = f"pairs are taken to have a bridge, {cell.value / 2:g} GB/s each way (--network domain=1: none)"
        # The column has both directions.
        return Wire(cell.note or "links", cell.value / 2 * 1e9 * _REACHED, _HOP_S, spread, note, members=members)
    pcie = (None if entry is None else entry.value("pcie_gb_per_s")) or _USUAL_PCIE
    note = f"PCI Express joins the islands of {cluster.domain_devices} in a machine, {pcie:.0f} GB/s each way"
    if cell is None:
        note = f"no faster link is known of it: PCI Express is assumed, {pcie:.0f} GB/s each way"
    return Wire("PCI Express", pcie * 1e9 * 0.5, _PCIE_HOP_S, _PCIE_SPREAD, note, members=members)


def _network(together: int, machines: int, cluster: Cluster) -> Wire:
    """The network between `machines` with `together` members of a group each."""
    rate = cluster.device_bytes_per_s * _REACHED
    if machines > cluster.leaf_nodes:
        rate /= cluster.oversubscription
    spread, note = _GIVEN_SPREAD, ""
    if not cluster.is_given and cluster.gbit is not None:
        spread = _PRINTED_SPREAD
        note = f"the network is taken to be that of the vendor's machine, {cluster.in_words()} ({cluster.source})"
    elif not cluster.is_given:
        spread = _ASSUMED_SPREAD
        note = f"the network between machines is not known: {cluster.in_words()} is assumed"
    note = f"{note}; --network says what it is" if note else ""
    return Wire("network", rate, _NETWORK_HOP_S, spread, note, pooled=together, members=machines, is_network=True)


def unmeasured_links(size: int) -> Links:
    """The links of processes on one CPU over gloo, if not measured.

    From two processes on two cores of one x86-64 machine: 0.3 ms for 4 bytes, 30 ms for 40 MB; wide on either side.
    """
    wire = Wire("gloo", 1.3e9, 1.5e-4, 2.5, "processes here: not measured (`stoker doctor --on Nxhere` does)")
    return Links(
        name=wire.name,
        world_size=size,
        costs=ring_costs((wire,), size),
        basis="unknown",
        spread=wire.spread,
        note=wire.note,
    )
