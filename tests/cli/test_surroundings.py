from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.cli.doctor import find_cautions, inspect_machine
from stoker.devices import CpuLoad
from tests.cli.machines import CPU, ON_CPU, QUIET


def test_a_quiet_well_set_machine_has_no_cautions():
    """No warning without a reason."""
    assert find_cautions([CPU], [ON_CPU], QUIET) == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"load": CpuLoad(0.4, 0.0)}, "Other processes are using 40% of this CPU"),
        ({"load": CpuLoad(0.0, 0.08)}, "The host takes 8%"),
        (
            {"environment": {"OMP_NUM_THREADS": "16"}},
            "OMP_NUM_THREADS=16 makes other libraries use more threads than the 2",
        ),
        (
            {"environment": {"OMP_NUM_THREADS": "1"}},
            "OMP_NUM_THREADS=1 keeps plans and other libraries on 1 of 2 cores. `--threads` is",
        ),
        ({"environment": {"MKL_NUM_THREADS": "1"}}, "MKL_NUM_THREADS=1 keeps other libraries on 1 of 2 cores"),
        ({"environment": {"OMP_THREAD_LIMIT": "1"}}, "OMP_THREAD_LIMIT=1 keeps PyTorch on 1 of 2 cores"),
        ({"torch": None}, "PyTorch is not installed"),
        ({"problems": ("nvidia-smi failed with exit code 9.",)}, "nvidia-smi failed with exit code 9."),
    ],
)
def test_each_trouble_is_one_caution_with_its_numbers(change, said):
    """One trouble, one sentence, with the numbers found."""
    around = replace(QUIET, **change)
    (caution,) = find_cautions([CPU], [ON_CPU], around)
    assert said in caution


@pytest.mark.parametrize(
    "environment",
    [
        {"OMP_NUM_THREADS": "2"},
        {"OMP_NUM_THREADS": "4,2"},
        {"OMP_NUM_THREADS": ""},
        {"OMP_THREAD_LIMIT": "64"},
        {"OMP_THREAD_LIMIT": "2"},
    ],
)
def test_harmless_settings_are_not_warned_of(environment):
    """The cores' own number, nested settings and loose limits change nothing."""
    assert find_cautions([CPU], [ON_CPU], replace(QUIET, environment=environment)) == ()


def test_rates_that_surprise_are_cautions():
    """A native dtype without gain, and a measurement on fewer threads than cores, are reported."""
    slow = replace(ON_CPU, gemm_flops={"fp32": 200e9, "bf16": 190e9})
    assert "multiplies bf16 natively, yet its products reach only 0.9x" in find_cautions([CPU], [slow], QUIET)[0]
    assert find_cautions([CPU], [replace(ON_CPU, threads=1)], QUIET) == ("Measured with 1 of 2 cores.",)


def test_looking_around_reads_the_environment_and_waits_once(monkeypatch):
    """Only variables that matter are taken; the CPU is watched unless a load is handed over."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SECRET_TOKEN", "do not show")
    waits: list[float] = []
    around = inspect_machine(data={"digits": "inside the package"}, problems=["p"], sleep=waits.append)
    assert around.environment["OMP_NUM_THREADS"] == "3"
    assert "SECRET_TOKEN" not in around.environment
    assert (around.data, around.problems, len(waits)) == ({"digits": "inside the package"}, ("p",), 1)
    inspect_machine(load=CpuLoad(0.0, 0.0), sleep=waits.append)
    assert len(waits) == 1
