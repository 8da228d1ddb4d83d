"""`stoker doctor`: what this machine is, what it really reaches, and what to mind; as a page and as a document.

Nothing is measured here: flow hands over the devices and the measured ceilings, `look_around` reads the surroundings.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stoker.cli.links import links_table
from stoker.cli.readings import format_si, interpret
from stoker.cli.surroundings import Surroundings, find_cautions, look_around
from stoker.devices import catalogue
from stoker.records import Ceilings, Device, MicroBenchmark, to_json
from stoker.records.codec import JSON
from stoker.records.links import Links
from stoker.units import format_bytes, format_seconds

_BAR_CELLS = 20


def render_doctor(
    devices: Sequence[Device],
    ceilings: Sequence[Ceilings],
    *,
    console: Console,
    surroundings: Surroundings | None = None,
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
    around = look_around() if surroundings is None else surroundings
    parts: list[RenderableType] = [_device_table(devices), _software(devices, around)]
    parts += [part for measured in ceilings for part in ("", _ceilings_table(measured))]
    if timed := operations_in_words(operations):
        parts += ["", Text.assemble(("forecasts of time rest on  ", "dim"), timed)]
    if not ceilings:
        parts += ["", Text("Not measured yet.", style="dim")]
    parts += [part for one in links for part in ("", links_table(one))]
    if cautions := find_cautions(devices, ceilings, around):
        parts += ["", _marked(cautions)]
    console.print(
        Panel(Group(*parts), title="[bold]stoker doctor", title_align="left", box=box.ROUNDED, padding=(1, 2))
    )


def doctor_document(
    devices: Sequence[Device],
    ceilings: Sequence[Ceilings],
    surroundings: Surroundings | None = None,
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
    around = look_around() if surroundings is None else surroundings
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
        "links": [to_json(one) for one in links],
        "surroundings": to_json(around),
        "cautions": list(find_cautions(devices, ceilings, around)),
    }


def operations_in_words(operations: Sequence[MicroBenchmark]) -> str:
    """One line of what was timed: `operations: 142 timed at 1 and 2 threads`; empty where nothing was."""
    lines = []
    for name in dict.fromkeys(benchmark.device.name for benchmark in operations):
        mine = [benchmark for benchmark in operations if benchmark.device.name == name]
        most = max(len(benchmark.timings) for benchmark in mine)
        threads = [str(benchmark.threads) for benchmark in mine]
        plural = "" if threads == ["1"] else "s"
        at = f" at {' and '.join(threads)} thread{plural}" if mine[0].device.kind == "cpu" else ""
        took = format_seconds(sum(benchmark.took_s for benchmark in mine))
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


def _software(devices: Sequence[Device], around: Surroundings) -> Table:
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


def _marked(cautions: Sequence[str]) -> Table:
    """Cautions, each behind a mark."""
    table = Table.grid(padding=(0, 1, 0, 0))
    for caution in cautions:
        table.add_row(Text("!", style="bold yellow"), caution)
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
