from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from stoker.cli.doctor import describe_operations, doctor_document, render_doctor
from stoker.records import Ceilings, Device, from_json
from tests.cli.machines import CPU, GPU, ON_CPU, ON_GPU, QUIET, TIMED_ON_CPU
from tests.cli.page import Page


def page(devices, ceilings, around=QUIET, width=118):
    """What the page says, without colours."""
    console = Page(width)
    render_doctor(devices, ceilings, console=console, surroundings=around)
    return console.text


def test_the_page_has_the_machine_and_its_rates():
    """The model, cores, memory, dtypes, PyTorch, data and every rate with its unit are on the page."""
    said = page([CPU], [ON_CPU])
    for words in (
        "cpu = here",
        "AMD EPYC",
        "23.5 GiB",
        "fp32 bf16 int8",
        "2.13.0+cpu (no CUDA)",
        "/data/fashion-mnist",
        "200 GFLOP/s",
        "430 GFLOP/s",
        "50.0 GB/s",
        "10.0 GB/s",
        "2.1x fp32: a plan may use it",
        "5.0x slower",
        "2026-11-21 12:50:35 UTC in 8.3 s, 2 threads",
    ):
        assert words in said, words
    assert "!" not in said


def test_the_page_of_a_gpu_compares_with_the_datasheet():
    """Where the catalogue knows the model, rates are fractions of its peak."""
    said = page([GPU, CPU], [ON_GPU])
    for words in ("cuda:0 = here", "132 SMs", "140.4 GiB", "580.95.05", "80% of peak", "85% of peak", "host to device"):
        assert words in said, words


def test_what_was_timed_is_one_line():
    """How many operations, at which numbers of threads; of a GPU without threads; nothing where nothing was timed."""
    assert describe_operations(TIMED_ON_CPU) == "cpu operations: 3 timed at 1 and 2 threads, in 40.0 s"
    assert describe_operations(TIMED_ON_CPU[:1]) == "cpu operations: 3 timed at 1 thread, in 20.0 s"
    assert describe_operations([replace(TIMED_ON_CPU[0], device=GPU)]) == "cuda:0 operations: 3 timed, in 20.0 s"
    assert describe_operations([]) == ""
    console = Page(118)
    render_doctor([CPU], [ON_CPU], console=console, surroundings=QUIET, operations=TIMED_ON_CPU)
    assert "3 timed at 1 and 2 threads" in console.text
    assert "timed at" not in page([CPU], [ON_CPU])


def test_the_document_says_what_was_timed():
    """A line for each number of threads, without the hundreds of times."""
    document = doctor_document([CPU], [ON_CPU], QUIET, TIMED_ON_CPU)
    assert [(one["threads"], one["timed"]) for one in document["operations"]] == [(1, 3), (2, 3)]


def test_a_page_without_measurements_says_so():
    """Before the first measurement the machine is shown all the same."""
    said = page([CPU], [])
    assert "Not measured yet" in said
    assert "AMD EPYC" in said


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_page_fits_the_terminal(width):
    """No line is longer than the terminal is wide."""
    assert max(len(line) for line in page([GPU, CPU], [ON_GPU, ON_CPU], width=width).splitlines()) <= width


def test_unknowns_are_called_unknown():
    """A device of unknown size is not said to have 0 bytes or 0 cores."""
    said = page([replace(GPU, model="NVIDIA GB10", cores=0, memory_bytes=0)], [])
    assert said.count("unknown") == 2
    assert "0 B" not in said


def test_what_to_mind_is_on_the_page_and_in_the_document():
    """In the same words."""
    around = replace(QUIET, torch=None)
    (caution,) = doctor_document([CPU], [ON_CPU], around)["cautions"]
    assert caution.startswith("PyTorch is not installed")
    assert "! PyTorch is not installed" in page([CPU], [ON_CPU], around)


def test_cores_withheld_are_shown():
    """Somebody in a container sees that the machine has more CPUs than the job may use."""
    assert "2 cores usable of 64 logical CPUs" in page([CPU], [ON_CPU], replace(QUIET, machine_cpus=64))


def test_the_document_is_json_and_its_records_can_be_read_back():
    """What a program reads has rates in base units, records as records, and nothing JSON cannot hold."""
    document = json.loads(json.dumps(doctor_document([GPU, CPU], [ON_GPU, ON_CPU], QUIET), allow_nan=False))
    assert [from_json(device, Device) for device in document["devices"]] == [GPU, CPU]
    assert [from_json(measured, Ceilings) for measured in document["ceilings"]] == [ON_GPU, ON_CPU]
    assert document["catalogue"] == {"cuda:0": "h200", "cpu": None}
    assert document["readings"]["cpu"][1]["rate"] == 430e9
    assert document["surroundings"]["torch"] == {"version": "2.13.0+cpu", "cuda": None}


def test_the_page_never_imports_torch():
    """A cached result is shown at once: rendering loads no torch."""
    code = "import sys, stoker.cli.doctor as s; s.inspect_machine(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
