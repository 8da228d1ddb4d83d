from __future__ import annotations

import dataclasses

import pytest

from stoker.devices import device_of, hardware_of
from stoker.devices.catalogue import builtin_catalogue
from stoker.devices.hardware import with_similar_figures
from stoker.errors import NoDevice
from stoker.records import Device

KNOWN = builtin_catalogue()


def entry(name: str):
    """The built-in entry of that name."""
    (one,) = KNOWN.find(name)
    return one


def test_a_device_of_the_catalogue():
    """Every figure of an H100, in base units; the device has the memory that its driver offers."""
    hardware = hardware_of(entry("h100"))
    assert (hardware.device.name, hardware.device.kind, hardware.device.cores) == ("h100", "cuda", 132)
    assert hardware.device.memory_bytes == 81559 * 2**20
    assert {"tf32", "bf16", "fp8"} < set(hardware.device.fast_dtypes)
    assert hardware.dense_flops["bf16"] == 989.4e12
    assert hardware.bandwidth_bytes_per_s == 3.35e12
    assert (hardware.multiprocessors, hardware.compute_capability, hardware.l2_bytes) == (132, "9.0", 50 * 2**20)
    assert (hardware.power_w, hardware.idle_w) == (700, 70)
    assert hardware.host_link_bytes_per_s == pytest.approx(16 * 32e9 * 128 / 130 / 8, rel=1e-3)
    assert hardware.basis == "datasheet"


def test_what_is_not_known_is_none():
    """No idle power was read on an A2, and none is made up."""
    assert hardware_of(entry("a2")).idle_w is None


def test_every_device_that_can_be_planned_for_has_what_a_forecast_needs():
    """Rates, bandwidth, memory and power; the memory model's and time model's kinds."""
    for one in KNOWN.entries:
        if one.can_be_planned:
            hardware = hardware_of(one)
            assert hardware.dense_flops["fp32"] > 0, one.name
            assert hardware.bandwidth_bytes_per_s, one.name
            assert hardware.power_w, one.name
            assert hardware.device.memory_bytes == one.usable_memory_bytes, one.name
            assert (hardware.multiprocessors is None) == (one.kind == "cpu"), one.name


@pytest.mark.parametrize(("name", "whose"), [("mi300x", "AMD"), ("tpu-v5e", "TPU")])
def test_no_time_model_no_plan(name, whose):
    """An AMD GPU or a TPU is refused in words, with where its figures are."""
    with pytest.raises(NoDevice, match=f"no time model for {whose}") as caught:
        device_of(entry(name))
    assert f"stoker devices {name}" in caught.value.remedy


def test_an_attached_gpu_is_found_by_its_drivers_name():
    """It keeps its own memory and driver; the figures are the catalogue's."""
    here = Device(
        name="cuda:1",
        kind="cuda",
        index=1,
        model="NVIDIA L4",
        cores=58,
        memory_bytes=2**34,
        fast_dtypes=("fp32",),
        driver="580",
    )
    hardware = hardware_of(here, KNOWN)
    assert hardware.device is here
    assert (hardware.power_w, hardware.multiprocessors) == (72, 58)


def test_an_attached_device_nobody_described():
    """All that is known comes from the device itself."""
    here = Device(
        name="cuda:0",
        kind="cuda",
        model="NVIDIA X",
        cores=7,
        memory_bytes=2**34,
        fast_dtypes=("fp32",),
        compute_capability="8.9",
    )
    hardware = hardware_of(here, KNOWN)
    assert (hardware.dense_flops, hardware.bandwidth_bytes_per_s, hardware.power_w) == ({}, None, None)
    assert (hardware.multiprocessors, hardware.compute_capability) == (7, "8.9")


def test_an_unknown_gpu_is_most_like_one_of_its_capability_and_memory():
    """Of the Hopper GPUs the one with 141 GB; it stays itself. A known one, or one of no known capability, has none."""
    here = Device(
        name="cuda:0",
        kind="cuda",
        model="NVIDIA X",
        cores=0,
        memory_bytes=141 * 10**9,
        fast_dtypes=("fp32", "bf16"),
        compute_capability="9.0",
    )
    figures, like = with_similar_figures(hardware_of(here, KNOWN), KNOWN)
    assert (figures.device, like.name) == (here, "h200")
    assert figures.dense_flops == like.dense_flops
    assert with_similar_figures(hardware_of(entry("h100")), KNOWN) is None
    assert with_similar_figures(hardware_of(dataclasses.replace(here, compute_capability=""), KNOWN), KNOWN) is None


def test_some_cores_of_a_cpu_have_their_share():
    """Of 96 cores 24 compute and draw a quarter; what bandwidth neighbours leave is not known."""
    whole = device_of(entry("epyc-9654"))
    part = Device(name="cpu", kind="cpu", model=whole.model, cores=24, memory_bytes=2**36, fast_dtypes=("fp32",))
    full, share = hardware_of(whole, KNOWN), hardware_of(part, KNOWN)
    assert share.dense_flops["fp32"] == pytest.approx(full.dense_flops["fp32"] / 4)
    assert share.power_w == full.power_w / 4
    assert full.bandwidth_bytes_per_s == 460.8e9
    assert share.bandwidth_bytes_per_s is None
