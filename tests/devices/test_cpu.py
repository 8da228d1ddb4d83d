from __future__ import annotations

import pytest

from stoker.devices import cpu
from stoker.devices.cpu import CgroupLimits, attached_cpu, describe_cpu

ZEN_4 = """\
processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model name\t: AMD EPYC
physical id\t: 0
siblings\t: 2
core id\t\t: 0
cpu cores\t: 2
flags\t\t: fpu sse4_2 avx avx2 avx512f avx512bw avx512vl avx512_bf16 avx512vbmi avx512_vnni avx512_bitalg
bogomips\t: 5192.27

processor\t: 1
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC
physical id\t: 0
core id\t\t: 1
flags\t\t: fpu sse4_2 avx avx2 avx512f avx512bw avx512vl avx512_bf16 avx512vbmi avx512_vnni avx512_bitalg
"""

SAPPHIRE_RAPIDS = """\
processor\t: 0
model name\t: Intel(R) Xeon(R)  Platinum 8480+
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu avx2 avx512f avx_vnni avx512_bf16 avx512_vnni amx_bf16 avx512_fp16 amx_tile amx_int8

processor\t: 1
model name\t: Intel(R) Xeon(R)  Platinum 8480+
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu avx2 avx512f avx_vnni avx512_bf16 avx512_vnni amx_bf16 avx512_fp16 amx_tile amx_int8

processor\t: 2
model name\t: Intel(R) Xeon(R)  Platinum 8480+
physical id\t: 1
core id\t\t: 0
flags\t\t: fpu avx2 avx512f avx_vnni avx512_bf16 avx512_vnni amx_bf16 avx512_fp16 amx_tile amx_int8

processor\t: 3
model name\t: Intel(R) Xeon(R)  Platinum 8480+
physical id\t: 1
core id\t\t: 0
flags\t\t: fpu avx2 avx512f avx_vnni avx512_bf16 avx512_vnni amx_bf16 avx512_fp16 amx_tile amx_int8
"""

HASWELL = """\
processor\t: 0
model name\t: Intel(R) Core(TM) i5-4590 CPU @ 3.30GHz
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu sse4_2 avx f16c fma avx2
"""

GRAVITON_3 = """\
processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd crc32 atomics fphp asimdhp asimddp sve asimdfhm svei8mm svebf16 i8mm bf16 dgh rng
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1

processor\t: 1
Features\t: fp asimd crc32 atomics fphp asimdhp asimddp sve asimdfhm svei8mm svebf16 i8mm bf16 dgh rng
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""

BIG_AND_LITTLE = """\
processor\t: 0
Features\t: fp asimd asimdhp asimddp i8mm bf16
CPU implementer\t: 0x41
CPU part\t: 0xd82

processor\t: 1
Features\t: fp asimd
CPU implementer\t: 0x41
CPU part\t: 0xd03
"""


def described(cpuinfo, *, affinity=(0, 1), physical=8 * 2**30, limits=None):
    """A CPU of 8 GiB with two logical CPUs in the affinity, unless said otherwise."""
    return describe_cpu(
        cpuinfo=cpuinfo,
        affinity=affinity,
        physical_bytes=physical,
        limits=limits or CgroupLimits(),
        otherwise="some chip",
    )


@pytest.mark.parametrize(
    ("cpuinfo", "model", "dtypes"),
    [
        (ZEN_4, "AMD EPYC", ("fp32", "bf16", "int8")),
        (SAPPHIRE_RAPIDS, "Intel(R) Xeon(R) Platinum 8480+", ("fp32", "bf16", "fp16", "int8")),
        (HASWELL, "Intel(R) Core(TM) i5-4590 CPU @ 3.30GHz", ("fp32",)),
        (GRAVITON_3, "Arm Neoverse V1", ("fp32", "bf16", "fp16", "int8")),
        ("", "some chip", ("fp32",)),
    ],
)
def test_model_and_fast_dtypes_of_recorded_cpus(cpuinfo, model, dtypes):
    """A dtype is fast where the flags name an instruction for it, and only there."""
    device = described(cpuinfo)
    assert (device.model, device.fast_dtypes, device.kind, device.torch_name) == (model, dtypes, "cpu", "cpu")


def test_a_dtype_is_fast_only_if_every_core_has_it():
    """On a chip of two kinds of cores, the instructions of one kind alone do not count."""
    assert described(BIG_AND_LITTLE).fast_dtypes == ("fp32",)


def test_hyper_threads_count_once():
    """Four logical CPUs on two cores are two cores; pinned to one core's pair, they are one."""
    assert described(SAPPHIRE_RAPIDS, affinity=(0, 1, 2, 3)).cores == 2
    assert described(SAPPHIRE_RAPIDS, affinity=(2, 3)).cores == 1


@pytest.mark.parametrize(("quota", "cores"), [(None, 2), (8.0, 2), (1.9, 1), (0.5, 1)])
def test_a_quota_counts_in_whole_cores(quota, cores):
    """Threads beyond the quota would be stopped in mid-product: 1.9 CPUs are one core, and so is half a CPU."""
    assert described(ZEN_4, limits=CgroupLimits(cpus=quota)).cores == cores


def test_cores_without_topology_are_the_affinity():
    """Where the system does not tell which CPUs share a core, each counts."""
    assert described(GRAVITON_3, affinity=(0, 1)).cores == 2
    assert described("", affinity=(0, 1, 2)).cores == 3


def test_memory_is_the_smaller_of_machine_and_limit():
    """A container's limit holds below the machine's memory, and never above it."""
    assert described(ZEN_4, limits=CgroupLimits(memory_bytes=2**30)).memory_bytes == 2**30
    assert described(ZEN_4, limits=CgroupLimits(memory_bytes=2**50)).memory_bytes == 8 * 2**30
    assert described(ZEN_4, physical=0).memory_bytes == 0


def test_this_machine_is_described():
    """The thin reading of this machine gives a device a planner can use."""
    device = attached_cpu()
    assert device.cores >= 1
    assert device.memory_bytes > 2**20
    assert device.fast_dtypes[0] == "fp32"
    assert device.model


def test_what_the_cores_are_is_read_once_and_how_many_at_every_call(monkeypatch):
    """A container's limits may change under a run; the CPU does not, unless the process is moved to other ones."""
    reads, text = [], cpu._text
    monkeypatch.setattr(cpu, "_text", lambda path: (reads.append(path), text(path))[1])
    cpu._cpuinfo.cache_clear()
    assert attached_cpu() == attached_cpu()
    assert (reads.count("/proc/cpuinfo"), reads.count("/proc/self/cgroup")) == (1, 2)
    monkeypatch.setattr(cpu, "usable_cpus", lambda: frozenset({0}))
    assert attached_cpu().cores == 1
    assert reads.count("/proc/cpuinfo") == 2
