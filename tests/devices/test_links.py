"""Links by the catalogue: the formulas of rings, and what is assumed where nothing is known."""

from __future__ import annotations

import pytest

from stoker.devices.catalogue import builtin_catalogue
from stoker.devices.cluster import Cluster, Wire, catalogue_links, parse_network, ring_costs, unmeasured_links
from stoker.errors import BadJob

KNOWN = builtin_catalogue()


def test_a_ring_moves_what_its_formulas_say() -> None:
    """Of 8 GB among 4 over 1 GB/s: three quarters gathered or sent to all, twice that summed; hops add up."""
    costs = {one.collective: one for one in ring_costs((Wire("a wire", 1e9, 1e-6, 1.0),), 4)}
    assert costs["all-gather"].beta_s_per_byte * 8e9 == pytest.approx(6.0)
    assert costs["all-reduce"].beta_s_per_byte * 8e9 == pytest.approx(12.0)
    assert costs["all-to-all"].beta_s_per_byte * 8e9 == pytest.approx(6.0)
    assert costs["point-to-point"].beta_s_per_byte * 8e9 == pytest.approx(8.0)
    assert costs["all-reduce"].alpha_s - costs["all-gather"].alpha_s == pytest.approx(3e-6)


def test_links_of_a_node_are_those_of_the_row_and_between_nodes_they_are_assumed() -> None:
    """Eight H100 have NVLink; sixteen, or eight at a stride of eight, need a network that no row knows."""
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
    """64 neighbours share eight cards a machine, 8 at a stride of eight have one; the network bounds both."""
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


def test_a_ring_of_many_machines_waits_for_each_of_them() -> None:
    """Gathers over 1,024 devices begin with a step for each, which takes longer than a block's bytes."""
    (h100,) = KNOWN.find("h100")
    starts_s = {size: catalogue_links(h100, size).cost("all-gather").alpha_s for size in (8, 64, 128, 1024)}
    assert starts_s[1024] == pytest.approx(8 * starts_s[128], rel=0.02)
    assert starts_s[1024] > 100 * starts_s[8]
    # A block of a model of 8 billion parameters, 436 MB in bf16, moves in less time than that.
    moving_s = 436e6 * catalogue_links(h100, 1024).cost("all-gather").beta_s_per_byte
    assert moving_s < starts_s[1024]
    assert starts_s[64] < moving_s


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


@pytest.mark.parametrize("name", ["a40", "h100-nvl", "rtx-3090"])
def test_a_bridge_joins_two_and_no_more(name: str) -> None:
    """Four meet over PCI Express; that a pair has a bridge is assumed, and said, until it is denied."""
    (entry,) = KNOWN.find(name)
    pair, four = catalogue_links(entry, 2), catalogue_links(entry, 4)
    assert "NVLink bridge" in pair.name
    assert (pair.basis, "taken to have a bridge" in pair.note) == ("unknown", True)
    assert four.name == "PCI Express"
    pcie = entry.value("pcie_gb_per_s") * 1e9 * 0.5
    assert four.cost("all-gather").beta_s_per_byte == pytest.approx(3 / 4 / pcie)
    without = catalogue_links(entry, 2, cluster=parse_network("domain=1", Cluster.of(entry)))
    assert without.name == "PCI Express"
    assert without.seconds("all-reduce", 1e9) > 1.5 * pair.seconds("all-reduce", 1e9)


def test_islands_of_a_machine_meet_over_pci_express() -> None:
    """Of eight A100 in two islands of four, four have NVLink and eight are as slow as PCI Express between them."""
    (a100,) = KNOWN.find("a100-80")
    islands = parse_network("8x200gbit,domain=4", Cluster.of(a100))
    assert catalogue_links(a100, 4, cluster=islands) == catalogue_links(a100, 4)
    eight, across = catalogue_links(a100, 8, cluster=islands), catalogue_links(a100, 2, stride=4, cluster=islands)
    assert (eight.name, across.name) == ("PCI Express", "PCI Express")
    assert "islands of 4" in eight.note
    assert eight.cost("all-gather").beta_s_per_byte == pytest.approx(7 / 8 / (31.51e9 * 0.5))
    assert catalogue_links(a100, 16, cluster=islands).name == "network"


@pytest.mark.parametrize(("node", "domain"), [(4, 2), (2, 2), (1, 1)])
def test_islands_stay_as_large_in_smaller_machines(node: int, domain: int) -> None:
    """Pairs with a bridge, in machines of four, two and one."""
    (a40,) = KNOWN.find("a40")
    cluster = Cluster.of(a40).with_nodes(node)
    assert (cluster.node_devices, cluster.domain_devices) == (node, domain)


def test_a_network_that_nobody_stated_is_one_card_for_all_of_a_machine() -> None:
    """Machines of eight L4 are rented with 100 Gbit/s for all eight, so that each has an eighth of it."""
    (l4,) = KNOWN.find("l4")
    cluster = Cluster.of(l4)
    assert cluster.device_bytes_per_s == 100 / 8 * 1e9 / 8
    assert cluster.in_words() == "1 card of 100 Gbit/s for 8 devices"
    assert cluster.with_nodes(1).device_bytes_per_s == 100 / 8 * 1e9
    spread = catalogue_links(l4, 2, stride=8)
    assert spread.cost("all-gather").beta_s_per_byte == pytest.approx(0.5 / (100 / 8 * 1e9 / 8 * 0.8))


def test_each_gh200_is_a_machine_of_its_own() -> None:
    """Its 900 GB/s lead to its own CPU; the next one is a network away."""
    (gh200,) = KNOWN.find("gh200")
    links = catalogue_links(gh200, 2)
    assert links.name == "network"
    assert links.cost("all-gather").beta_s_per_byte == pytest.approx(0.5 / (400 / 8 * 1e9 * 0.8))


def test_a_model_that_nobody_knows_has_slow_links() -> None:
    """No row: PCI Express 3.0, and the basis is unknown."""
    links = catalogue_links(None, 2)
    assert links.basis == "unknown"
    assert "16 GB/s" in links.note


def test_processes_here_that_nobody_measured_say_how_to_measure_them() -> None:
    """The note names the command."""
    assert "stoker doctor --on" in unmeasured_links(2).note
