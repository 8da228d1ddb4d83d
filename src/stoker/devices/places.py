"""Places: what the word of `--on` means on this machine."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stoker.devices.catalogue import Catalogue, CatalogueEntry, catalogue
from stoker.errors import NoDevice, nearest
from stoker.records import Device
from stoker.units import format_bytes


def resolve_place(word: str, attached: Sequence[Device], known: Catalogue | None = None) -> Device:
    """The attached device a word means.

    Args:
        word: `here` (the best attached device), `cpu`, `cuda`, `cuda:N`, or a name of the catalogue such as `h100`;
            upper and lower case are the same. `2xhere` and `8xh100` are understood, and refused until jobs can be
            spread over devices.
        attached: what is attached, best first; see `attached_devices`.
        known: the catalogue; the built-in one if None.

    Raises:
        NoDevice: the word is unknown, means something that is not attached, or asks for several devices.
    """
    known = catalogue() if known is None else known
    count, name = _split(word)
    device = _one_device(name, attached, known)
    if count == 1:
        return device
    raise NoDevice(
        f"{word!r} asks for {count} devices; a job runs on one device so far.",
        remedy=f"Use `--on {name}`, which is {_in_words(device)}.",
    )


def _split(word: str) -> tuple[int, str]:
    """`8xh100` as (8, 'h100'), `cpu` as (1, 'cpu')."""
    match = re.fullmatch(r"(\d+)x(.+)", word.strip().lower())
    count, name = (int(match.group(1)), match.group(2)) if match else (1, word.strip().lower())
    if count < 1:
        raise NoDevice(f"{word!r} asks for {count} devices.", remedy=f"Use `--on {name}`.")
    return count, name


def _one_device(name: str, attached: Sequence[Device], known: Catalogue) -> Device:
    """The attached device that `name` (lower case, without a count) means."""
    if name in ("here", "cpu", "cuda") or re.fullmatch(r"cuda:\d+", name):
        matches = [device for device in attached if name in ("here", device.kind, device.torch_name)]
        if matches:
            return matches[0]
        raise _not_attached(name, attached)
    entries = known.find(name)
    matches = [device for device in attached if known.describing(device) in entries]
    if matches:
        return matches[0]
    if entries:
        raise _not_attached(name, attached, entries)
    words = ["here", *(device.torch_name for device in attached), *known.words()]
    raise NoDevice(f"There is no device named {name!r}.", remedy=nearest(name, dict.fromkeys(words)))


def _not_attached(name: str, attached: Sequence[Device], entries: Sequence[CatalogueEntry] = ()) -> NoDevice:
    """The error: `name` is a device, and none of those that are attached."""
    what = f"{name} is in the catalogue ({' or '.join(e.in_words() for e in entries)}) but" if entries else name
    here = "; ".join(f"{device.torch_name} = {_in_words(device)}" for device in attached) or "nothing"
    return NoDevice(
        f"{what} is not attached to this machine. Attached: {here}.",
        remedy="Use `--on here`, or run the same command on a machine that has one."
        if attached
        else "Run the same command on a machine with a CPU or an NVIDIA GPU.",
    )


def _in_words(device: Device) -> str:
    """`NVIDIA H200, 140.4 GiB`."""
    return f"{device.model}, {format_bytes(device.memory_bytes) if device.memory_bytes else 'memory unknown'}"
