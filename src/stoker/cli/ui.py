"""`stoker ui`, and the page that `stoker train --ui` serves during a run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from stoker import api, cli, pool
from stoker.cli.pool import KeyName, PoolWord
from stoker.errors import BadJob, ServiceError
from stoker.units import parse_money

DEFAULT_PORT = 8420


def ui(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUNS]...", help="Folders of runs, or runs (default: ./runs).")
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one.")] = DEFAULT_PORT,
    token: Annotated[
        str | None, typer.Option("--token", metavar="T", help="The secret in the address (default: a new one).")
    ] = None,
    control: Annotated[bool, typer.Option("--control", help="Allow to stop, resume, fork and tag runs.")] = False,
    service: Annotated[
        list[str] | None,
        typer.Option("--service", metavar="URL", help="Show a service by its admin port, such as 127.0.0.1:8002."),
    ] = None,
    webhook: Annotated[
        list[str] | None, typer.Option("--webhook", metavar="URL", help="Send alerts there, as JSON.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="USD", help="Alert when a run costs more, such as 20usd.")
    ] = None,
    pool_word: PoolWord = None,
    key: KeyName = "default",
) -> None:
    """Show runs, plans, studies and services on a local page; only this machine reaches it."""
    missing = [name for name in ("starlette", "uvicorn", "httptools", "orjson") if find_spec(name) is None]
    if missing:
        raise ServiceError(
            f"the page needs {', '.join(missing)}, which is not installed here", remedy="pip install 'stoker[ui]'"
        )
    address = pool_word or os.environ.get("STOKER_POOL", "")
    if address:
        with suppress(ModuleNotFoundError):  # the page of places says what to install; the others do without
            pool.PoolAddress.parse(address)
    for folder in folders or ():
        if not folder.is_dir():
            if os.path.lexists(folder):
                raise BadJob(f"{folder} is no folder of runs", remedy="Give a folder of runs, or a run's own.")
            print(f"stoker ui: there is no folder {folder} yet; its runs are shown once it is there.", file=sys.stderr)
    command = [sys.executable, "-m", "stoker.pool.overview", "--pool", address, "--key", key]
    cli.web.ui.serve_ui(
        folders or (),
        port=port,
        token=token,
        control=control,
        services=service or (),
        webhooks=webhook or (),
        budget_usd=None if budget is None else parse_money(budget, "--budget"),
        pool=cli.web.pool.Pool(command, f"the pool {address.partition('#')[0]}") if address else None,
        announce=lambda address: print(f"stoker ui: {address}", flush=True),
    )


@contextmanager
def local_page(is_enabled: bool, run_dir: Path | None) -> Iterator[None]:
    """Serve the page of the folder of runs within the block, from a child process, which prints its address."""
    if not is_enabled:
        yield
        return
    folder = api.runs_root() if run_dir is None else run_dir.parent  # which may not be there yet
    environment = {**os.environ, "STOKER_RUNS": str(folder), "STOKER_POOL": ""}
    page = subprocess.Popen([sys.executable, "-m", "stoker", "ui", "--port", "0"], stdout=sys.stderr, env=environment)
    try:
        yield
    finally:
        page.terminate()
        page.wait()
