"""Commands about hardware: what is here, what the catalogue knows, what it costs."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from stoker import api
from stoker.cli.terminal import AsJson, Debug, DeviceWord, print_document, reported, waiting

if TYPE_CHECKING:
    from stoker.data.image_datasets import FashionMnist


def doctor(
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, even where a result is cached.")] = False,
    on: Annotated[
        str | None, typer.Option("--on", metavar="PLACES", help="Measure links between processes as well: 2xhere, …")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Tell what this machine is, and what it really reaches (about a minute the first time, then cached)."""
    with reported(debug=debug):
        from stoker import data
        from stoker.cli.doctor import doctor_document, inspect_machine, render_doctor
        from stoker.planning.multi_device import links_between

        with waiting("measuring what the devices reach", quiet=as_json):
            found = api.doctor(fresh=fresh)
            links = () if on is None else links_between(on, fresh=fresh)
        whereabouts = {"Fashion-MNIST": _whereabouts(data.fashion_mnist()[0])}
        around = inspect_machine(data=whereabouts, load=found.load, problems=found.problems)
        if as_json:
            print_document(doctor_document(found.devices, found.ceilings, around, found.operations, links))
        else:
            render_doctor(
                found.devices, found.ceilings, console=Console(), surroundings=around, operations=found.operations,
                links=links,
            )  # fmt: skip


def devices(
    device: DeviceWord = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List devices that can be planned for, or show what is known of one, with sources."""
    with reported(debug=debug):
        from stoker.cli.devices import devices_document, render_device, render_devices
        from stoker.devices import attached_devices, catalogue, find_devices, price_list

        known, attached, prices = catalogue(), attached_devices(), price_list(date.today())  # noqa: DTZ011 - local day
        entries = known.entries if device is None else find_devices(device, known)
        if as_json:
            print_document(devices_document(entries, known, prices, attached))
        elif device is None:
            render_devices(known, prices, attached, Console())
        else:
            for entry in entries:
                render_device(entry, prices, attached, Console())


def prices(
    device: DeviceWord = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List what an hour of each device costs at least, or every offer for one."""
    with reported(debug=debug):
        from stoker.cli.devices import prices_document, render_offers, render_prices
        from stoker.devices import catalogue, find_devices, price_list

        today = date.today()  # noqa: DTZ011 - the user's day
        offers = price_list(today)
        entries = catalogue().entries if device is None else find_devices(device)
        if as_json:
            print_document(prices_document(entries, offers, today))
        elif device is None:
            render_prices(entries, offers, today, Console())
        else:
            for entry in entries:
                render_offers(entry, offers, today, Console())


def _whereabouts(source: FashionMnist) -> str:
    return "found" if source.is_here() else "not here: downloaded when asked for, else the digits in the package"
