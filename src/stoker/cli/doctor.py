"""What this machine is, what its devices really reach, and what to mind; as a page and as JSON.

Nothing is measured here: the measured ceilings are given, and `inspect_machine` reads what is around the devices.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stoker.devices import CpuLoad, TorchBuild, catalogue, installed_torch, watch_cpu
from stoker.devices.cpu import MOST_OTHERS, MOST_STOLEN
from stoker.records import Ceilings, Device, MicroBenchmark, to_json
from stoker.records.codec import JSON
from stoker.records.hardware import Links
from stoker.units import KIB, MIB, format_bytes, format_seconds

WORTHWHILE_RATIO = 1.2
"""How much faster than fp32 a dtype must multiply before a plan would gain from it."""


@dataclass(frozen=True)
class MeasuredRate:
    """One measured rate, with what it means for a plan.

    `share` is its fraction of the fastest of its kind [0 to 1], `of_datasheet` of the vendor's figure (None: unknown).
    """

    name: str
    rate: float
    unit: str
    share: float
    of_datasheet: float | None
    meaning: str


def interpret(ceilings: Ceilings) -> tuple[MeasuredRate, ...]:
    """Every measured rate with what it means for a plan."""
    entry = catalogue().describing(ceilings.device)
    peaks = entry.dense_flops if entry else {}
    fastest, fp32 = max(ceilings.gemm_flops.values()), ceilings.gemm_flops.get("fp32")
    products = []
    for dtype, rate in ceilings.gemm_flops.items():
        of_peak = rate / peaks[dtype] if dtype in peaks else None
        meaning = _meaning_of_product(dtype, rate, fp32)
        products.append(MeasuredRate(f"matrix product {dtype}", rate, "FLOP/s", rate / fastest, of_peak, meaning))
    copy, fresh = ceilings.copy_bytes_per_s, ceilings.fresh_copy_bytes_per_s
    of_peak = copy / entry.bandwidth_bytes_per_s if entry else None
    ridge = f"the limit under {(fp32 or fastest) / copy:.1f} FLOPs a byte"
    reuse = "as fast as memory in use"
    if copy / fresh >= WORTHWHILE_RATIO:
        reuse = f"{copy / fresh:.1f}x slower: reuse saves time"
    copies = [
        MeasuredRate("copy, memory in use", copy, "B/s", 1.0, of_peak, ridge),
        MeasuredRate("copy, fresh memory", fresh, "B/s", min(1.0, fresh / copy), None, reuse),
    ]
    if (across := ceilings.host_to_device_bytes_per_s) is not None:
        meaning = "how fast a pinned batch crosses"
        copies.append(MeasuredRate("host to device", across, "B/s", min(1.0, across / copy), None, meaning))
    return (*products, *copies)


def _meaning_of_product(dtype: str, rate: float, fp32: float | None) -> str:
    """What the rate [FLOP/s] of a dtype's products means for a plan."""
    if dtype == "fp32" or not fp32:
        return "the base of comparison"
    ratio = rate / fp32
    if dtype == "fp16":
        return f"{ratio:.1f}x fp32: only if the job asks"
    if ratio >= WORTHWHILE_RATIO:
        return f"{ratio:.1f}x fp32: a plan may use it"
    slower = f"{1 / ratio:.1f}x slower than fp32" if ratio < 1 else f"only {ratio:.1f}x fp32"
    return f"{slower}: no gain for a plan"


def format_si(rate: float, unit: str) -> str:
    """A rate in decimal units with three figures.

    >>> [format_si(4.309e11, "FLOP/s"), format_si(5.9e9, "B/s"), format_si(7.9e14, "FLOP/s")]
    ['431 GFLOP/s', '5.90 GB/s', '790 TFLOP/s']
    """
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if rate >= size:
            scaled = rate / size
            return f"{scaled:.{max(0, 2 - len(str(int(scaled))) + 1)}f} {prefix}{unit}"
    return f"{rate:.0f} {unit}"


_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_THREAD_LIMIT = "OMP_THREAD_LIMIT"


@dataclass(frozen=True, kw_only=True)
class MachineConditions:
    """What is around the devices: software, data, load by other processes, settings of the environment.

    `data` says for each known data set where it is, or what would happen (`Fashion-MNIST`: `found in ...`); `problems`
    is what stood in the way of using a device; `machine_cpus` counts the whole machine's logical CPUs.
    """

    torch: TorchBuild | None
    python: str
    system: str
    machine_cpus: int | None = None
    load: CpuLoad | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def inspect_machine(
    *,
    data: Mapping[str, str] | None = None,
    problems: Iterable[str] = (),
    load: CpuLoad | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> MachineConditions:
    """The surroundings now.

    Args:
        data: where each data set is, in words.
        problems: of the survey of devices.
        load: what others used of the CPUs during the measurement; if None, the next 0.3 s are watched.
        sleep: waits that time.
    """
    names = (*_THREAD_VARIABLES, _THREAD_LIMIT, "CUDA_VISIBLE_DEVICES")
    return MachineConditions(
        torch=installed_torch(),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        machine_cpus=os.cpu_count(),
        load=watch_cpu(sleep=sleep) if load is None else load,
        environment={name: os.environ[name] for name in names if name in os.environ},
        data=dict(data or {}),
        problems=tuple(problems),
    )


def find_cautions(
    devices: Sequence[Device], ceilings: Sequence[Ceilings], around: MachineConditions
) -> tuple[str, ...]:
    """What to mind, each a sentence with its numbers and what to do."""
    cpu = next((device for device in devices if device.kind == "cpu"), None)
    cautions = list(around.problems)
    load = around.load
    if load is not None and load.others > MOST_OTHERS:
        cautions.append(
            f"Other processes are using {load.others:.0%} of this CPU now: measured rates may be too low. "
            "Run `stoker doctor` again when they are done."
        )
    if load is not None and load.stolen > MOST_STOLEN:
        cautions.append(
            f"The host takes {load.stolen:.0%} of this virtual machine's CPU time: expect slower, uneven steps."
        )
    if around.torch is None:
        cautions.append("PyTorch is not installed: install torch, then nothing else is missing.")
    if cpu is not None:
        cautions += _thread_cautions(around.environment, cpu.cores)
    cautions += [caution for measured in ceilings for caution in _ceiling_cautions(measured)]
    return tuple(cautions)


def _thread_cautions(environment: Mapping[str, str], cores: int) -> list[str]:
    """Cautions about thread variables. A plan sets PyTorch's number itself, up to OMP_NUM_THREADS or `--threads`."""
    cautions = []
    for name in (*_THREAD_VARIABLES, _THREAD_LIMIT):
        value = environment.get(name, "")
        threads = int(value) if value.isdigit() else 0
        if name == _THREAD_LIMIT and 0 < threads < cores:
            cautions.append(
                f"{name}={value} keeps PyTorch on {value} of {cores} cores, whatever the plan says. Unset it."
            )
        elif name != _THREAD_LIMIT and threads > cores:
            cautions.append(f"{name}={value} makes other libraries use more threads than the {cores} cores. Unset it.")
        elif name != _THREAD_LIMIT and 0 < threads < cores:
            whom = "plans and other libraries" if name == "OMP_NUM_THREADS" else "other libraries"
            remedy = "`--threads` is stronger." if name == "OMP_NUM_THREADS" else "Unset it."
            cautions.append(f"{name}={value} keeps {whom} on {value} of {cores} cores. {remedy}")
    return cautions


def _ceiling_cautions(ceilings: Ceilings) -> list[str]:
    """Cautions about unexpected measured rates."""
    cautions = []
    fp32 = ceilings.gemm_flops.get("fp32")
    for dtype in ("bf16", "fp16", "tf32"):
        rate = ceilings.gemm_flops.get(dtype)
        if rate and fp32 and dtype in ceilings.device.fast_dtypes and rate < WORTHWHILE_RATIO * fp32:
            cautions.append(
                f"{ceilings.device.model} multiplies {dtype} natively, yet its products reach only {rate / fp32:.1f}x "
                "of fp32: this build of PyTorch may not use the instructions."
            )
    if ceilings.device.kind == "cpu" and ceilings.threads < ceilings.device.cores:
        cautions.append(f"Measured with {ceilings.threads} of {ceilings.device.cores} cores.")
    return cautions


_SIZES = (4, 64 * KIB, MIB, 64 * MIB)
"""Sizes of the messages shown [bytes]."""


def links_table(links: Links) -> Table:
    """Times of each collective over a few sizes, and notes on processes that work side by side."""
    when = links.measured_at.replace("T", " ").replace("+00:00", " UTC")
    title = Text.assemble(
        (f"{links.world_size} processes reach", "bold"),
        (f"   {links.name}, measured {when} in ", "dim"),
        (format_seconds(links.took_s), "dim"),
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", title=title, title_justify="left", title_style="")
    table.add_column("")
    for size in _SIZES:
        table.add_column(format_bytes(size), justify="right", no_wrap=True)
    table.add_column("large messages", justify="right", no_wrap=True)
    for cost in links.costs:
        rate = f"{1e-9 / cost.beta_s_per_byte:.2f} GB/s" if cost.beta_s_per_byte else "unknown"
        table.add_row(cost.collective, *(format_seconds(cost.seconds(size)) for size in _SIZES), rate)
    notes = [f"{links.overlap:.0%} of a message overlaps with arithmetic"]
    notes += [
        f"with all at work, what is bound by {name} takes {ratio:.2f}x as long"
        for name, ratio in links.slowdown.items()
    ]
    notes += [
        f"a message that all stop for after {format_seconds(arithmetic_s)} takes {format_seconds(wait_s)} longer"
        for arithmetic_s, wait_s in links.waits
    ]
    table.caption, table.caption_justify = Text(" · ".join(notes), "dim"), "left"
    return table


_BAR_CELLS = 20


def render_doctor(
    devices: Sequence[Device],
    ceilings: Sequence[Ceilings],
    *,
    console: Console,
    surroundings: MachineConditions | None = None,
    operations: Sequence[MicroBenchmark] = (),
    links: Sequence[Links] = (),
) -> None:
    """Show the page.

    Args:
        devices: what is attached, best first.
        ceilings: what was measured, at most one for a device; those without are shown as not measured.
        console: where to.
        surroundings: as they are; looked up now if None.
        operations: times of single operations, from which forecasts are made.
        links: what several processes reach between them.
    """
    around = inspect_machine() if surroundings is None else surroundings
    parts: list[RenderableType] = [_device_table(devices), _software(devices, around)]
    parts += [part for measured in ceilings for part in ("", _ceilings_table(measured))]
    if timed := describe_operations(operations):
        parts += ["", Text.assemble(("forecasts of time rest on  ", "dim"), timed)]
    if not ceilings:
        parts += ["", Text("Not measured yet.", style="dim")]
    parts += [part for link in links for part in ("", links_table(link))]
    if cautions := find_cautions(devices, ceilings, around):
        marks = Table.grid(padding=(0, 1, 0, 0))
        for caution in cautions:
            marks.add_row(Text("!", style="bold yellow"), caution)
        parts += ["", marks]
    console.print(
        Panel(Group(*parts), title="[bold]stoker doctor", title_align="left", box=box.ROUNDED, padding=(1, 2))
    )


def doctor_document(
    devices: Sequence[Device],
    ceilings: Sequence[Ceilings],
    surroundings: MachineConditions | None = None,
    operations: Sequence[MicroBenchmark] = (),
    links: Sequence[Links] = (),
) -> dict[str, JSON]:
    """The same as one JSON document: devices and ceilings as records, rates in FLOP/s and bytes/s.

    Args:
        devices: what is attached, best first.
        ceilings: what was measured.
        surroundings: as they are; looked up now if None.
        operations: times of single operations, of which the document has how many there are.
        links: what several processes reach between them.
    """
    around = inspect_machine() if surroundings is None else surroundings
    known = catalogue()
    entries = {device.name: known.describing(device) for device in devices}
    return {
        "schema": 1,
        "devices": [to_json(device) for device in devices],
        "catalogue": {name: entry.name if entry else None for name, entry in entries.items()},
        "ceilings": [to_json(measured) for measured in ceilings],
        "readings": {
            measured.device.name: [to_json(reading) for reading in interpret(measured)] for measured in ceilings
        },
        "operations": [
            {
                "device": benchmark.device.name,
                "threads": benchmark.threads,
                "timed": len(benchmark.timings),
                "launch_s": benchmark.launch_s,
                "took_s": benchmark.took_s,
                "measured_at": benchmark.measured_at,
            }
            for benchmark in operations
        ],
        "links": [to_json(link) for link in links],
        "surroundings": to_json(around),
        "cautions": list(find_cautions(devices, ceilings, around)),
    }


def describe_operations(operations: Sequence[MicroBenchmark]) -> str:
    """One line of what was timed: `cpu operations: 142 timed at 1 and 2 threads`; empty where nothing was."""
    lines = []
    for name in dict.fromkeys(benchmark.device.name for benchmark in operations):
        mine = [benchmark for benchmark in operations if benchmark.device.name == name]
        most = max(len(benchmark.timings) for benchmark in mine)
        threads = [str(benchmark.threads) for benchmark in mine]
        plural = "" if threads == ["1"] else "s"
        at = f" at {' and '.join(threads)} thread{plural}" if mine[0].device.kind == "cpu" else ""
        took = format_seconds(sum(benchmark.took_s for benchmark in mine))
        if not most:
            each = format_seconds(mine[0].launch_s)
            lines.append(f"{mine[0].device.torch_name} operations: this host starts one in {each}, timed in {took}")
            continue
        lines.append(f"{mine[0].device.torch_name} operations: {most} timed{at}, in {took}")
    return "; ".join(lines)


def _device_table(devices: Sequence[Device]) -> Table:
    """The devices, a line each."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for title in ("place", "device", "cores", "memory", "multiplies natively", "driver"):
        table.add_column(title, justify="right" if title == "cores" else "left")
    for number, device in enumerate(devices):
        table.add_row(
            Text(device.torch_name, style="bold cyan") + Text(" = here" if number == 0 else "", style="dim"),
            Text(device.model, style="bold"),
            f"{device.cores} {'SMs' if device.kind == 'cuda' else ''}".strip() if device.cores else "unknown",
            format_bytes(device.memory_bytes) if device.memory_bytes else "unknown",
            " ".join(device.fast_dtypes),
            device.driver if device.kind == "cuda" else "",
        )
    return table


def _software(devices: Sequence[Device], around: MachineConditions) -> Table:
    """Software, data and load, a line each."""
    cores = next((device.cores for device in devices if device.kind == "cpu"), 0)
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_row("", "")
    table.add_row(Text("PyTorch", style="dim"), str(around.torch) if around.torch else "not installed")
    table.add_row(Text("Python", style="dim"), f"{around.python} on {around.system}")
    for name, where in around.data.items():
        table.add_row(Text(name, style="dim"), where)
    cpu = [f"{around.load.others:.0%} used by other processes now"] if around.load else []
    if around.machine_cpus and cores < around.machine_cpus:
        # The rest are hyper-threads, or withheld by an affinity or a container's quota.
        cpu.append(f"{cores} cores usable of {around.machine_cpus} logical CPUs")
    if cpu:
        table.add_row(Text("CPU", style="dim"), " · ".join(cpu))
    return table


def _ceilings_table(ceilings: Ceilings) -> Table:
    """What one device reaches, with bars."""
    plural = "s" if ceilings.threads != 1 else ""
    threads = f", {ceilings.threads} thread{plural}" if ceilings.device.kind == "cpu" else ""
    when = ceilings.measured_at.replace("T", " ").replace("+00:00", " UTC")
    said = f"   measured {when} in {format_seconds(ceilings.took_s)}{threads}"
    title = Text.assemble((f"{ceilings.device.torch_name} reaches", "bold"), (said, "dim"))
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, title=title, title_justify="left", title_style="")
    justified: tuple[JustifyMethod, ...] = ("left", "left", "right", "left")
    for justify in justified:
        table.add_column(justify=justify, no_wrap=True)
    table.add_column()
    for reading in interpret(ceilings):
        is_product = reading.unit == "FLOP/s"
        bar = Text("━" * max(1, round(reading.share * _BAR_CELLS)), style="green" if is_product else "blue")
        of_datasheet = "" if reading.of_datasheet is None else f"{reading.of_datasheet:.0%} of peak"
        rate = format_si(reading.rate, reading.unit)
        table.add_row(reading.name, bar, rate, Text(of_datasheet, style="dim"), Text(reading.meaning, style="dim"))
    return table
