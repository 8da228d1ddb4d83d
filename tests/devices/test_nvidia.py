from __future__ import annotations

import stat

import pytest

from stoker.devices import detection
from stoker.devices.detection import (
    GpuAnswer,
    TorchBuild,
    ask_nvidia_smi,
    describe_gpus,
    fast_dtypes_of_capability,
    survey,
)

TWO_H200 = """\
0, GPU-91a535d7-4157-249a-65e5-73883afa626e, NVIDIA H200, 143771, 9.0, 580.95.05
1, GPU-0c2e7fb1-11aa-4a04-8f4e-0f4d70f0b8a3, NVIDIA H200, 143771, 9.0, 580.95.05
"""

MIXED = """\
0, GPU-aaaa1111-0000-0000-0000-000000000000, Tesla T4, 15360, 7.5, 535.183.01
1, GPU-aaaa2222-0000-0000-0000-000000000000, NVIDIA GeForce RTX 3050, 12288, 8.6, 535.183.01
2, GPU-bbbb3333-0000-0000-0000-000000000000, NVIDIA GeForce RTX 4090, 24564, 8.9, 535.183.01
"""


def test_recorded_table_gives_devices():
    """Memory is in bytes, cores are the catalogue's multiprocessors, dtypes follow the compute capability."""
    first, second = describe_gpus(TWO_H200)
    assert (first.name, first.torch_name, second.torch_name) == ("cuda:0", "cuda:0", "cuda:1")
    assert first.model == "NVIDIA H200"
    assert first.memory_bytes == 143771 * 2**20
    assert first.cores == 132
    assert first.fast_dtypes == ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
    assert first.driver == "580.95.05"
    assert first.compute_capability == "9.0"


def test_what_is_not_known_is_not_invented():
    """Unknown multiprocessors and memory are 0, and without a capability only fp32 is fast."""
    assert describe_gpus(MIXED)[1].cores == 0
    silent = describe_gpus("0, GPU-1, NVIDIA GB10, [N/A], [N/A], 580.95.05\n")[0]
    assert (silent.memory_bytes, silent.fast_dtypes, silent.compute_capability) == (0, ("fp32",), "")


@pytest.mark.parametrize(
    "table", ["", "No devices were found\n", "\n\n", "NVIDIA-SMI has failed, because, a, b, c, d\n"]
)
def test_messages_are_not_gpus(table):
    """Where there is no GPU, nvidia-smi prints a sentence; it is not a device."""
    assert describe_gpus(table) == ()


@pytest.mark.parametrize(
    ("visible", "models"),
    [
        (None, ["Tesla T4", "NVIDIA GeForce RTX 3050", "NVIDIA GeForce RTX 4090"]),
        ("2,0", ["NVIDIA GeForce RTX 4090", "Tesla T4"]),
        ("GPU-bbbb", ["NVIDIA GeForce RTX 4090"]),
        ("GPU-aaaa", []),
        ("0,7,1", ["Tesla T4"]),
        ("1,1", ["NVIDIA GeForce RTX 3050"]),
        ("", []),
        ("-1", []),
    ],
)
def test_visible_devices_as_cuda_counts_them(visible, models):
    """CUDA_VISIBLE_DEVICES orders and hides: the list ends at the first entry that is not exactly one GPU."""
    devices = describe_gpus(MIXED, visible)
    assert [device.model for device in devices] == models
    assert [device.index for device in devices] == list(range(len(models)))


def test_a_slice_of_a_gpu_is_left_out_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Slurm names one: else the CPU would be used, and nothing say why."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-4b6c1f2e-0000-0000-0000-000000000000")
    monkeypatch.setattr(detection, "ask_nvidia_smi", lambda: GpuAnswer(table=TWO_H200))
    monkeypatch.setattr(detection, "installed_torch", lambda: TorchBuild("2.13.0+cu130", "13.0"))
    found = survey()
    assert [device.kind for device in found.devices] == ["cpu"]
    (problem,) = found.problems
    assert "a slice of a GPU (MIG-4b6c1f2e-" in problem
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert survey().problems == ()


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [
        ("6.1", ("fp32",)),
        ("7.0", ("fp32", "fp16")),
        ("7.5", ("fp32", "fp16", "int8")),
        ("8.6", ("fp32", "tf32", "bf16", "fp16", "int8")),
        ("10.0", ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")),
        ("12.0", ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")),
    ],
)
def test_dtypes_by_capability(capability, dtypes):
    """Versions compare as numbers: 10.0 is newer than 8.9."""
    assert fast_dtypes_of_capability(capability) == dtypes


def script(path, lines):
    """An executable shell script."""
    path.write_text("#!/bin/sh\n" + lines)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_no_program_is_no_problem(tmp_path):
    """A machine without nvidia-smi has no NVIDIA GPU, and nothing to complain of."""
    answer = ask_nvidia_smi([str(tmp_path / "nvidia-smi")])
    assert (answer.table, answer.problem) == ("", None)


def test_the_answer_is_the_table(tmp_path):
    """What the program prints is handed on."""
    answer = ask_nvidia_smi([script(tmp_path / "smi", f"cat <<'END'\n{TWO_H200}END\n")])
    assert len(describe_gpus(answer.table)) == 2
    assert answer.problem is None


def test_a_failing_program_is_a_problem_in_words(tmp_path):
    """A driver that does not match is reported with the program's own words, and no table is read from it."""
    answer = ask_nvidia_smi(
        [script(tmp_path / "smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")]
    )
    assert answer.table == ""
    assert "exit code 18" in answer.problem
    assert "version mismatch" in answer.problem


def test_a_hanging_program_is_given_up(tmp_path):
    """A driver that hangs does not hang Stoker."""
    answer = ask_nvidia_smi([script(tmp_path / "smi", "exec sleep 60\n")], timeout_s=0.2)
    assert "did not answer within 0.2 s" in answer.problem


def test_a_file_that_is_no_program_is_a_problem_in_words(tmp_path):
    """A broken installation is a sentence, not a traceback."""
    broken = tmp_path / "smi"
    broken.write_text("")
    broken.chmod(0o700)
    broken.write_bytes(b"\x7fELF nonsense")
    assert "could not be started" in ask_nvidia_smi([str(broken)]).problem
