"""`stoker doctor`, `devices` and `prices`: the hardware that is here, what the catalogue knows, what it costs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from stoker import api, cli
from stoker.cli.terminal import AsJson, DeviceWord, print_document, waiting


def doctor(
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, even where a result is cached.")] = False,
    on: Annotated[
        str | None, typer.Option("--on", metavar="PLACES", help="Measure links between processes as well: 2xhere, …")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what this machine is, and what it really reaches (about a minute the first time, then cached)."""
    with waiting("measuring what the devices reach", quiet=as_json):
        result = api.doctor(fresh=fresh)
        links = () if on is None else api.links_between(on, fresh=fresh)
    is_here = api.data.fashion_mnist()[0].is_here()
    where = "found" if is_here else "not here: downloaded when asked for, else the digits in the package"
    around = cli.doctor.inspect_machine(data={"Fashion-MNIST": where}, load=result.load, problems=result.problems)
    if as_json:
        print_document(cli.doctor.doctor_document(result.devices, result.ceilings, around, result.operations, links))
    else:
        cli.doctor.render_doctor(
            result.devices,
            result.ceilings,
            console=Console(),
            surroundings=around,
            operations=result.operations,
            links=links,
        )


def devices(device: DeviceWord = None, as_json: AsJson = False) -> None:
    """List devices that can be planned for, or show what is known of one, with sources."""
    cli.devices.show_devices(device, as_json=as_json)


def prices(device: DeviceWord = None, as_json: AsJson = False) -> None:
    """List what an hour of each device costs at least, or every offer for one."""
    cli.devices.show_prices(device, as_json=as_json)
