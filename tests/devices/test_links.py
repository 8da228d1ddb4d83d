"""Links by the catalogue: the formulas of rings, and what is assumed where nobody knows."""

from __future__ import annotations

import pytest

from stoker.devices.catalogue import builtin_catalogue
from stoker.devices.cluster import Cluster, Wire, catalogue_links, parse_network, ring_costs, unmeasured_links
from stoker.errors import BadJob

KNOWN = builtin_catalogue()


def test_a_ring_moves_what_its_formulas_say() -> None:
    """Of 8 GB among 4 over 1 GB/s: three quarters gathered, twice that summed; hops add up."""
    costs = {one.collective: one for one in ring_costs((Wire("a wire", 1e9, 1e-6, 1.0),), 4)}
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
        assert between.name == "network"
        assert "DGX H100" in between.note
        assert between.spread > inside.spread
        assert between.seconds("all-reduce", 1e9) > inside.seconds("all-reduce", 1e9)
    (l40s,) = KNOWN.find("l40s")
    unknown = catalogue_links(l40s, 16)
    assert (unknown.basis, "not known" in unknown.note) == ("unknown", True)


def test_a_ring_over_machines_uses_the_cards_of_all_its_members_in_one() -> None:
    """64 neighbours share eight cards a machine, 8 that are eight apart have one; the network bounds both."""
    (h100,) = KNOWN.find("h100")
    flat, strided = catalogue_links(h100, 64), catalogue_links(h100, 8, stride=8)
    card = 400 / 8 * 1e9 * 0.8
    for collective in ("all-reduce", "all-gather", "reduce-scatter"):
        times = 2 if collective == "all-reduce" else 1
        assert flat.cost(collective).beta_s_per_byte == pytest.approx(times * 63 / 64 / (8 * card))
        assert strided.cost(collective).beta_s_per_byte == pytest.approx(times * 7 / 8 / card)
    assert flat.cost("point-to-point").beta_s_per_byte == pytest.approx(1 / card)
    # Of what a device sends to all 64, 56 parts leave its machine over its share of the cards.
    assert flat.cost("all-to-all").beta_s_per_byte == pytest.approx(56 / 64 / card)


def test_a_faster_network_than_the_links_within_leaves_these_the_bound() -> None:
    """Eight cards of 800 Gbit/s beat an A100's NVLink, which a ring passes too."""
    (a100,) = KNOWN.find("a100-80")
    fast = catalogue_links(a100, 64, cluster=parse_network("8x800gbit", Cluster.of(a100)))
    inside = catalogue_links(a100, 8)
    assert fast.cost("all-gather").beta_s_per_byte / (63 / 64) == pytest.approx(
        inside.cost("all-gather").beta_s_per_byte / (7 / 8)
    )


def test_oversubscription_begins_beyond_the_first_switch() -> None:
    """16 machines under one switch have the whole network, 32 a fourth of it."""
    (h100,) = KNOWN.find("h100")
    cluster = parse_network("8x400gbit,oversubscription=4,leaf=16", Cluster.of(h100))
    near, far = catalogue_links(h100, 128, cluster=cluster), catalogue_links(h100, 256, cluster=cluster)
    per_byte = [one.cost("all-gather").beta_s_per_byte / (1 - 1 / one.world_size) for one in (near, far)]
    assert per_byte[1] == pytest.approx(4 * per_byte[0])
    assert near.basis == "datasheet"
    assert near.note == ""


def test_a_domain_of_72_has_no_network_between_its_machines() -> None:
    """GB200: 72 devices over NVLink; 144 need cards."""
    (gb200,) = KNOWN.find("gb200")
    assert catalogue_links(gb200, 72).name == "NVLink 5"
    assert catalogue_links(gb200, 144).name == "network"


def test_a_network_file_says_what_words_say(tmp_path) -> None:
    """The same keys, as TOML; a broken one names the file."""
    (h100,) = KNOWN.find("h100")
    file = tmp_path / "cluster.toml"
    file.write_text('network = "4x200gbit"\noversubscription = 2\nleaf = 8\n', encoding="utf-8")
    assert parse_network(str(file), Cluster.of(h100)) == parse_network(
        "4x200gbit,oversubscription=2,leaf=8", Cluster.of(h100)
    )
    file.write_text("network = ", encoding="utf-8")
    with pytest.raises(BadJob, match=r"cluster\.toml"):
        parse_network(str(file), Cluster.of(h100))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("fast", "wanted cards of a machine times their rate"),
        ("0x400gbit", "0 cards"),
        ("8x400gbit,oversubscription=0.5", "oversubscription is '0.5'"),
        ("8x400gbit,leafs=4", "no key 'leafs'"),
        ("8x400gbit,domain=12", "domain of 12 devices does not divide machines of 8"),
    ],
)
def test_a_network_that_cannot_be_is_refused_with_what_could(words: str, why: str) -> None:
    """Each names the number and what would do."""
    (h100,) = KNOWN.find("h100")
    with pytest.raises(BadJob, match=why) as caught:
        parse_network(words, Cluster.of(h100))
    assert caught.value.remedy


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
