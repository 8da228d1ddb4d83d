"""`stoker ui`: serve the page on this machine until a signal."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from stoker.errors import BadJob
from stoker.serving.http.announced_server import AnnouncedServer, bound_listener
from stoker.store import runs_root
from stoker.web.alerts import checked_webhooks
from stoker.web.pool import Pool
from stoker.web.server import Ui, UiOptions
from stoker.web.services import Service

HOST = "127.0.0.1"
"""The only address it listens on; `ssh -L` brings it elsewhere."""

_LEAST_TOKEN = 16


def serve_ui(  # noqa: PLR0913 - what the command takes
    folders: Sequence[Path] = (),
    *,
    port: int = 8420,
    token: str | None = None,
    control: bool = False,
    services: Sequence[str] = (),
    webhooks: Sequence[str] = (),
    budget_usd: float | None = None,
    pool: Pool | None = None,
    announce: Callable[[str], None] = lambda _address: None,
) -> None:
    """Serve the page of some folders of runs until SIGINT or SIGTERM.

    Args:
        folders: with runs, or runs themselves; none: where runs are made.
        port: to listen at; 0: any free one.
        token: the secret that the address has; None: a new one.
        control: allow to stop, resume, fork and annotate runs.
        services: addresses of services' admin ports to show.
        webhooks: addresses that receive alerts.
        budget_usd: cost of a run above which there is an alert [USD].
        pool: shown on the page of places; None: none is.
        announce: called with the address once it answers.

    Raises:
        BadJob: the token is too short, or an address is none.
        BadRun: the port is taken.
    """
    if token is not None and (len(token) < _LEAST_TOKEN or not token.isascii() or not token.isalnum()):
        raise BadJob(f"the token has {len(token)} characters", remedy="Give at least 16 letters and digits, or none.")
    listener = bound_listener(HOST, port)
    secret = token or secrets.token_hex(16)
    options = UiOptions(
        roots=[Path(folder) for folder in folders] or [runs_root()],
        token=secret,
        port=listener.getsockname()[1],
        allows_changes=control,
        services=[Service(one) for one in services],
        webhooks=checked_webhooks(webhooks),
        budget_usd=budget_usd,
        pool=pool,
    )
    page = Ui(options)
    config = uvicorn.Config(
        page.application(),
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        lifespan="on",
        timeout_graceful_shutdown=1,
        http="httptools",
        ws="none",
        h11_max_incomplete_event_size=16 * 1024,
    )
    address = f"http://{HOST}:{options.port}/?token={secret}"
    AnnouncedServer(config, lambda: announce(address), page.end_streams).run(sockets=[listener])
