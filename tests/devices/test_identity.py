from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.devices import cache_key
from stoker.records import Device

H200 = Device(
    name="cuda:0", kind="cuda", model="NVIDIA H200", cores=132, memory_bytes=2**37, fast_dtypes=("fp32",), driver="580"
)


def test_key_names_the_device_and_is_fit_for_a_file():
    """A person finds the file of a device, on any file system."""
    key = cache_key(replace(H200, model="Intel(R) Xeon(R) / 8480+ @ 2.0GHz"), "2.13.0+cu130")
    assert key.startswith("cuda-intel-r-xeon-r-8480-2-0ghz-")
    assert set(key) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert cache_key(H200, "2.13.0") == cache_key(H200, "2.13.0")


@pytest.mark.parametrize(
    "change",
    [{"model": "NVIDIA H100"}, {"index": 1}, {"cores": 1}, {"driver": "590"}, {"fast_dtypes": ("fp32", "bf16")}],
)
def test_what_changes_speed_changes_the_key(change):
    """Measurements of one device are not taken for those of another."""
    assert cache_key(replace(H200, **change), "2.13.0") != cache_key(H200, "2.13.0")
    assert cache_key(H200, "2.13.0+cpu") != cache_key(H200, "2.13.0+cu130")


def test_memory_does_not_change_the_key():
    """The bytes of memory differ from boot to boot, and the measurements still hold."""
    assert cache_key(replace(H200, memory_bytes=1), "2.13.0") == cache_key(H200, "2.13.0")
