from __future__ import annotations

import io
import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stoker.pool import events as on
from stoker.pool import overview
from stoker.pool.client import PoolClient
from stoker.pool.escrow import pay_for
from stoker.pool.events import CREDIT, Event
from stoker.pool.keys import own_key
from stoker.pool.matching import hazard_interval
from stoker.pool.overview import LogCheck, Overview
from stoker.pool.state import Record
from tests.pool.book import Book, offer, opened
from tests.pool.server import answering, in_thread, until
from tests.pool.test_control_plane import joined


def test_what_is_offered_and_what_a_lease_has_cost(tmp_path: Path) -> None:
    """By a real control plane: the offer with its record, the lease with its meter, the wallet, a log that holds."""
    with in_thread(tmp_path) as (plane, operator):
        agent, renter = joined(operator), joined(operator)
        assert agent.key is not None
        assert renter.key is not None
        shown = Overview(PoolClient(operator.address), renter.key.public)
        first = shown.look()
        assert (first["offers"], first["leases"]) == ([], [])
        assert first["wallet"] == {"is_admitted": True, "balance": 10.0, "in_escrow": 0.0, "bonds": 0.0}
        agent.post(on.Offered(offer=offer(now_s=time.time(), measured=on.Measured(fp32_flop_per_s=5e9, cores=2))))
        agent.work()
        renter.post(opened(delegate=plane.key.public, verify_fraction=0.5))
        agent.post(on.Accepted(lease_id="job"))
        agent.post(on.Beat(lease_id="job", index=0, running_s=2, samples=640))
        until(lambda: renter.lease("job").paid_s == 2)
        found = shown.look()
        [listed], [lease] = found["offers"], found["leases"]
        assert (listed["offer_id"], listed["status"], listed["price"]) == ("box", "taken", 0.5)
        assert (listed["measured"]["fp32_flop_per_s"], listed["is_own"]) == (5e9, False)
        value, low, high = listed["hazard"]
        assert low < value < high
        assert (lease["role"], lease["state"], lease["samples"], lease["limit"]) == ("rented", "running", 640, 3.0)
        assert lease["so_far"] == pay_for(2, CREDIT // 2) / CREDIT
        assert (lease["num_blocks"], lease["replays"]) == (0, {"equal": 0, "unequal": 0, "open": 0})
        assert found["wallet"]["in_escrow"] == 3.0
        assert [one["kind"] for one in found["events"]][:3] == ["accepted", "opened", "offered"], "no beats"
        assert found["log"] == {"seq": plane.state.seq, "first": 1, "last": plane.state.seq, "problem": ""}
        lent = Overview(PoolClient(operator.address), agent.key.public).look()
        assert (lent["leases"][0]["role"], lent["wallet"]["bonds"], lent["offers"][0]["is_own"]) == ("lent", 1.0, True)


def pool_of(events: list[Event], key: str) -> Any:
    """What has a client's call for the events of a list."""
    return SimpleNamespace(
        address=SimpleNamespace(key=key), events=lambda after: [one for one in events if one.seq > after][:1000]
    )


def checked(book: Book, events: list[Event], head: str = "", seq: int = 0) -> LogCheck:
    """A look at a log which the pool says ends with `head`."""
    check = LogCheck(pool_of(events, book.operator.public))
    check.read_on(seq or len(book.events), head or book.state.head)
    return check


def test_a_log_that_holds_is_read_on() -> None:
    """What comes later is checked against what was there."""
    book = Book()
    book.run()
    shown = book.events[:3]
    check = LogCheck(pool_of(shown, book.operator.public))
    check.read_on(3, book.events[2].hash)
    assert (check.problem, check.first, check.seq) == ("", 1, 3)
    shown += book.events[3:]
    check.read_on(len(book.events), book.state.head)
    assert (check.problem, check.first, check.seq) == ("", 1, len(book.events))
    check.read_on(len(book.events), book.state.head)
    assert check.problem == ""
    told = [event.seq for event in book.events if event.kind not in ("beat", "cosigned")]
    assert [event.seq for event in check.newest] == told


def test_of_a_long_log_the_newest_part_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """From there on hash by hash; that its first event names the one before is not known."""
    monkeypatch.setattr(overview, "_MOST_CHECKED", 5)
    book = Book()
    book.run()
    check = checked(book, book.events)
    assert (check.problem, check.first, check.seq) == ("", len(book.events) - 4, len(book.events))


@pytest.mark.parametrize(
    ("number", "change", "text"),
    [
        (6, {"previous": "0" * 64}, "does not name the hash of the event before"),
        (6, {"seq": 9}, "event 9: it is in the place of event 7"),
        (6, {"received_s": 0.0}, "was received before the event before it"),
        (6, {"nonce": "ab" * 16}, "its signature is not of"),
        (6, {"pool": "0" * 64}, "is of another pool"),
        (0, {"actor": "0" * 64}, "event 1: it is of another pool"),
        (-1, {"received_s": 2e9}, "the pool says that it has another hash"),
    ],
)
def test_a_changed_event_is_named(number: int, change: dict[str, Any], text: str) -> None:
    """Whatever was changed in it."""
    book = Book()
    book.run()
    events = list(book.events)
    own = {name: value for name, value in change.items() if name in ("seq", "previous", "received_s")}
    rest = {name: value for name, value in change.items() if name not in own}
    events[number] = replace(events[number], **own, draft=replace(events[number].draft, **rest))
    assert text in checked(book, events).problem


def test_a_log_that_was_cut_or_rewritten_is_noticed() -> None:
    """Also where its own hashes are right, since it was other before; and the finding stays."""
    book = Book()
    book.run()
    check = checked(book, book.events)
    check.read_on(3, book.events[2].hash)
    assert "it was cut" in check.problem
    check.read_on(len(book.events), book.state.head)
    assert "it was cut" in check.problem
    check = checked(book, book.events)
    check.read_on(len(book.events), "f" * 64)
    assert "was rewritten" in check.problem
    assert "says that it has 99 events, and shows" in checked(book, book.events, seq=99).problem
    strange = on.draft_of(on.Deposited(account="0" * 64, amount=1), book.operator, book.operator.public)
    strange = replace(strange, kind="wished")
    strange = replace(strange, signature=book.operator.sign(strange.message()))
    last = replace(book.events[-1], draft=strange)
    assert "is no kind of event" in checked(book, [*book.events[:-1], last], head=last.hash).problem


def test_the_interval_of_losses_holds_eight_in_ten() -> None:
    """Quantiles of the Gamma distribution, against draws from it."""
    for record in (Record(), Record(lost=3, left=1, ran_s=5e5), Record(ran_s=4e8), Record(lost=400, ran_s=1e6)):
        shape, hours = 0.5 + record.lost + record.left, 24.0 + record.ran_s / 3600
        draws = np.random.default_rng(0).gamma(shape, 1 / hours, 200_000)
        assert np.quantile(draws, (0.1, 0.9)) == pytest.approx(hazard_interval(record), rel=0.03)


# ------------------------------------------------------------------------------------------------------ hostile answers


@pytest.fixture(autouse=True)
def no_key_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever key another test of this process made."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def looks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str, times: int = 1) -> Any:
    """What the process answers at its last look."""
    monkeypatch.setattr(sys, "argv", ["overview", "--pool", address])
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n" * times))
    overview.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == times
    return json.loads(lines[-1])


_POOL = {"key": "ab" * 32, "rules": {"name": "x"}, "seq": 0, "head": "0" * 64, "now_s": 0.0}
_GOOD = {"/v1/state/pool": _POOL, "/v1/state/offers": []}


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ({"/v1/state/pool": b'{"key": "ab'}, "no JSON"),
        ({"/v1/state/pool": b"[" * 100_000}, "no JSON"),
        ({"/v1/state/pool": b"<script>window.hacked=1</script>"}, "no JSON"),
        ({"/v1/state/pool": b"1" * 100_000}, "no JSON"),
        ({"/v1/state/pool": []}, "what no pool of this version does"),
        ({"/v1/state/pool": {**_POOL, "seq": "many"}}, "what no pool of this version does"),
        ({"/v1/state/pool": {**_POOL, "seq": 1e400}}, "what no pool of this version does"),
        ({"/v1/state/pool": {**_POOL, "seq": 10**9}}, "answers what is no log"),
        ({"/v1/state/pool": {**_POOL, "rules": None}}, "what no pool of this version does"),
        ({"/v1/state/offers": {"a": 1}}, "what no pool of this version does"),
        ({"/v1/state/offers": [5]}, "what no pool of this version does"),
        ({"/v1/state/offers": [{"offer": {"price_per_hour": 10**300}}]}, "what no pool of this version does"),
        ({"/v1/state/offers": b" " * (17 << 20)}, "more than 16.0 MiB"),
    ],
)
def test_a_hostile_answer_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: dict[str, Any], text: str
) -> None:
    """Torn, endless, deep, of other types, giant: the process goes on, and says what is wrong."""
    pages = {**_GOOD, **answers}
    with answering(lambda path: pages.get(path.partition("?")[0], {"events": [{"seq": "<b>"}]})) as address:
        found = looks(monkeypatch, capsys, address, times=2)
    assert text in found["problem"]
    assert found["remedy"] or any(kind in text for kind in ("16.0 MiB", "JSON", "no log"))


def test_a_byte_now_and_then_keeps_no_process_for_ever() -> None:
    """Each byte comes within the time limit of the line; even without a reader to end the process then."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code = "from stoker.pool import overview as o; o._MOST_LOOK_S = 2; o.main()"
        address = f"http://127.0.0.1:{listener.getsockname()[1]}#{'ab' * 32}"
        command = [sys.executable, "-c", code, "--pool", address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            line, _ = listener.accept()
            with line, suppress(ConnectionError):
                line.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                for _ in range(100):
                    line.sendall(b" ")
                    time.sleep(0.1)
            process.kill()  # one that has ended itself stays as it ended
        assert process.returncode == -signal.SIGALRM


def test_texts_and_numbers_of_a_pool_are_bounded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name of a megabyte with marks that turn text round, a number that no float holds."""
    rules = {"name": "\u202e<img src=x onerror=alert(1)>" + "x" * 10**6, "least_window_s": 10**300, "of": float("nan")}
    pages = {**_GOOD, "/v1/state/pool": {**_POOL, "rules": rules}}
    with answering(lambda path: pages[path.partition("?")[0]]) as address:
        found = looks(monkeypatch, capsys, address)
    assert found["problem"] == ""
    assert found["rules"]["name"].startswith("\\u202e<img")
    assert len(found["rules"]["name"]) < 320
    assert (found["rules"]["least_window_s"], found["rules"]["of"]) == (None, None)


def test_a_pool_that_goes_away_leaves_what_it_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With the time of it; no key is made by looking, and a wrong address says what is wanted."""
    pages: dict[str, Any] = dict(_GOOD)
    with answering(lambda path: pages.pop(path.partition("?")[0], b"gone")) as address:
        found = looks(monkeypatch, capsys, address, times=2)
    assert "no JSON" in found["problem"]
    assert found["rules"] == {"name": "x"}
    assert found["account"] == ""
    assert not (tmp_path / "config").exists()
    assert "does not answer" in looks(monkeypatch, capsys, address)["problem"]
    assert "64 hexadecimal digits" in looks(monkeypatch, capsys, "http://127.0.0.1:1")["problem"]


def test_the_user_s_key_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """If there is one; a file that others may read is refused as everywhere."""
    key = own_key().public
    pages = {**_GOOD, "/v1/state/leases": [], "/v1/state/balances": {"balances": {key: 5 * CREDIT}}}
    with answering(lambda path: pages[path.partition("?")[0]]) as address:
        found = looks(monkeypatch, capsys, address)
        assert (found["account"], found["wallet"]["balance"]) == (key, 5.0)
        (tmp_path / "config" / "stoker" / "pool" / "default.key").chmod(0o644)
        assert "others may read it" in looks(monkeypatch, capsys, address)["problem"]
