"""What processes here reach between them: measured once, and kept for plans."""

from __future__ import annotations

import torch

from stoker.devices import Place, attached_devices, cache_key, load_between, planned_devices, sample_cpu
from stoker.errors import NoDevice
from stoker.flow.layouts import kept_links
from stoker.profiling.links import measure_links
from stoker.records.links import Links
from stoker.store import cache_root
from stoker.store.links import LinksCache


def links_between(on: str, *, fresh: bool = False) -> tuple[Links, ...]:
    """The links of places such as `2xhere`, a CPU's processes or a machine's GPUs, as measured now or before.

    What was measured while others used the CPU is told, and not kept.

    Args:
        on: places of several devices that are here; those of one have no links.
        fresh: measure even what is kept.

    Raises:
        NoDevice: a word is unknown, or means what is not here.
        RunFailed: measuring fails.
    """
    return tuple(_links_of(place, fresh=fresh) for place in _places(on))


def _places(on: str) -> list[Place]:
    places = [place for place in planned_devices(on, attached_devices()) if place.count > 1]
    for place in places:
        if not place.is_here:
            raise NoDevice(f"{place.name} is not here: its links cannot be measured.",
                           remedy="Use --on 2xhere, or run the same command where they are.")  # fmt: skip
    return places


def _links_of(place: Place, *, fresh: bool) -> Links:
    known = None if fresh else kept_links(place, place.count)
    if known is not None:
        return known
    before = sample_cpu()
    found = measure_links(place.device, place.count, threads=place.cores_each if place.device.kind == "cpu" else 1)
    after = sample_cpu()
    # Processes that were waited for are this one's own.
    if before is None or after is None or load_between(before, after).is_quiet:
        LinksCache(cache_root() / "links").write(cache_key(place.device, torch.__version__), found)
    return found
