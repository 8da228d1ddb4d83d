"""Other people's machines as a place: `stoker train job.py --on pool`; what is done there is `renting.py`.

This module is also imported where a run is executed, without the packages that a renter needs.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import PlaceFailed
from stoker.launching.launcher import Handle, Launcher, LaunchTarget, Offer, Probe, Request, Submission
from stoker.records.launch import LaunchState

if TYPE_CHECKING:
    from stoker.jobs import Entry, Job
    from stoker.pool import renting
else:

    class _Renting:
        """The module `renting`, which is loaded at its first use: it needs what places lack."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):  # what looks at objects, such as doctest, loads nothing
                raise AttributeError(name)
            try:
                return getattr(importlib.import_module("stoker.pool.renting"), name)
            except ModuleNotFoundError as problem:
                raise PlaceFailed(
                    f"a pool needs {problem.name}, which is not installed here", remedy="pip install 'stoker[pool]'"
                ) from problem

    renting = _Renting()

_ONE_MACHINE = "A lease is of one machine, with all devices of its offer: pool/8xh100."


class PoolLauncher(Launcher):
    """Agents of a pool."""

    kind = "pool"
    syntax = "pool[:OFFER][/[Nx]cpu|DEVICE]"
    options = (
        *("pool", "key", "verify", "bond", "block", "window", "isolation"),
        *("deadline", "value", "forwarding", "p2p", "move", "probed", "wait", "agents"),
    )
    limits_time = True
    is_one_place = True

    def parse(self, text: str) -> LaunchTarget:
        """An offer by name, or the best; and the device to ask for."""
        match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})?(?:/(\S+))?", text.strip())
        if match is None:
            raise self.unreadable(text, "pool or pool:box")
        shape = self.shape_in(text, match[2] or "here", one_node=_ONE_MACHINE)
        target = self.target(text.strip(), match[1] or "", shape)
        return target if text else replace(target, text=self.kind)

    def probe(self, target: LaunchTarget, options: Mapping[str, str]) -> Probe:
        """What is offered now."""
        return renting.probe(target, options)

    def offers(self, request: Request) -> tuple[Offer, ...]:
        """The offers that are free."""
        return renting.offers(request)

    def with_forecasts(self, job: Job, entry: Entry, submission: Submission, tell: Callable[[str], None]) -> Submission:
        """The submission with the run's forecast on each kind of device that is offered."""
        return renting.with_forecasts(job, entry, submission, tell)

    def script(self, submission: Submission) -> str:
        """The order, and the terms of the lease."""
        return renting.script(submission)

    def start(self, submission: Submission, tell: Callable[[str], None]) -> Handle:
        """Send the order and open the first lease."""
        return renting.start(submission, tell)

    def state(self, handle: Handle) -> LaunchState:
        """What the log of the pool says; a run whose agent is gone is given to another one."""
        return renting.state(handle)

    def events(self, handle: Handle, offset: int) -> bytes:
        """The run's log up to the last block that was committed, from `offset` on."""
        return renting.events(handle, offset)

    def stop(self, handle: Handle) -> None:
        """Close the lease: what was committed stays, and the same command goes on from there."""
        renting.stop(handle)

    def fetch(self, handle: Handle, into: Path) -> None:
        """The results; before there are any, the last block that was committed."""
        renting.fetch(handle, into)


LAUNCHER = PoolLauncher()
