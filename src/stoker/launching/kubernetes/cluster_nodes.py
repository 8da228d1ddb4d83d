"""The nodes of a Kubernetes cluster: their devices by kind, what of them is free, and which of them a run asks for.

What: allocatable resources of device plugins, and the kind of device by the labels that GPU feature discovery and
clouds put on nodes. A pod gets its share of a node's cores and memory: as much as its devices are of the node's.
Use when: the login may list nodes; else the kind is asked for by the label of NVIDIA's feature discovery.
Source: labels of NVIDIA's and AMD's device plugins, GKE, EKS and Karpenter; Kubernetes' resource quantities.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.devices import catalogue
from stoker.devices.catalogue import CatalogueEntry, normalized_name
from stoker.errors import NoDevice, PlaceFailed, nearest
from stoker.launching.kubernetes.cluster_api import ClusterApi, Object
from stoker.launching.kubernetes.manifests import NodePool
from stoker.launching.launcher import LaunchTarget

NVIDIA, AMD = "nvidia.com/gpu", "amd.com/gpu"
KIND_LABELS = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "k8s.amazonaws.com/accelerator",
    "gpu.nvidia.com/class",
    "amd.com/gpu.product-name",
)
"""Node labels whose value names the kind of device, the most exact first."""

_USABLE = 0.9
"""Part of a node's cores and memory that pods share; the rest is for its own daemons."""


def quantity(text: str) -> float:
    """A resource quantity as a number: cores, or bytes.

    >>> quantity("1500m"), quantity("2Gi"), quantity("4")
    (1.5, 2147483648.0, 4.0)
    """
    from kubernetes.utils.quantity import parse_quantity  # noqa: PLC0415  # an extra

    try:
        return float(parse_quantity(text))
    except ValueError as error:
        raise PlaceFailed(f"The cluster gave {text!r} where a quantity should be.") from error


@dataclass(frozen=True)
class Node:
    """One node.

    Attributes:
        name: of the node.
        device: name in the catalogue, the label's value where it has none; "" for a node without devices.
        label, value: the label that names the device.
        resource: of the device plugin.
        num_devices, cpus, memory_bytes: allocatable.
        num_used: devices that running pods asked for; None: not visible.
    """

    name: str
    device: str
    label: str
    value: str
    resource: str
    num_devices: int
    cpus: float
    memory_bytes: float
    num_used: int | None = None


@dataclass(frozen=True)
class Nodes:
    """The nodes that take pods; none are known where the login may not list them."""

    nodes: tuple[Node, ...]
    are_visible: bool = True

    def in_words(self) -> str:
        """Devices by kind."""
        if not self.are_visible:
            return "not visible to you"
        kinds = Counter((node.device or "CPU only", node.num_devices) for node in self.nodes)
        words = (
            f"{count} with {each} {device}" if each else f"{count} {device}" for (device, each), count in kinds.items()
        )
        return ", ".join(words) or "none takes pods"

    def free_for(self, target: LaunchTarget) -> dict[str, int | None]:
        """Nodes with room for a pod of the target's shape, by device; None where what runs is not visible."""
        free: dict[str, int | None] = {}
        for node in _matching(self.nodes, target.device):
            device = "cpu" if target.device == "cpu" else node.device or "cpu"
            if device == "cpu":
                has_room: bool | None = None if node.num_used is None else node.cpus * _USABLE >= target.devices_each
            elif node.num_devices < target.devices_each:
                continue
            else:
                has_room = None if node.num_used is None else node.num_devices - node.num_used >= target.devices_each
            known = free.setdefault(device, 0)
            free[device] = None if has_room is None or known is None else known + has_room
        return free


def survey(api: ClusterApi) -> Nodes:
    """The nodes, and the devices in use on each, as far as the login may see them."""
    if not api.may("list", "nodes"):
        return Nodes((), are_visible=False)
    used: Counter[str] | None = None
    if api.may("list", "pods"):
        used = _used(api)
    return Nodes(tuple(_node(thing, used) for thing in api.objects("Node") if _takes_pods(thing)))


def _used(api: ClusterApi) -> Counter[str] | None:
    """Devices that pods of all namespaces asked for, by node; None if they are not visible."""
    try:
        pods = api.ask("GET", "/api/v1/pods").get("items", [])
    except PlaceFailed as error:
        if "forbidden" in error.message:
            return None
        raise
    used: Counter[str] = Counter()
    for pod in pods:
        if pod.get("status", {}).get("phase") in {"Succeeded", "Failed"} or "nodeName" not in pod["spec"]:
            continue
        for container in pod["spec"]["containers"]:
            limits = (container.get("resources") or {}).get("limits") or {}
            used[pod["spec"]["nodeName"]] += sum(int(quantity(limits.get(name, "0"))) for name in (NVIDIA, AMD))
    return used


def _takes_pods(thing: Object) -> bool:
    ready = [c["status"] for c in thing.get("status", {}).get("conditions") or [] if c["type"] == "Ready"]
    return not thing["spec"].get("unschedulable") and ready == ["True"]


def _node(thing: Object, used: Counter[str] | None) -> Node:
    name, labels = thing["metadata"]["name"], thing["metadata"].get("labels") or {}
    room = thing.get("status", {}).get("allocatable") or {}
    resource = next((r for r in (NVIDIA, AMD) if int(quantity(room.get(r, "0")))), "")
    label = next((key for key in KIND_LABELS if key in labels), "") if resource else ""
    entry = entry_of(labels[label]) if label else None
    return Node(
        name=name,
        device=entry.name if entry else labels.get(label, "gpu" if resource else ""),
        label=label,
        value=labels.get(label, ""),
        resource=resource,
        num_devices=int(quantity(room.get(resource, "0"))) if resource else 0,
        cpus=quantity(room.get("cpu", "0")),
        memory_bytes=quantity(room.get("memory", "0")),
        num_used=None if used is None else used[name],
    )


def entry_of(value: str) -> CatalogueEntry | None:
    """The catalogue's entry of a label's value; None if it is not known, or could be several.

    >>> entry_of("NVIDIA-H100-80GB-HBM3").name, entry_of("nvidia-tesla-t4").name, entry_of("nvidia-a100-80gb").name
    ('h100', 't4', 'a100-80')
    """
    name = normalized_name(value)
    for entry in catalogue().entries:
        if name in map(normalized_name, entry.driver_names):
            return entry
    known = catalogue().find(value)
    return known[0] if len(known) == 1 else None


def _matching(nodes: Sequence[Node], device: str) -> list[Node]:
    if device == "cpu":
        return list(nodes)
    if device == "":
        return [node for node in nodes if node.resource] or list(nodes)
    if device == "gpu":
        return [node for node in nodes if node.resource]
    names = {entry.name for entry in catalogue().find(device)} | {device}
    return [node for node in nodes if node.device in names]


def wanted_pool(nodes: Nodes | None, target: LaunchTarget) -> NodePool:
    """The nodes that a target asks for, and what each pod gets of one.

    Args:
        nodes: of the cluster; None: not asked.
        target: shape and device.

    Raises:
        PlaceFailed: no node has the device, or so many of them.
        NoDevice: the device is not in the catalogue, and no node says its name.
    """
    if target.device == "cpu":
        return NodePool(cpus=target.devices_each)
    if nodes is None or not nodes.are_visible:
        return _pool_unseen(target)
    matching = _matching(nodes.nodes, target.device)
    if not matching:
        raise PlaceFailed(f"no node of the cluster has {target.device or 'room'}; there are: {nodes.in_words()}")
    if not matching[0].resource:
        return NodePool(cpus=target.devices_each)
    large = [node for node in matching if node.num_devices >= target.devices_each]
    if not large:
        most = max(node.num_devices for node in matching)
        raise PlaceFailed(
            f"no node has {target.devices_each} {target.device or 'GPUs'}, the largest has {most}",
            remedy=f"Ask for several nodes: 2x{most}x{target.device or 'gpu'}.",
        )
    share = [target.devices_each / node.num_devices * _USABLE for node in large]
    kinds = {node.label for node in large}
    label = kinds.pop() if len(kinds) == 1 and target.device not in {"", "gpu"} else ""
    return NodePool(
        resource=large[0].resource,
        label=label,
        values=tuple(sorted({node.value for node in large})) if label else (),
        cpus=max(1, math.floor(min(part * node.cpus for part, node in zip(share, large, strict=True)))),
        memory_bytes=math.floor(min(part * node.memory_bytes for part, node in zip(share, large, strict=True))),
    )


def _pool_unseen(target: LaunchTarget) -> NodePool:
    if target.device == "":
        return NodePool(cpus=target.devices_each)
    if target.device == "gpu":
        return NodePool(resource=NVIDIA)
    entries = catalogue().find(target.device)
    if not entries:
        raise NoDevice(f"there is no device {target.device}.", remedy=nearest(target.device, catalogue().words()))
    drivers = sorted({name.replace(" ", "-") for entry in entries for name in entry.driver_names})
    if entries[0].kind == "rocm":
        return NodePool(resource=AMD)
    return NodePool(resource=NVIDIA, label=KIND_LABELS[0], values=tuple(drivers))
