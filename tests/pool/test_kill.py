"""The control plane is killed with SIGKILL, in every state of a lease and at any moment of a stream of events."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stoker.pool import events as on
from stoker.pool.client import PoolClient, Receipt
from stoker.pool.events import CREDIT, sha256
from stoker.pool.keys import Key
from stoker.pool.log import audit
from stoker.pool.state import State
from tests.pool.book import offer, opened
from tests.pool.server import Killable, shift, until

STATE = sha256(b"state")


@contextmanager
def killable(folder: Path, rules: str = "") -> Iterator[Killable]:
    """A control plane that is started, and killed after the block."""
    server = Killable(folder, rules)
    server.start()
    try:
        yield server
    finally:
        server.kill()


class Parties:
    """An agent, a renter and a verifier of a pool, and the way to each state of a lease."""

    def __init__(self, server: Killable) -> None:
        self.server, self.operator = server, server.client()
        self.agent, self.renter, self.verifier = (server.client(Key.made()) for _ in range(3))
        for client in (self.agent, self.renter, self.verifier):
            self.operator.post(on.Deposited(account=key_of(client), amount=10 * CREDIT))

    def bring_to(self, state: str) -> None:
        """Let the lease `job` come to a state."""
        window_s = (
            600 if state == "closed" else 3 if state == "refunded" else 30 if state in ("slashed", "disputed") else 0
        )
        self.agent.put_blob(b"state")
        self.agent.post(on.Offered(offer=offer(now_s=time.time(), reclaim_s=0)))
        self.verifier.post(on.Offered(offer=offer("other", time.time())))
        checks = 1.0 if state in ("slashed", "refunded", "disputed") else 0.0
        self.renter.post(opened(window_s=window_s, verify_fraction=checks))
        if state == "funded":
            return
        self.agent.post(on.Accepted(lease_id="job"))
        self.agent.post(on.Beat(lease_id="job", index=0, running_s=1, state=STATE))
        self.renter.post(on.Cosigned(lease_id="job", index=0))
        self.agent.post(on.Committed(lease_id="job", block=0, update=10, state=STATE, blob=STATE))
        if state == "suspect":
            shift(self.server.folder, 31)
        elif state == "reclaiming":
            self.agent.post(on.Reclaiming(lease_id="job", by_s=time.time() + 60))
        elif state != "running":
            self.agent.post(on.Finished(lease_id="job", result=STATE))
            if checks:
                (challenge,) = until(lambda: self.verifier.work(wait_s=1)["challenges"])
                self.verifier.post(
                    on.VerdictGiven(
                        lease_id="job", block=challenge["block"], verifier=key_of(self.verifier), equal=False
                    )
                )

    def seen(self) -> tuple[Any, ...]:
        """What must be the same after a restart."""
        lease = self.operator.lease("job")
        return lease, self.operator.state("balances"), self.operator.state("records")


def key_of(client: PoolClient) -> str:
    """A client's public key."""
    assert client.key is not None
    return client.key.public


@pytest.mark.parametrize(
    ("state", "rules"),
    [
        ("funded", ""),
        ("running", ""),
        ("suspect", ""),
        ("reclaiming", ""),
        ("closed", ""),
        ("disputed", "verdicts_to_slash=2"),
        ("slashed", "verdicts_to_slash=1"),
        ("refunded", "verdicts_to_slash=2"),
        ("final", ""),
    ],
)
def test_killed_in_every_state(tmp_path: Path, state: str, rules: str) -> None:
    """The lease is in the same state after the restart, with the same money, and the job can go on to its end."""
    with killable(tmp_path, rules) as server:
        parties = Parties(server)
        parties.bring_to(state)
        until(lambda: parties.operator.lease("job").state == state)
        if state in ("slashed", "refunded"):  # they pass by themselves, within a second
            server.kill()
            assert not audit(tmp_path / "log.db").problem
            server.start()
        else:
            before = parties.seen()
            server.kill()
            server.start()
            assert parties.seen() == before
        end(parties, state)
        until(lambda: parties.operator.lease("job").state == "final")
        found = parties.operator.state("balances")
        assert sum(found["balances"].values()) == found["deposited"] == 30 * CREDIT
        assert set(found["balances"]) == {key_of(one) for one in (parties.agent, parties.renter, parties.verifier)}
    assert not audit(tmp_path / "log.db").problem


def end(parties: Parties, state: str) -> None:
    """Go on from a state to the lease's end."""
    if state == "funded":
        parties.agent.post(on.Accepted(lease_id="job"))
        state = "running"
    if state == "suspect":
        parties.agent.post(on.Beat(lease_id="job", index=1, running_s=2))
        state = "running"
    if state in ("running", "reclaiming"):
        parties.agent.post(on.Finished(lease_id="job", result=STATE))
    if state in ("closed", "disputed"):
        parties.renter.post(on.Final(lease_id="job"))


def storm(folder: Path, kills: int, seed: int) -> None:
    """Events from four threads while the server is killed again and again; none is lost or counts twice."""
    draw, stop = random.Random(seed), threading.Event()
    with killable(folder) as server:
        operator = server.client()
        clients = [server.client(Key.made()) for _ in range(4)]
        for client in clients:
            operator.post(on.Deposited(account=key_of(client), amount=1000 * CREDIT))
            client.put_blob(b"state")
        receipts: list[list[Receipt]] = [[] for _ in clients]
        problems: list[BaseException] = []

        def work(number: int) -> None:
            client, other = clients[number], clients[number - 1]
            box, count = f"box{number}", 0
            try:
                while not stop.is_set():
                    job = f"job-{number}-{count}"
                    for body, by in (
                        (on.Offered(offer=offer(box, time.time())), client),
                        (opened(job, offer_id=box, window_s=0), other),
                        (on.Accepted(lease_id=job), client),
                        (on.Beat(lease_id=job, index=0, running_s=1), client),
                        (on.Cosigned(lease_id=job, index=0), other),
                        (on.Finished(lease_id=job, result=STATE), client),
                    ):
                        receipts[number].append(by.post(body, patience_s=600))
                    count += 1
            except BaseException as problem:  # noqa: BLE001 - shown by the test
                problems.append(problem)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(clients))]
        for thread in threads:
            thread.start()
        for _ in range(kills):
            before = sum(map(len, receipts))
            until(lambda: sum(map(len, receipts)) > before)  # noqa: B023 - called at once
            time.sleep(draw.uniform(0.1, 0.6))
            server.kill()
            server.start()
        time.sleep(0.3)
        stop.set()
        for thread in threads:
            thread.join()
        assert not problems, problems
        until(lambda: all(one.state == "final" for one in operator.leases()))
    state = State()
    assert not audit(folder / "log.db", state=state).problem
    hashes = {event.seq: event.hash for event in events_of(folder)}
    given = [receipt for ours in receipts for receipt in ours]
    assert len({receipt.seq for receipt in given}) == len(given)
    assert all(hashes[receipt.seq] == receipt.hash for receipt in given)
    assert len(given) > kills
    assert sum(state.accounts.balances.values()) == 4000 * CREDIT
    assert len(state.leases) * 6 == len(given)


def events_of(folder: Path) -> list[on.Event]:
    """The events of a log without a server."""
    from stoker.pool.log import EventLog

    log = EventLog(folder / "log.db")
    found: list[on.Event] = []
    while texts := log.documents(len(found)):
        found += [on.read_event(on.parsed(text)) for text in texts]
    log.close()
    return found


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    """Four times, in the midst of events; each receipt that was given is in the log, and the money is right."""
    storm(tmp_path, kills=4, seed=1)


@pytest.mark.slow
def test_killed_twenty_times(tmp_path: Path) -> None:
    """As above."""
    storm(tmp_path, kills=20, seed=2)
