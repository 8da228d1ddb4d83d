from __future__ import annotations

import dataclasses

from stoker.records import Device, Environment

CPU = Device(name="cpu", kind="cpu", model="a CPU", cores=2, memory_bytes=2**33, fast_dtypes=("fp32",))
ENVIRONMENT = Environment(
    device_model="a CPU",
    device_kind="cpu",
    threads=2,
    torch_version="2.13.0",
    python_version="3.11.7",
    platform="Linux",
    libraries={"mkl": "1", "numpy": "2"},
    flags={},
)


def test_a_device_has_the_name_that_pytorch_gives_it() -> None:
    """There is one CPU; GPUs are numbered."""
    assert CPU.torch_name == "cpu"
    assert dataclasses.replace(CPU, kind="cuda", index=1).torch_name == "cuda:1"


def test_an_environment_is_named_by_what_it_holds() -> None:
    """Equal surroundings, equal name, whatever the order in which libraries were found; others, another."""
    reordered = dataclasses.replace(ENVIRONMENT, libraries={"numpy": "2", "mkl": "1"})
    assert reordered.digest() == ENVIRONMENT.digest()
    assert len(ENVIRONMENT.digest()) == 12
    assert dataclasses.replace(ENVIRONMENT, threads=1).digest() != ENVIRONMENT.digest()
