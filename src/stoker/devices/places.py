"""The devices that the words of `--on` mean, for running a job here and for planning one anywhere."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.devices.catalogue import Catalogue, CatalogueEntry, catalogue, normalized_name
from stoker.devices.cluster import USUAL_MACHINES, Cluster, parse_network, require_whole_nodes
from stoker.devices.hardware import device_of, hardware_of
from stoker.errors import NoDevice
from stoker.records import Device, Hardware
from stoker.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Place:
    """A device that can be planned for. `name` is its name in the catalogue, or `cpu`, `cuda:0` if it is attached.

    `entry` is its model in the catalogue (None: not known); prices use its name. `count` is the number of devices of a
    job, with one process each, and is then part of the name: `8xh100`. On an attached CPU these processes share cores
    and memory; `device` and `hardware` are the whole machine's. `is_limited`: `device.memory_bytes` is a limit set by
    the user. `cluster` are the machines that GPUs stand in: of those here, one with as many as are attached.
    """

    name: str
    device: Device
    hardware: Hardware
    is_here: bool
    entry: CatalogueEntry | None = None
    count: int = 1
    is_limited: bool = False
    cluster: Cluster = USUAL_MACHINES

    @property
    def is_shared(self) -> bool:
        """True if all processes share one device: the attached CPU."""
        return self.is_here and self.device.kind == "cpu"

    @property
    def cores_each(self) -> int:
        """Number of cores for each process [cores]: a share of the attached CPU's, at least one, or a device's own."""
        return max(1, self.device.cores // self.count) if self.is_shared else self.device.cores

    @property
    def memory_bytes_each(self) -> int:
        """Memory for each process [bytes]: a share of this machine's, or a device's own."""
        return self.device.memory_bytes // self.count if self.is_shared else self.device.memory_bytes

    def limited_to(self, memory_bytes: float | None, threads: int | None = None) -> Place:
        """This place limited to `memory_bytes` [bytes], and on a CPU to `threads`; None: no limit.

        Threads limit only `device.cores`: `hardware` stays the whole machine's, like its measurements.
        """
        place = self
        if memory_bytes is not None and not 0 < self.device.memory_bytes <= memory_bytes:
            device = dataclasses.replace(self.device, memory_bytes=int(memory_bytes))
            hardware = dataclasses.replace(self.hardware, device=device)
            place = dataclasses.replace(self, device=device, hardware=hardware, is_limited=True)
        if threads is None or not self.is_shared or threads >= self.device.cores:
            return place
        return dataclasses.replace(place, device=dataclasses.replace(place.device, cores=max(1, threads)))


def resolve_place(word: str, attached: Sequence[Device]) -> Device:
    """The attached device a word means.

    Args:
        word: `here` (the best attached device), `cpu`, `cuda`, `cuda:N`, or a name of the catalogue such as `h100`, in
            any case. `2xhere` and `8xh100` are refused: see `planned_devices`.
        attached: the attached devices, best first; see `attached_devices`.

    Raises:
        NoDevice: the word is unknown, means something that is not attached, or asks for several devices or names them.
    """
    parts = [part.strip() for part in word.split(",") if part.strip()]
    if len(parts) > 1:
        raise NoDevice(
            f"{word!r} names {len(parts)} devices, where one is wanted.",
            remedy=f"`stoker plan JOB --on {','.join(parts)}` compares them; then name one, such as `--on {parts[0]}`.",
        )
    count, name, _ = _split(word)
    device = _one_attached(name, attached, catalogue())
    if count == 1:
        return device
    raise NoDevice(
        f"{word!r} asks for {count} devices, where one is wanted.",
        remedy=f"Use `--on {name}`, which is {_device_text(device)}.",
    )


def planned_devices(
    words: str, attached: Sequence[Device], known: Catalogue | None = None, *, network: str | None = None
) -> tuple[Place, ...]:
    """The devices that words between commas mean, each once, in order; none of them need be attached.

    Args:
        words: each a word of `resolve_place`, any name or alias of the catalogue, or `all`: every model that can be
            planned for. An alias that leaves the memory open means all its models. A number before a word is the number
            of devices: `8xh100,a100-80g,2xhere`; `2x8xh100` are two machines of eight.
        attached: the attached devices, best first. An attached model is planned for as it is here.
        known: the catalogue; the user's if None.
        network: of several GPUs; see `cluster.parse_network`. None: that of the vendor's machine.

    Raises:
        NoDevice: a word is unknown, means a local device that is not attached, more GPUs than are attached, a device
            without a time model, or a number that does not fill machines.
        BadJob: the network cannot be.
    """
    known = catalogue() if known is None else known
    names = [word.strip() for word in words.split(",") if word.strip()]
    if not names:
        raise NoDevice(f"--on {words!r} names no device.", remedy="Try `--on here`, or `--on h100,l4,rtx-4090`.")
    places = [place for name in names for place in _places(name, attached, known, network)]
    return tuple({place.name: place for place in places}.values())


def _places(word: str, attached: Sequence[Device], known: Catalogue, network: str | None) -> tuple[Place, ...]:
    """The places one word means."""
    count, name, node = _split(word)
    if name == "all":
        places = tuple(_place_of(entry, known) for entry in known.entries if entry.can_be_planned)
        return tuple(_several(place, count, node, network) for place in places)
    here = _attached_matches(name, attached, known)
    num_same = sum((device.kind, device.model) == (here[0].kind, here[0].model) for device in here)
    if here and (_is_local_word(name) or count <= num_same):
        device = here[0]
        if device.kind != "cpu" and count > num_same:
            gpus = f"{num_same} × {device.model}" if num_same > 1 else f"one {device.model}"
            most = f"`--on {num_same}xhere`" if num_same > 1 else "`--on here`"
            raise NoDevice(
                f"{word!r} asks for {count} GPUs; attached: {gpus}.",
                remedy=f"Use {most}, or `--on {count}xcpu` for {count} processes on this machine's CPU.",
            )
        place = Place(
            name=device.torch_name,
            device=device,
            hardware=hardware_of(device, known),
            is_here=True,
            entry=known.describing(device),
        )
        return (_several(place, count, num_same, network),)
    if _is_local_word(name):
        raise _not_attached(name, attached)
    entries = known.find(name)
    if not entries:
        raise _unknown(name, attached, known)
    return tuple(_several(_place_of(entry, known), count, node, network) for entry in entries)


def _several(place: Place, count: int, node: int | None = None, network: str | None = None) -> Place:
    """The place with `count` devices, `node` of them in a machine (None: as many as the vendor's has)."""
    numbers = f"{count}x" if count > 1 else ""
    if place.is_shared or (count == 1 and not place.is_here):
        return dataclasses.replace(place, name=f"{numbers}{place.name}", count=count)
    vendors = Cluster.of(place.entry)
    cluster = vendors if node is None else vendors.with_nodes(node)
    cluster = cluster if network is None or count == 1 else parse_network(network, cluster)
    require_whole_nodes(count, cluster, place.name)
    if node is not None and node != vendors.node_devices and not place.is_here:
        numbers = f"{count // node}x{node}x"
    return dataclasses.replace(place, name=f"{numbers}{place.name}", count=count, cluster=cluster)


def _place_of(entry: CatalogueEntry, known: Catalogue) -> Place:
    return Place(
        name=entry.name, device=device_of(entry), hardware=hardware_of(entry, known), is_here=False, entry=entry
    )


def _split(word: str) -> tuple[int, str, int | None]:
    """`8xh100` as (8, 'h100', None), `2x4xh100` (two machines of four) as (8, 'h100', 4), `cpu` as (1, 'cpu', None)."""
    match = re.fullmatch(r"(\d+)x(?:(\d+)x)?(.+)", word.strip().lower())
    nodes, each, name = match.groups() if match else ("1", None, word.strip().lower())
    count = int(nodes) * int(each or 1)
    if each is not None and _is_local_word(name):
        raise NoDevice(
            f"{word!r} asks for {nodes} machines of {each} devices, and {name!r} is this machine.",
            remedy=f"Use `--on {max(1, count)}x{name}`.",
        )
    if not 1 <= count <= _MOST_DEVICES:
        raise NoDevice(f"{word!r} asks for {count} devices.", remedy=f"Use `--on {name}`, or up to {_MOST_DEVICES:,}.")
    return count, name, None if each is None else int(each)


_MOST_DEVICES = 2**20
"""Ten times the largest machines."""


def _is_local_word(name: str) -> bool:
    """True if a word means an attached device by kind, not by model."""
    return name in ("here", "cpu", "cuda") or re.fullmatch(r"cuda:\d+", name) is not None


def _attached_matches(name: str, attached: Sequence[Device], known: Catalogue) -> list[Device]:
    """The attached devices that a word (lower case, without a count) means."""
    if _is_local_word(name):
        return [device for device in attached if name in ("here", device.kind, device.torch_name)]
    entries = known.find(name)
    return [device for device in attached if known.describing(device) in entries]


def _one_attached(name: str, attached: Sequence[Device], known: Catalogue) -> Device:
    """The attached device that a word (lower case, without a count) means."""
    if matches := _attached_matches(name, attached, known):
        return matches[0]
    entries = known.find(name)
    if entries or _is_local_word(name):
        raise _not_attached(name, attached, entries)
    raise _unknown(name, attached, known)


def find_devices(word: str, known: Catalogue | None = None) -> tuple[CatalogueEntry, ...]:
    """The models of the catalogue a word means; several if an alias leaves the memory open.

    Raises:
        NoDevice: there is none; the remedy has the nearest names.
    """
    known = catalogue() if known is None else known
    if entries := known.find(word):
        return entries
    raise _unknown(word, (), known)


def _unknown(name: str, attached: Sequence[Device], known: Catalogue) -> NoDevice:
    """The error for an unknown name, with at most three similar ones."""
    local = ["here", *(device.torch_name for device in attached)] if attached else []
    words = {word: word for word in local}
    for entry in known.entries:
        words |= {normalized_name(word): entry.name for word in (*entry.aliases, entry.name)}
    close = difflib.get_close_matches(normalized_name(name), list(words), n=6, cutoff=0.5)
    meant = list(dict.fromkeys(words[word] for word in close))[:3]
    guess = f"Did you mean {' or '.join(repr(word) for word in meant)}? " if meant else ""
    here = f" `here` is {attached[0].torch_name}." if attached else ""
    return NoDevice(f"There is no device named {name!r}.", remedy=f"{guess}`stoker devices` lists all names.{here}")


def _not_attached(name: str, attached: Sequence[Device], entries: Sequence[CatalogueEntry] = ()) -> NoDevice:
    """The error for a device that is not attached."""
    what = f"{name} is in the catalogue ({' or '.join(e.in_words() for e in entries)}) but" if entries else name
    here = "; ".join(f"{device.torch_name} = {_device_text(device)}" for device in attached) or "nothing"
    return NoDevice(
        f"{what} is not attached to this machine. Attached: {here}.",
        remedy="Use `--on here`, or run the same command on a machine that has one."
        if attached
        else "Run the same command on a machine with a CPU or an NVIDIA GPU.",
    )


def _device_text(device: Device) -> str:
    """`NVIDIA H200, 140.4 GiB`."""
    return f"{device.model}, {format_bytes(device.memory_bytes) if device.memory_bytes else 'memory unknown'}"
