"""`stoker devices`: the table, one device cell by cell, JSON, and words that mean nothing."""

from __future__ import annotations

import json
from datetime import date

import pytest

from stoker.cli.devices import devices_document, render_device, render_devices
from stoker.devices import Catalogue, PriceList
from stoker.devices.catalogue import builtin_catalogue
from stoker.devices.prices import builtin_prices, marked
from stoker.records import Device
from tests.cli.page import Page
from tests.flow.command import stoker_here

KNOWN = builtin_catalogue()
PRICES = PriceList(marked(builtin_prices(), date(2026, 11, 21)))
CPU = Device(name="cpu", kind="cpu", model="AMD EPYC", cores=2, memory_bytes=2**34, fast_dtypes=("fp32",))
L4 = Device(name="cuda:0", kind="cuda", model="NVIDIA L4", cores=58, memory_bytes=23034 * 2**20, fast_dtypes=("fp32",))


def table(width: int, known: Catalogue = KNOWN, prices: PriceList = PRICES) -> str:
    """What `stoker devices` prints in a terminal of that width, with a CPU and an L4 attached."""
    console = Page(width)
    render_devices(known, prices, (L4, CPU), console)
    return console.text


def page(name: str, attached=()) -> str:
    """What `stoker devices NAME` prints."""
    console = Page(80)
    (entry,) = KNOWN.find(name)
    render_device(entry, PRICES, attached, console)
    return console.text


@pytest.mark.parametrize("width", [80, 100, 140])
def test_every_device_has_a_line_that_nothing_is_cut_from(width):
    """Names, figures and prices are whole in the narrowest terminal; wider ones say where, and the full name."""
    shown = table(width)
    lines = {line[2:].split()[0]: line for line in shown.splitlines() if line[2:].strip()}
    assert set(lines) >= {entry.name for entry in KNOWN.entries}
    assert "…" not in shown
    assert all(len(line.rstrip()) <= width for line in shown.splitlines())
    assert lines["h100"].split()[:9] == ["h100", "80", "GiB", "3.35", "TB/s", "989", "66.9", "700", "W"]
    assert ("Vast.ai" in lines["h100"]) == (width >= 100)
    assert ("NVIDIA H100 SXM" in lines["h100"]) == (width >= 140)


def test_what_is_here_comes_first_and_is_marked():
    """The attached L4 has its catalogue's figures and its mark in the list; of the CPU nothing is made up."""
    lines = table(140).splitlines()
    here = lines[lines.index(next(line for line in lines if line.startswith("here"))) + 1 :][:2]
    assert here[0].split() == [
        "●",
        "cuda:0",
        "22.5",
        "GiB",
        "300",
        "GB/s",
        "121",
        "30.3",
        "72",
        "W",
        "NVIDIA",
        "L4,",
        "58",
        "multiprocessors",
    ]
    assert here[1].split()[:8] == ["●", "cpu", "16.0", "GiB", "–", "–", "–", "–"]
    assert any(line.startswith("● l4 ") for line in lines)
    assert any(line.startswith("  t4 ") for line in lines)


def test_unknown_is_said_and_old_is_marked():
    """No price is a dash, an undated one has a star."""
    lines = {line.split()[0]: line.rstrip() for line in table(80).splitlines() if line.strip()}
    assert lines["p4"].endswith("–")
    assert lines["tpu-v4"].endswith("*")


def test_problems_of_files_are_told():
    """Of the catalogue's and of the prices'."""
    shown = table(
        80, KNOWN.with_rows([], ["mine.json, device 'x': a slip"]), PriceList(PRICES.prices, ("a bad price",))
    )
    assert "! mine.json, device 'x': a slip" in shown
    assert "! a bad price" in shown


def test_one_device_cell_by_cell():
    """Each figure with the number of its source and the day; the sources below; what is missing; the price."""
    shown = page(
        "h200",
        attached=[
            Device(name="cuda:0", kind="cuda", model="NVIDIA H200", cores=132, memory_bytes=2**37, fast_dtypes=())
        ],
    )
    assert "NVIDIA H200 SXM" in shown
    assert "● here: cuda:0" in shown
    assert "  memory bandwidth                       4,800 GB/s  [1]  2026-11-21" in shown
    assert "half of the 1,979 printed for structured sparsity" in shown
    assert "[1] NVIDIA H200 Tensor Core GPU Datasheet. NVIDIA." in shown
    assert "stoker plan JOB.py --on h200" in shown
    assert "  on demand from $3.59/h at RunPod (community), seen 2026-10-05" in shown
    assert "  spot      from $2.00/h at Verda (DataCrunch), seen 2026-08-23" in shown


def test_a_device_without_time_model_price_or_some_figure():
    """Each said in a sentence."""
    assert "No time model yet" in page("mi210")
    assert "No price is known" in page("mi210")
    assert "not known: memory the driver offers; power, doing nothing" in page("a2")


def test_json_is_one_document():
    """Every cell with value, unit, source, date and note; what is attached; the cheapest offer."""
    document = devices_document(KNOWN.find("l4"), KNOWN, PRICES, (L4, CPU))
    document = json.loads(json.dumps(document))
    assert [device["name"] for device in document["attached"]] == ["cuda:0", "cpu"]
    (l4,) = document["devices"]
    assert (l4["name"], l4["kind"], l4["attached"], l4["can_be_planned"]) == ("l4", "cuda", ["cuda:0"], True)
    assert l4["usable_memory_bytes"] == 23034 * 2**20
    cell = l4["cells"]["dense_tflops_bf16"]
    assert (cell["value"], cell["unit"], cell["compared_on"]) == (121, "TFLOP/s", "2026-11-21")
    assert cell["source"]["publisher"] == "NVIDIA"
    assert "242" in cell["note"]
    assert l4["cheapest"]["usd_per_hour"] == min(price["usd_per_hour"] for price in l4["prices"])


def test_the_command_prints_the_table_a_device_and_json():
    """With the files of the machine; every model an alias may mean."""
    assert "h100" in stoker_here("devices").out
    shown = stoker_here("devices", "A100").out
    assert shown.index("NVIDIA A100 SXM 80 GB") < shown.index("NVIDIA A100 SXM 40 GB")
    document = json.loads(stoker_here("devices", "rtx4090", "--json").out)
    assert [device["name"] for device in document["devices"]] == ["rtx-4090"]
    assert len(json.loads(stoker_here("devices", "--json").out)["devices"]) >= len(KNOWN.entries)


@pytest.mark.parametrize("command", ["devices", "prices"])
def test_an_unknown_device_exits_with_2_and_the_nearest_names(command):
    """On standard error, in two lines."""
    outcome = stoker_here(command, "h10O", "--json")
    assert (outcome.code, outcome.out) == (2, "")
    assert "There is no device named 'h10O'" in outcome.err
    assert "Did you mean 'h100'" in outcome.err
