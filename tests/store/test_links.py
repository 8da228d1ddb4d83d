"""The cache of measured links."""

from __future__ import annotations

from pathlib import Path

from stoker.records.hardware import LinkCost, Links
from stoker.store.record_caches import links_cache

COST = LinkCost(collective="all-reduce", alpha_s=1e-3, beta_s_per_byte=1e-9, measured=((4, 1e-3), (1000, 2e-3)))
LINKS = Links(name="gloo", world_size=2, costs=(COST,), basis="measured here")


def test_links_are_kept_by_machine_and_number_of_processes(tmp_path: Path) -> None:
    """What two reach says nothing of four, nor of another machine; what cannot be read is not there."""
    cache = links_cache(tmp_path)
    assert cache.read("here", "2 processes") is None
    cache.write(LINKS, "here", "2 processes")
    assert cache.read("here", "2 processes") == LINKS
    assert cache.read("here", "4 processes") is None
    assert cache.read("there", "2 processes") is None
    (path,) = (tmp_path / "links").iterdir()
    path.write_text("{}", encoding="utf-8")
    assert cache.read("here", "2 processes") is None
