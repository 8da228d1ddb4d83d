"""Places: what the words of `--on` mean, for running a job here and for planning one anywhere."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.devices.catalogue import Catalogue, CatalogueEntry, catalogue, normalized_name
from stoker.devices.hardware import device_of, hardware_of
from stoker.devices.interconnects import NODE_DEVICES
from stoker.errors import NoDevice
from stoker.records import Device, Hardware
from stoker.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Place:
    """A device that can be planned for. `name` is its name in the catalogue, or `cpu`, `cuda:0` if it is here.

    `entry` is what the catalogue says of its model (None: the model is not known); prices go by its name. `count` is
    how many of it a job is to be spread over, with one process each, and then stands before the name: `8xh100`. Of a
    CPU that is here these processes share the cores and the memory; `device` and `hardware` are the whole machine's.
    `is_limited`: `device.memory_bytes` is what somebody allows of it, not what there is.
    """

    name: str
    device: Device
    hardware: Hardware
    is_here: bool
    entry: CatalogueEntry | None = None
    count: int = 1
    is_limited: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether all processes are on one device: the CPU that is here."""
        return self.is_here and self.device.kind == "cpu"

    @property
    def cores_each(self) -> int:
        """Cores for each process on a CPU that is here, at least one; on anything else those of a device."""
        return max(1, self.device.cores // self.count) if self.is_shared else self.device.cores

    @property
    def memory_bytes_each(self) -> int:
        """Memory for each process [bytes]: a share of this machine's, or a device's own."""
        return self.device.memory_bytes // self.count if self.is_shared else self.device.memory_bytes

    def limited_to(self, memory_bytes: float | None, threads: int | None = None) -> Place:
        """The same place with at most so much of its memory to be used, and on a CPU so many threads; None: all.

        Threads limit `device.cores` alone: `hardware` stays the whole machine's, which its measurements are of.
        """
        place, there = self, self.device.memory_bytes
        if memory_bytes is not None and not 0 < there <= memory_bytes:
            device = dataclasses.replace(self.device, memory_bytes=int(memory_bytes))
            hardware = dataclasses.replace(self.hardware, device=device)
            place = dataclasses.replace(self, device=device, hardware=hardware, is_limited=True)
        if threads is None or not self.is_shared or threads >= self.device.cores:
            return place
        return dataclasses.replace(place, device=dataclasses.replace(place.device, cores=max(1, threads)))


def resolve_place(word: str, attached: Sequence[Device], known: Catalogue | None = None) -> Device:
    """The attached device a word means.

    Args:
        word: `here` (the best attached device), `cpu`, `cuda`, `cuda:N`, or a name of the catalogue such as `h100`;
            upper and lower case are the same. `2xhere` and `8xh100` are understood, and refused: see
            `planned_devices` for those.
        attached: what is attached, best first; see `attached_devices`.
        known: the catalogue; the user's if None.

    Raises:
        NoDevice: the word is unknown, means something that is not attached, or asks for several devices or names them.
    """
    known = catalogue() if known is None else known
    words = [one.strip() for one in word.split(",") if one.strip()]
    if len(words) > 1:
        raise NoDevice(
            f"{word!r} names {len(words)} devices, where one is wanted.",
            remedy=f"`stoker plan JOB --on {','.join(words)}` compares them; then name one, such as `--on {words[0]}`.",
        )
    count, name = _split(word)
    device = _one_attached(name, attached, known)
    if count == 1:
        return device
    raise NoDevice(
        f"{word!r} asks for {count} devices, where one is wanted.",
        remedy=f"Use `--on {name}`, which is {_device_text(device)}.",
    )


def planned_devices(words: str, attached: Sequence[Device], known: Catalogue | None = None) -> tuple[Place, ...]:
    """The devices that words between commas mean, each once, in the order of the words; none of them need be here.

    Args:
        words: each a word of `resolve_place`, any name or alias of the catalogue, or `all`: every model of it that can
            be planned for. An alias that leaves the memory open means all its models. A number before a word is how
            many devices of it work together: `8xh100,a100-80g,2xhere`; `2x8xh100` are two nodes of eight.
        attached: what is attached, best first. A model that is attached is planned for as it is here.
        known: the catalogue; the user's if None.

    Raises:
        NoDevice: a word is unknown, means an attached device that is not there, more GPUs than are attached, or a
            device for which there is no time model.
    """
    known = catalogue() if known is None else known
    names = [word.strip() for word in words.split(",") if word.strip()]
    if not names:
        raise NoDevice(f"--on {words!r} names no device.", remedy="Try `--on here`, or `--on h100,l4,rtx-4090`.")
    places = [place for name in names for place in _places(name, attached, known)]
    return tuple({place.name: place for place in places}.values())


def _places(word: str, attached: Sequence[Device], known: Catalogue) -> tuple[Place, ...]:
    """The places one word means."""
    count, name = _split(word)
    if name == "all":
        places = tuple(_place_of(entry, known) for entry in known.entries if entry.can_be_planned)
        return tuple(_several(place, count) for place in places)
    here = _attached_matches(name, attached, known)
    alike = [device for device in here if (device.kind, device.model) == (here[0].kind, here[0].model)]
    if here and (_is_local_word(name) or count <= len(alike)):
        if here[0].kind != "cpu" and count > len(alike):
            raise _too_few(word, count, alike)
        return (_several(_place_here(here[0], known), count),)
    if _is_local_word(name):
        raise _not_attached(name, attached)
    entries = known.find(name)
    if not entries:
        raise _unknown(name, attached, known)
    return tuple(_several(_place_of(entry, known), count) for entry in entries)


def _several(place: Place, count: int) -> Place:
    """So many of it."""
    return place if count == 1 else dataclasses.replace(place, name=f"{count}x{place.name}", count=count)


def _too_few(word: str, count: int, alike: Sequence[Device]) -> NoDevice:
    """The error: a job spread over GPUs needs one for each process, all of one model."""
    there = f"{len(alike)} × {alike[0].model}" if len(alike) > 1 else f"one {alike[0].model}"
    most = f"`--on {len(alike)}xhere`" if len(alike) > 1 else "`--on here`"
    return NoDevice(
        f"{word!r} asks for {count} GPUs; attached: {there}.",
        remedy=f"Use {most}, or `--on {count}xcpu` for {count} processes on this machine's CPU.",
    )


def _place_of(entry: CatalogueEntry, known: Catalogue) -> Place:
    return Place(
        name=entry.name, device=device_of(entry), hardware=hardware_of(entry, known), is_here=False, entry=entry
    )


def _place_here(device: Device, known: Catalogue) -> Place:
    return Place(
        name=device.torch_name, device=device, hardware=hardware_of(device, known), is_here=True,
        entry=known.describing(device),
    )  # fmt: skip


def _split(word: str) -> tuple[int, str]:
    """`8xh100` as (8, 'h100'), `2x8xh100` (two nodes of eight) as (16, 'h100'), `cpu` as (1, 'cpu')."""
    match = re.fullmatch(r"(\d+)x(?:(\d+)x)?(.+)", word.strip().lower())
    nodes, each, name = match.groups() if match else ("1", None, word.strip().lower())
    count = int(nodes) * int(each or 1)
    if each is not None and (int(each) != NODE_DEVICES or _is_local_word(name)):
        what = f"{name!r} is this machine" if _is_local_word(name) else f"forecasts assume nodes of {NODE_DEVICES}"
        remedy = f"Use `--on {max(1, count)}x{name}`" + ("." if _is_local_word(name) else
                                                    f", which stands on nodes of {NODE_DEVICES}.")  # fmt: skip
        raise NoDevice(f"{word!r} asks for {nodes} nodes of {each} devices, and {what}.", remedy=remedy)
    if count < 1:
        raise NoDevice(f"{word!r} asks for {count} devices.", remedy=f"Use `--on {name}`.")
    return count, name


def _is_local_word(name: str) -> bool:
    """Whether a word means an attached device by its nature, not by its model."""
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
    """The models of the catalogue a word means; several where an alias leaves the memory open.

    Raises:
        NoDevice: there is none; the nearest names are told.
    """
    known = catalogue() if known is None else known
    if entries := known.find(word):
        return entries
    raise _unknown(word, (), known)


def _unknown(name: str, attached: Sequence[Device], known: Catalogue) -> NoDevice:
    """The error: nothing has that name. At most three devices like it are told, not the whole catalogue."""
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
    """The error: `name` is a device, and none of those that are attached."""
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
