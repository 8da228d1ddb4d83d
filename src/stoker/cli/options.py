"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

JobFile = Annotated[
    Path, typer.Argument(metavar="JOB", help="A Python file with a function `job`.", show_default=False)
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Set a parameter of `job`; may be repeated.")
]
Place = Annotated[str, typer.Option("--on", metavar="PLACE", help="The device: here, cpu, cuda:0, …")]
Objective = Literal["time", "money", "energy"]
Places = Annotated[
    str, typer.Option("--on", metavar="PLACES", help="Devices to compare: here, or h100,l4,rtx4090, or all.")
]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", metavar="FILE", help="Use this plan; `stoker plan --json` writes one.")
]
Memory = Annotated[
    str | None, typer.Option("--memory", metavar="BYTES", help="The most of a device's memory to use, such as 6GB.")
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", help="The most threads on a CPU; without it OMP_NUM_THREADS, or the cores."),
]
DeviceMtbf = Annotated[
    float | None,
    typer.Option(
        "--device-mtbf", metavar="HOURS", help="Mean time of one device between two failures: how often to save."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]
DeviceWord = Annotated[
    str | None, typer.Argument(metavar="DEVICE", help="A name such as h100, rtx-4090.", show_default=False)
]
RunWord = Annotated[str, typer.Argument(metavar="RUN", help="A run's directory, its name, or `latest`.")]
