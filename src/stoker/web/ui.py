"""`stoker ui`: serve the page on this machine until a signal."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from stoker import web
from stoker.errors import BadJob
from stoker.imports import collector_paused
from stoker.serving.http.listener import bound_listener
from stoker.store import runs_root
from stoker.web.alerts import checked_webhooks
from stoker.web.pool import Pool
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
        announce: called with the address as soon as requests to it wait for their answers: a browser can begin to load
            while the server is being imported.

    Raises:
        BadJob: the token is too short, or an address is none.
        BadRun: the port is taken.
    """
    if token is not None and (len(token) < _LEAST_TOKEN or not token.isascii() or not token.isalnum()):
        raise BadJob(f"the token has {len(token)} characters", remedy="Give at least 16 letters and digits, or none.")
    listener = bound_listener(HOST, port)
    secret = token or secrets.token_hex(16)
    bound_port = listener.getsockname()[1]
    known_services, known_webhooks = [Service(service) for service in services], checked_webhooks(webhooks)
    listener.listen()
    announce(f"http://{HOST}:{bound_port}/?token={secret}")
    with collector_paused():
        server = web.server
    server.serve(
        server.UiOptions(
            roots=[Path(folder) for folder in folders] or [runs_root()],
            token=secret,
            port=bound_port,
            allows_changes=control,
            services=known_services,
            webhooks=known_webhooks,
            budget_usd=budget_usd,
            pool=pool,
        ),
        listener,
    )
