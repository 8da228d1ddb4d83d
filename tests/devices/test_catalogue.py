from __future__ import annotations

import dataclasses
from datetime import date

import pytest

from stoker.devices.catalogue import (
    COLUMNS,
    LEAST_USABLE,
    Catalogue,
    CatalogueEntry,
    builtin_catalogue,
    normalized_name,
)
from stoker.records import Device
from tests.cases import each_of

KNOWN = builtin_catalogue()
CUDA = [entry for entry in KNOWN.entries if entry.kind == "cuda"]

every_entry = each_of(KNOWN.entries, name=lambda entry: entry.name)
every_gpu = each_of(CUDA, name=lambda entry: entry.name)


def one(name: str) -> CatalogueEntry:
    """The built-in entry of that name."""
    (entry,) = KNOWN.find(name)
    return entry


def test_there_are_devices_to_choose_from():
    """At least 35 models that can be planned for, and others one can compare with."""
    assert sum(entry.can_be_planned for entry in KNOWN.entries) >= 35
    assert {entry.kind for entry in KNOWN.entries} == {"cuda", "rocm", "tpu", "cpu"}


@every_entry
def test_every_cell_has_a_source_and_a_date(entry):
    """No figure without the document it is from and the day it was compared; what is worked out says how."""
    for column, cell in entry.cells.items():
        assert cell.source.title, column
        assert cell.source.publisher, column
        assert date(2026, 8, 1) <= cell.compared_on <= date(2026, 11, 26), column
        assert cell.source.publisher != "Stoker" or cell.note, f"{column}: from what?"


def test_every_column_is_in_use():
    """A column without a figure is not kept."""
    assert {column for entry in KNOWN.entries for column in entry.cells} == set(COLUMNS)


def test_figures_in_base_units():
    """The H100's row in bytes, bytes/s and FLOP/s."""
    h100 = one("h100")
    assert h100.memory_bytes == 80 * 2**30
    assert h100.usable_memory_bytes == h100.reported_memory_bytes == 81559 * 2**20
    assert h100.bandwidth_bytes_per_s == 3.35e12
    assert h100.dense_flops["bf16"] == 989.4e12
    assert (h100.power_w, h100.multiprocessors, h100.compute_capability, h100.cores) == (700, 132, "9.0", None)
    assert h100.in_words() == "NVIDIA H100 SXM, 80.0 GiB"


# FMA units a multiprocessor has for fp32, where they are not 128. Source: CUDA C++ Programming Guide, "Arithmetic
# Instructions".
LANES = {"6.0": 64, "7.0": 64, "7.5": 64, "8.0": 64}


@every_gpu
def test_fp32_rate_is_multiprocessors_times_lanes_times_clock(entry):
    """The fp32 rate is 2 x SMs x lanes x boost clock: a slip in a rate, a count or a clock would show."""
    lanes = LANES.get(entry.compute_capability, 128)
    rate = 2e9 * entry.multiprocessors * lanes * entry.value("boost_ghz")
    assert entry.dense_flops["fp32"] == pytest.approx(rate, rel=0.01)


@every_gpu
def test_rates_are_dense_and_ordered(entry):
    """Narrower dtypes are faster by powers of two; a sparse figure taken for a dense one would show."""
    rates = entry.dense_flops
    if (half := rates.get("fp16")) is None:
        assert entry.compute_capability == "6.1"
        return
    assert rates.get("bf16", half) == half
    assert rates.get("tf32", half / 2) == pytest.approx(half / 2, rel=0.02)
    for narrow in ("fp8", "int8"):
        ratio = rates.get(narrow, 2 * half) / half
        assert ratio == pytest.approx(4 if (entry.name, narrow) == ("rtx-4090", "int8") else 2, rel=0.02)


@every_gpu
def test_the_driver_offers_less_than_is_printed(entry):
    """Usable memory is below the printed figure, never by more than `LEAST_USABLE` says."""
    assert int(LEAST_USABLE * entry.memory_bytes) <= entry.usable_memory_bytes <= entry.memory_bytes


@every_entry
def test_idle_power_is_a_part_of_the_limit(entry):
    """A device that does nothing draws less than half its limit."""
    if (idle := entry.value("idle_w")) is not None:
        assert idle < 0.5 * entry.power_w


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("H200", ["h200"]),
        ("h100-80g", ["h100"]),
        ("a100-80GB", ["a100-80"]),
        ("a100", ["a100-80", "a100-40"]),
        ("rtx4090", ["rtx-4090"]),
        ("4090", ["rtx-4090"]),
        ("NVIDIA GeForce RTX 4090", ["rtx-4090"]),
        ("Tesla T4", ["t4"]),
        ("a10g", ["a10g"]),
        ("a10", ["a10"]),
        ("v100-32gb", ["v100-32"]),
        ("trillium", ["tpu-v6e"]),
        ("", []),
        ("gb", []),
        ("h1000", []),
    ],
)
def test_finding(word, names):
    """A name means one model however it is written; an alias may leave the memory open; anything else means none."""
    assert [entry.name for entry in KNOWN.find(word)] == names


def test_every_word_finds_its_device():
    """A name or alias is found by itself, by its capitals, and with spaces for dashes."""
    for entry in KNOWN.entries:
        for word in (entry.name, *entry.aliases):
            for spelling in (word, word.upper(), word.replace("-", " "), word.replace("-", "")):
                assert entry in KNOWN.find(spelling), spelling
        assert KNOWN.find(entry.name) == (entry,)
    assert {"h100", "a100", "4090"} <= set(KNOWN.words())


def test_spelling_does_not_matter():
    """Capitals, dashes, spaces and the vendor's name are not part of a word."""
    assert normalized_name("NVIDIA RTX-A6000") == normalized_name("rtx a6000") == "rtxa6000"


def test_a_cpu_is_described_only_as_a_whole():
    """Two cores of a server's CPU, as virtual machines have, are not the device of the catalogue."""
    whole = Device(
        name="cpu",
        kind="cpu",
        model="AMD EPYC 9654 96-Core Processor",
        cores=96,
        memory_bytes=2**38,
        fast_dtypes=("fp32",),
    )
    assert KNOWN.describing(whole) == one("epyc-9654")
    assert KNOWN.describing(dataclasses.replace(whole, cores=2)) is None
    assert KNOWN.called(whole.model) == one("epyc-9654")
    assert KNOWN.describing(dataclasses.replace(whole, model="something else")) is None


def test_rows_of_a_user_replace_those_of_their_name():
    """The rest stays, in its order; problems are kept."""
    mine = dataclasses.replace(one("l4"), title="My L4")
    wider = Catalogue(KNOWN.entries).with_rows([mine, dataclasses.replace(mine, name="l5")], ["one thing"])
    assert wider.find("l4")[0].title == "My L4"
    assert len(wider.entries) == len(KNOWN.entries) + 1
    assert wider.problems == ("one thing",)
