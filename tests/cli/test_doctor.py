from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from stoker.cli.doctor import (
    Surroundings,
    doctor_document,
    find_cautions,
    interpret,
    look_around,
    operations_in_words,
    render_doctor,
)
from stoker.devices import CpuLoad, TorchBuild
from stoker.records import Ceilings, Device, MicroBenchmark, Operation, Timing, from_json

CPU = Device(
    name="cpu", kind="cpu", model="AMD EPYC", cores=2, memory_bytes=25_276_502_016, fast_dtypes=("fp32", "bf16", "int8")
)
GPU = Device(
    name="cuda:0",
    kind="cuda",
    model="NVIDIA H200",
    cores=132,
    memory_bytes=143771 * 2**20,
    fast_dtypes=("fp32", "tf32", "bf16", "fp16", "fp8", "int8"),
    driver="580.95.05",
)
ON_CPU = Ceilings(
    device=CPU,
    threads=2,
    gemm_flops={"fp32": 200e9, "bf16": 430e9},
    copy_bytes_per_s=50e9,
    fresh_copy_bytes_per_s=10e9,
    host_to_device_bytes_per_s=None,
    took_s=8.3,
    measured_at="2026-11-21T12:50:35+00:00",
    torch_version="2.13.0+cpu",
)
ON_GPU = replace(
    ON_CPU,
    device=GPU,
    threads=8,
    gemm_flops={"fp32": 50e12, "tf32": 400e12, "bf16": 791.6e12, "fp16": 750e12},
    copy_bytes_per_s=4.08e12,
    fresh_copy_bytes_per_s=4.0e12,
    host_to_device_bytes_per_s=54e9,
)
_NOTHING = Operation(name="relu", inputs=(), outputs=(), flops=0, bytes_read=0, bytes_written=0)
TIMED_ON_CPU = tuple(
    MicroBenchmark(
        device=CPU,
        threads=threads,
        timings=(Timing(operation=_NOTHING, seconds=1e-6),) * 3,
        launch_s=5e-6,
        took_s=20.0,
        measured_at="2026-11-21T12:50:35+00:00",
        torch_version="2.13.0+cpu",
    )
    for threads in (1, 2)
)
QUIET = Surroundings(
    torch=TorchBuild("2.13.0+cpu", None),
    python="3.11.7",
    system="Linux 6.8.0 x86_64",
    machine_cpus=2,
    load=CpuLoad(0.01, 0.0),
    data={"Fashion-MNIST": "found in /data/fashion-mnist"},
)


def page(devices, ceilings, around=QUIET, width=118):
    """What the page says, without colours."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    render_doctor(devices, ceilings, console=console, surroundings=around)
    return console.file.getvalue()


def test_the_page_has_the_machine_and_its_rates():
    """The model, cores, memory, dtypes, PyTorch, data and every rate with its unit are on the page."""
    said = page([CPU], [ON_CPU])
    for words in (
        "cpu = here", "AMD EPYC", "23.5 GiB", "fp32 bf16 int8", "2.13.0+cpu (no CUDA)", "/data/fashion-mnist",
        "200 GFLOP/s", "430 GFLOP/s", "50.0 GB/s", "10.0 GB/s", "2.1x fp32: a plan may use it", "5.0x slower",
        "2026-11-21 12:50:35 UTC in 8.3 s, 2 threads",
    ):  # fmt: skip
        assert words in said, words
    assert "!" not in said


def test_the_page_of_a_gpu_compares_with_the_datasheet():
    """Where the catalogue knows the model, rates are fractions of its peak."""
    said = page([GPU, CPU], [ON_GPU])
    for words in ("cuda:0 = here", "132 SMs", "140.4 GiB", "580.95.05", "80% of peak", "85% of peak", "host to device"):
        assert words in said, words


def test_what_was_timed_is_one_line():
    """How many operations, at which numbers of threads; of a GPU without threads; nothing where nothing was timed."""
    assert operations_in_words(TIMED_ON_CPU) == "cpu operations: 3 timed at 1 and 2 threads, in 40.0 s"
    assert operations_in_words(TIMED_ON_CPU[:1]) == "cpu operations: 3 timed at 1 thread, in 20.0 s"
    assert operations_in_words([replace(TIMED_ON_CPU[0], device=GPU)]) == "cuda:0 operations: 3 timed, in 20.0 s"
    assert operations_in_words([]) == ""
    console = Console(file=io.StringIO(), width=118)
    render_doctor([CPU], [ON_CPU], console=console, surroundings=QUIET, operations=TIMED_ON_CPU)
    assert "3 timed at 1 and 2 threads" in console.file.getvalue()
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


@pytest.mark.parametrize(
    ("bf16", "meaning"),
    [
        (430e9, "2.1x fp32: a plan may use it"),
        (210e9, "only 1.1x fp32: no gain for a plan"),
        (2e9, "100.0x slower than fp32: no gain for a plan"),
    ],
)
def test_what_bf16_means_follows_its_ratio(bf16, meaning):
    """The ratio decides: faster by a fifth is a gain, less is none, slower is called slower."""
    readings = interpret(replace(ON_CPU, gemm_flops={"fp32": 200e9, "bf16": bf16}))
    assert readings[1].meaning == meaning


def test_readings_relate_rates_to_each_other():
    """Shares are of the fastest product and of the copy in used memory; the ridge is fp32 over bandwidth."""
    fp32, bf16, copy, fresh = interpret(ON_CPU)
    assert (fp32.share, bf16.share, copy.share, fresh.share) == pytest.approx((200 / 430, 1.0, 1.0, 0.2))
    assert "4.0 FLOPs a byte" in copy.meaning
    assert fp32.of_datasheet is None
    on_gpu = {reading.name: reading for reading in interpret(ON_GPU)}
    assert on_gpu["matrix product bf16"].of_datasheet == pytest.approx(0.8)
    assert on_gpu["copy, memory in use"].of_datasheet == pytest.approx(0.85)
    assert on_gpu["copy, fresh memory"].meaning == "as fast as memory in use"


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
        ({"environment": {"MKL_NUM_THREADS": "1"}}, "MKL_NUM_THREADS=1 keeps other libraries on 1 of 2 cores"),
        ({"environment": {"OMP_THREAD_LIMIT": "1"}}, "OMP_THREAD_LIMIT=1 keeps PyTorch on 1 of 2 cores"),
        ({"torch": None}, "PyTorch is not installed"),
        ({"problems": ("nvidia-smi failed with exit code 9.",)}, "nvidia-smi failed with exit code 9."),
    ],
)
def test_each_trouble_is_one_caution_with_its_numbers(change, said):
    """One trouble, one sentence, with the numbers found; it is on the page and in the document."""
    around = replace(QUIET, **change)
    (caution,) = find_cautions([CPU], [ON_CPU], around)
    assert said in caution
    assert "! " in page([CPU], [ON_CPU], around)
    assert doctor_document([CPU], [ON_CPU], around)["cautions"] == [caution]


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
    """A native dtype without gain, and a measurement on fewer threads than cores, are told."""
    slow = replace(ON_CPU, gemm_flops={"fp32": 200e9, "bf16": 190e9})
    assert "multiplies bf16 natively, yet its products reach only 0.9x" in find_cautions([CPU], [slow], QUIET)[0]
    assert find_cautions([CPU], [replace(ON_CPU, threads=1)], QUIET) == ("Measured with 1 of 2 cores.",)


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


def test_looking_around_reads_the_environment_and_waits_once(monkeypatch):
    """Only variables that matter are taken; the CPU is watched unless a load is handed over."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SECRET_TOKEN", "do not show")
    waits: list[float] = []
    around = look_around(data={"digits": "inside the package"}, problems=["p"], sleep=waits.append)
    assert around.environment["OMP_NUM_THREADS"] == "3"
    assert "SECRET_TOKEN" not in around.environment
    assert (around.data, around.problems, len(waits)) == ({"digits": "inside the package"}, ("p",), 1)
    look_around(load=CpuLoad(0.0, 0.0), sleep=waits.append)
    assert len(waits) == 1


def test_the_page_never_imports_torch():
    """A cached result is shown at once: rendering loads no torch."""
    code = "import sys, stoker.cli.doctor as d; d.look_around(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
