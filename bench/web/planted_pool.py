"""A pool with a month behind it for `stoker ui` to show: signed events in a log, and a control plane that goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stoker.pool import events as on
from stoker.pool.client import PoolClient
from stoker.pool.events import CREDIT, Body, Event, draft_of, sha256
from stoker.pool.keys import Key, own_key
from stoker.pool.log import EventLog
from stoker.pool.rules import apply
from stoker.pool.rules.disputes import draw_message
from stoker.pool.state import State
from stoker.units import GIB
from tests.pool.server import in_thread

_DAY_S, _BEAT_S = 86_400.0, 5.0
_LENT: dict[str, dict[str, Any]] = {
    "attic": {
        "kind": "rtx-4090",
        "price": 0.34,
        "memory": 24,
        "fp32": 61e12,
        "bf16": 148e12,
        "bytes": 915e9,
        "up": 4.1e6,
        "down": 29e6,
        "isolation": "gvisor",
    },
    "lab-2": {
        "kind": "h100",
        "price": 4.1,
        "count": 2,
        "memory": 80,
        "fp32": 55e12,
        "bf16": 690e12,
        "bytes": 2.9e12,
        "up": 118e6,
        "down": 117e6,
        "isolation": "podman",
    },
    "garage": {
        "kind": "cpu",
        "price": 0.04,
        "memory": 32,
        "fp32": 0.9e12,
        "bytes": 41e9,
        "cores": 16,
        "up": 1.2e6,
        "down": 6e6,
        "isolation": "bubblewrap",
    },
    "nightly": {
        "kind": "a100",
        "price": 0.95,
        "memory": 40,
        "fp32": 18e12,
        "bf16": 251e12,
        "bytes": 1.4e12,
        "isolation": "podman",
        "hours": (20, 7),
    },
    "bargain": {"kind": "rtx-4090", "price": 0.19, "memory": 24, "up": 2e6, "down": 9e6, "isolation": "bubblewrap"},
    "office": {
        "kind": "rtx-3090",
        "price": 0.22,
        "memory": 24,
        "fp32": 29e12,
        "bf16": 64e12,
        "bytes": 860e9,
        "up": 12e6,
        "down": 52e6,
        "isolation": "podman",
    },
}
"""Offers by name: prices in credits an hour, memory in GiB, speeds in FLOP/s and bytes/s, links in bytes/s."""


class History:
    """A pool's log, written event by event at a clock that the writer sets.

    Args:
        folder: of the control plane.
        account: the key of whoever looks at the page.
        now_s: when it begins [s since 1970].
    """

    def __init__(self, folder: Path, account: Key, now_s: float) -> None:
        self.operator, self.account, self.now_s = own_key("control", folder), account, now_s
        self.agents = {name: Key.made() for name in _LENT}
        self.other, self.num_jobs = Key.made(), 0
        self.state, self._log = State(), EventLog(folder / "log.db")
        self.post(self.operator, on.Founded(name="lab", verdicts_to_slash=2))
        for key in (account, self.other, *self.agents.values()):
            credits_ = 60 if key is account else 2000
            self.post(self.operator, on.Deposited(account=key.public, amount=credits_ * CREDIT))

    def post(self, key: Key, body: Body) -> None:
        """Sign an event, and put it into the log."""
        draft = draft_of(body, key, self.operator.public, time_s=self.now_s)
        event = Event(seq=self.state.seq + 1, previous=self.state.head, received_s=self.now_s, draft=draft)
        apply(self.state, event)
        self._log.append(event)

    def offer(self, name: str, for_s: float = 1000.0) -> None:
        """An agent makes its offer."""
        it = _LENT[name]
        self.post(
            self.agents[name],
            on.Offered(
                offer=on.Offer(
                    offer_id=name,
                    isolation=it["isolation"],
                    price_per_hour=round(it["price"] * CREDIT),
                    device=on.OfferedDevice(kind=it["kind"], count=it.get("count", 1), memory_bytes=it["memory"] * GIB),
                    measured=on.Measured(
                        fp32_flop_per_s=it.get("fp32", 0.0),
                        bf16_flop_per_s=it.get("bf16", 0.0),
                        bytes_per_s=it.get("bytes", 0.0),
                        cores=it.get("cores", 8),
                    ),
                    upload_bytes_per_s=it.get("up", 0.0),
                    download_bytes_per_s=it.get("down", 0.0),
                    hours=it.get("hours"),
                    disk_bytes=200 * GIB,
                    expires_s=self.now_s + for_s,
                )
            ),
        )

    def job(
        self,
        name: str,
        *,
        renter: Key | None = None,
        run: str = "",
        hours: float = 1.0,
        blocks: int = 4,
        ends: str = "finished",
        verdicts: str = "",
    ) -> str:
        """A lease from opening to its end; `verdicts`: a letter for each replay of a block, e(qual) or u(nequal)."""
        renter, agent = renter or self.other, self.agents[name]
        self.num_jobs += 1
        lease_id = f"{renter.public[:16]}-{run or f'job-{self.num_jobs}'}-{sha256(run.encode())[:10]}.0"
        rate = round(_LENT[name]["price"] * CREDIT)
        credits_ = round(rate * hours * 1.2)
        self.offer(name)
        self.post(
            renter,
            on.Opened(
                lease_id=lease_id,
                offer_id=name,
                order=sha256(b"order"),
                rate_per_hour=rate,
                deposit=2 * credits_ + 10**5,
                bond=credits_,
                window_s=600,
                verify_fraction=0.05,
                delegate=self.operator.public,
                forecast=on.Forecast(hours=hours * 1.1, credits=credits_),
            ),
        )
        self.now_s += 8
        self.post(agent, on.Accepted(lease_id=lease_id))
        for block in range(blocks):
            self.now_s += hours * 3600 / blocks
            seconds = int(hours * 3600 * (block + 1) / blocks)
            self.post(agent, on.Beat(lease_id=lease_id, index=block, running_s=seconds, samples=9000 * (block + 1)))
            self.post(self.operator, on.Cosigned(lease_id=lease_id, index=block))
            before, state = (sha256(b"%d" % number) for number in (block - 1, block))
            self.post(
                agent,
                on.Committed(
                    lease_id=lease_id,
                    block=block,
                    update=100 * (block + 1),
                    state=state,
                    blob=state,
                    previous=before if block else "",
                ),
            )
        if ends == "runs":
            return lease_id
        if ends == "lost":
            self.now_s += 70
            self.post(self.operator, on.Suspected(lease_id=lease_id))
            self.post(self.operator, on.Lost(lease_id=lease_id))
        else:
            self.post(agent, on.Finished(lease_id=lease_id, result=sha256(b"result")))
        draw = self.operator.sign(draw_message(self.operator.public, self.state.leases[lease_id]))
        verifiers = [key for other, key in self.agents.items() if other != name]
        for verifier, letter in zip(verifiers, verdicts, strict=False):
            self.post(self.operator, on.Challenged(lease_id=lease_id, block=0, verifier=verifier.public, draw=draw))
            self.post(
                verifier,
                on.VerdictGiven(
                    lease_id=lease_id,
                    block=0,
                    verifier=verifier.public,
                    equal=letter == "e",
                ),
            )
        if "uu" in verdicts:
            self.post(self.operator, on.Disputed(lease_id=lease_id, reason="replays are unequal"))
            self.post(self.operator, on.Slashed(lease_id=lease_id, amount=credits_, reason="two replays unequal"))
        self.now_s += 601
        self.post(self.operator, on.Final(lease_id=lease_id))
        return lease_id

    def close(self) -> None:
        """Let a control plane have the log."""
        self._log.close()


def month(history: History, run: str) -> str:
    """A month of jobs of six agents, up to now; the lease that goes on, under the run's name."""
    for day in range(28):
        history.job("lab-2", hours=5, verdicts="e")
        if day % 2:
            history.job("attic", hours=3, verdicts="e", ends="lost" if day == 13 else "finished")
        if day % 5 == 0:
            history.job("garage", hours=6, verdicts="e", ends="lost" if day in (5, 15) else "finished")
        history.now_s += 0.3 * _DAY_S
    history.job("bargain", renter=history.account, run="fashion-resnet-seed1", hours=0.4, verdicts="uu")
    history.job("office", renter=history.account, run="fashion-resnet-seed2", hours=0.7, verdicts="e")
    history.now_s = time.time() - 2400.0
    for name in ("lab-2", "garage", "bargain", "office"):
        history.offer(name, for_s=86_400.0)
    history.offer("nightly", for_s=300.0)
    return history.job("attic", renter=history.account, run=run, hours=0.65, blocks=3, ends="runs")


@contextmanager
def planted_pool(folder: Path, account: Key, *, run: str = "fashion-resnet-live") -> Iterator[tuple[PoolClient, str]]:
    """A control plane with that month in its log, whose agents are there and whose lease goes on, within the block.

    Gives its operator's client, and the name of the lease that goes on. `account` rents.
    """
    history = History(folder, account, time.time() - 22 * _DAY_S)
    lease_id = month(history, run)
    history.close()
    done = threading.Event()
    with in_thread(folder) as (_, operator):
        agents = {name: PoolClient(operator.address, key) for name, key in history.agents.items()}
        first = operator.lease(lease_id)

        def go_on() -> None:
            began_s, index = time.time(), first.beat_index
            while True:
                for name in ("lab-2", "garage", "attic", "office"):
                    agents[name].work()
                index += 1
                running_s = first.running_s + int(time.time() - began_s)
                agents["attic"].post(on.Beat(lease_id=lease_id, index=index, running_s=running_s, samples=40_000))
                if done.wait(_BEAT_S):
                    return

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            yield operator, lease_id
        finally:
            done.set()
            thread.join()
