"""Links by the catalogue: the formulas of rings, and what is assumed where nobody knows."""

from __future__ import annotations

import pytest

from stoker.devices.catalogue import builtin_catalogue
from stoker.devices.hardware import Wire, catalogue_links, ring_costs, unmeasured_links

KNOWN = builtin_catalogue()


def test_a_ring_moves_what_its_formulas_say() -> None:
    """Of 8 GB among 4 over 1 GB/s: three quarters gathered, twice that summed; hops add up."""
    costs = {one.collective: one for one in ring_costs(Wire("a wire", 1e9, 1e-6, 1.0), 4)}
    assert costs["all-gather"].beta_s_per_byte * 8e9 == pytest.approx(6.0)
    assert costs["all-reduce"].beta_s_per_byte * 8e9 == pytest.approx(12.0)
    assert costs["point-to-point"].beta_s_per_byte * 8e9 == pytest.approx(8.0)
    assert costs["all-reduce"].alpha_s - costs["all-gather"].alpha_s == pytest.approx(3e-6)


def test_links_of_a_node_are_those_of_the_row_and_between_nodes_they_are_assumed() -> None:
    """Eight H100 have NVLink; sixteen, or eight that are eight apart, need a network that no row knows."""
    (h100,) = KNOWN.find("h100")
    inside = catalogue_links(h100, 8)
    assert (inside.name, inside.basis, inside.note) == ("NVLink 4", "datasheet", "")
    # NCCL's bus bandwidth over eight: 360 GB/s of 450 one way.
    assert 1e9 * 2 * 7 / 8 / (inside.seconds("all-reduce", 1e9) - inside.cost("all-reduce").alpha_s) == pytest.approx(
        360e9, rel=0.01
    )
    for between in (catalogue_links(h100, 16), catalogue_links(h100, 2, stride=8)):
        assert between.basis == "unknown"
        assert "not known" in between.note
        assert between.spread > inside.spread
        assert between.seconds("all-reduce", 1e9) > inside.seconds("all-reduce", 1e9)


def test_a_ring_over_nodes_uses_the_cards_of_all_its_devices_in_a_node() -> None:
    """64 neighbours share eight cards a node, 8 that are eight apart have one; what one device sends has its own."""
    (h100,) = KNOWN.find("h100")
    flat, strided = catalogue_links(h100, 64), catalogue_links(h100, 8, stride=8)
    for collective in ("all-reduce", "all-gather", "reduce-scatter"):
        per_byte = flat.cost(collective).beta_s_per_byte / (63 / 64), strided.cost(collective).beta_s_per_byte / (7 / 8)
        assert per_byte[0] == pytest.approx(per_byte[1] / 8)
    for collective in ("all-to-all", "point-to-point"):
        assert flat.cost(collective).beta_s_per_byte == pytest.approx(
            strided.cost(collective).beta_s_per_byte, rel=0.15
        )


def test_a_bridge_joins_two_and_no_more() -> None:
    """Four A40 meet over PCI Express, and the note says that this is assumed."""
    (a40,) = KNOWN.find("a40")
    assert catalogue_links(a40, 2).name == "NVLink bridge"
    four = catalogue_links(a40, 4)
    assert four.name == "PCI Express"
    assert "32 GB/s each way" in four.note


def test_a_model_that_nobody_knows_has_slow_links() -> None:
    """No row: PCI Express 3.0, and the basis is unknown."""
    links = catalogue_links(None, 2)
    assert links.basis == "unknown"
    assert "16 GB/s" in links.note


def test_processes_here_that_nobody_measured_say_how_to_measure_them() -> None:
    """The note names the command."""
    assert "stoker doctor --on" in unmeasured_links(2).note
