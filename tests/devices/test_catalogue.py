from __future__ import annotations

import copy
import json
from importlib.resources import files

import pytest

from stoker.devices import catalogue
from stoker.devices.catalogue import COLUMNS, load_catalogue

DOCUMENT = json.loads(files("stoker.devices").joinpath("catalogue.json").read_text(encoding="utf-8"))


def test_every_cell_has_a_source_and_a_date():
    """No figure without the document it is from and the day it was compared."""
    for entry in catalogue().entries:
        for column, cell in entry.cells.items():
            assert cell.source.title, (entry.name, column)
            assert cell.source.publisher, (entry.name, column)
            assert cell.compared_on.year >= 2026, (entry.name, column)


def test_every_source_is_used():
    """A document that supports no figure is a leftover."""
    used = {cell.source.title for entry in catalogue().entries for cell in entry.cells.values()}
    assert used == {source["title"] for source in DOCUMENT["sources"].values()}


def test_figures_in_base_units():
    """The H100's row in bytes, bytes/s and FLOP/s."""
    (h100,) = catalogue().find("h100")
    assert h100.memory_bytes == 80 * 2**30
    assert h100.reported_memory_bytes < h100.memory_bytes
    assert h100.bandwidth_bytes_per_s == 3.35e12
    assert h100.dense_flops["bf16"] == 989.4e12
    assert (h100.power_w, h100.multiprocessors, h100.compute_capability) == (700, 132, "9.0")
    assert h100.in_words() == "NVIDIA H100 SXM, 80.0 GiB"


# FMA units a multiprocessor has for fp32, and the boost clock [GHz] printed beside the rates.
LANES_AND_CLOCKS = {
    "h100": (128, 1.98),
    "h200": (128, 1.98),
    "a100-80": (64, 1.41),
    "a100-40": (64, 1.41),
    "l4": (128, 2.04),
    "t4": (64, 1.59),
    "v100-16": (64, 1.53),
    "rtx-4090": (128, 2.52),
}


@pytest.mark.parametrize("entry", catalogue().entries, ids=lambda entry: entry.name)
def test_fp32_rate_is_multiprocessors_times_lanes_times_clock(entry):
    """The vendor's fp32 rate is 2 x SMs x lanes x boost clock: a slip in the rate or in the count would show."""
    lanes, clock_ghz = LANES_AND_CLOCKS[entry.name]
    assert entry.dense_flops["fp32"] == pytest.approx(2e9 * entry.multiprocessors * lanes * clock_ghz, rel=0.01)


@pytest.mark.parametrize("entry", catalogue().entries, ids=lambda entry: entry.name)
def test_rates_are_dense_and_ordered(entry):
    """Narrower dtypes are faster by powers of two; a sparse figure taken for a dense one would show."""
    rates = entry.dense_flops
    half = rates["fp16"]
    assert rates.get("bf16", half) == half
    assert rates.get("tf32", half / 2) == pytest.approx(half / 2, rel=0.01)
    for narrow in ("fp8", "int8"):
        ratio = rates.get(narrow, 2 * half) / half
        assert ratio == pytest.approx(4 if (entry.name, narrow) == ("rtx-4090", "int8") else 2, rel=0.01)
    assert entry.reported_memory_bytes <= entry.memory_bytes


def test_finding():
    """A name means one model; an alias may leave the memory open; anything else means none."""
    assert [entry.name for entry in catalogue().find("H200")] == ["h200"]
    assert [entry.name for entry in catalogue().find("a100")] == ["a100-80", "a100-40"]
    assert catalogue().find("b200") == ()
    assert {"h100", "a100", "4090"} <= set(catalogue().words())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: row["cells"].pop("bandwidth_gb_per_s"), r"'h100': column 'bandwidth_gb_per_s' is missing"),
        (
            lambda row: row["cells"].update(memory_gb=[80, "driver", "2026-01-01"]),
            r"'memory_gb'.*Did you mean 'memory_gib'",
        ),
        (
            lambda row: row["cells"]["memory_gib"].__setitem__(0, 80 * 2**30),
            r"'h100', column 'memory_gib'.*1 to 4096 GiB",
        ),
        (lambda row: row["cells"]["memory_gib"].__setitem__(0, "80"), r"'memory_gib'.*found '80'"),
        (lambda row: row["cells"]["power_w"].__setitem__(1, "hearsay"), r"'power_w': no such source 'hearsay'"),
        (lambda row: row["cells"]["power_w"].__setitem__(2, "last May"), r"'power_w': wanted a date.*'last May'"),
        (lambda row: row["cells"]["power_w"].__setitem__(2, 2026), r"'power_w': wanted a date"),
        (lambda row: row["cells"].update(power_w=700), r"'power_w': wanted \[value, source, date\]"),
        (lambda row: row.update(name="H 100"), r"named 'H 100'"),
        (lambda row: row.update(name="l4"), r"'l4' stands for two devices"),
        (lambda row: row.update(driver_names=["NVIDIA L4"]), r"'NVIDIA L4' stands for two devices"),
        (lambda row: row.update(aliases=["l4"]), r"'l4' is a name and an alias"),
    ],
)
def test_a_bad_row_is_named(change, said):
    """Whoever adds a device is told the row, the column, what was wanted and what was found."""
    document = copy.deepcopy(DOCUMENT)
    change(next(row for row in document["devices"] if row["name"] == "h100"))
    with pytest.raises(ValueError, match=said):
        load_catalogue(json.dumps(document))


def test_every_column_is_in_use():
    """A column without a figure is not kept."""
    assert {column for entry in catalogue().entries for column in entry.cells} == set(COLUMNS)
