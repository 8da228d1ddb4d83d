from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import BadJob, PlaceFailed, PlaceUnreachable
from stoker.launching.bundle import Bundle, TreeFile
from stoker.launching.launcher import Request, Submission
from stoker.pool import events as on
from stoker.pool import pool_launcher, rented_run, renting
from stoker.pool import terms as terms_module
from stoker.pool.blob_tree import TreeLimits, pack_folder, plain_names
from stoker.pool.client import DiskFailed, _Busy
from stoker.pool.commitment import chain_head
from stoker.pool.isolation import Host, Limits
from stoker.pool.job_box import JobBox, PoolOrder, read_order
from stoker.pool.leased_job import BlobCache
from stoker.pool.pool_launcher import LAUNCHER
from stoker.pool.sealing import seal
from stoker.pool.state import ListedOffer, Record
from stoker.pool.terms import FORECASTS, Terms
from stoker.records.codec import dumps, to_json
from stoker.store import CheckpointStore
from stoker.testing import LauncherConformance
from tests.pool.counting import plan, save
from tests.pool.fake_pool import FakePool

KEY, JOB = "c" * 64, "digits-1a2b3c"


class TestConformance(LauncherConformance):
    launcher = LAUNCHER
    words = {  # noqa: RUF012 - a table
        "": (1, 1, ""),
        "box": (1, 1, ""),
        "/cpu": (1, 1, "cpu"),
        "box/h100": (1, 1, "h100"),
        "box/2xcpu": (1, 2, "cpu"),
        "/8xhere": (1, 8, ""),
    }
    bad_words = ("box/", "box/2x2xcpu", "/0xcpu", "-x", "a b", "box/cpu/cpu")
    environments = ({},)
    unreachable = {  # noqa: RUF012 - likewise
        "pool": f"http://127.0.0.1:9#{KEY}",
        "key": "default",
        "job": "x",
        "first": 0,
        "options": {},
    }
    client = ("cryptography", "starlette", "uvicorn")

    @pytest.fixture(autouse=True)
    def own_keys(self, tmp_path, monkeypatch) -> None:
        """Keys of the test's own."""
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_looking_at_the_module_loads_nothing(monkeypatch) -> None:
    """Where a pool's packages are missing, only the use of its module fails, and says what is missing."""
    monkeypatch.setitem(sys.modules, "stoker.pool.renting", None)
    assert not hasattr(pool_launcher.renting, "__wrapped__")  # asked by doctest, of everything in a module
    with pytest.raises(PlaceFailed, match=r"a pool needs .*, which is not installed here"):
        LAUNCHER.stop({})


class Pool(FakePool):
    """Offers as well, and an address."""

    def __init__(self, folder) -> None:
        super().__init__(folder)
        self.address = SimpleNamespace(key=KEY, url="http://pool", __str__=lambda: f"http://pool#{KEY}")
        self.offers: dict[str, dict[str, Any]] = {}
        self.stopped = set[str]()
        self.balance, self.num_waiting, self.contract, self.forward_price = 10**9, 0, "", 0

    def offer(self, name: str, price: int, **changes: Any) -> None:
        """A free offer."""
        fields: dict[str, Any] = {
            "offer_id": name,
            "device": on.OfferedDevice(kind="cpu"),
            "price_per_hour": price,
            "isolation": "bubblewrap",
            "measured": on.Measured(cores=1),
            "determinism_class": "same",
            "reclaim_s": 60,
            "min_s": 0,
            "max_s": 100_000,
            "expires_s": 1e10,
        }
        listed = ListedOffer(offer=on.Offer(**fields | changes), agent=name, offered_s=0.0)
        self.offers[name] = {**to_json(listed), "is_free": True, "is_present": True, "record": to_json(Record())}

    def state(self, what: str, **_: str) -> Any:
        self._answer()
        more = {
            "stopped": sorted(self.stopped),
            "offers": list(self.offers.values()),
            "pool": {"rules": to_json(self.rules()), "num_waiting": self.num_waiting},
            "balances": {"balances": {self.key.public: self.balance}},
        }
        return more[what] if what in more else super().state(what)

    def rules(self) -> on.Founded:
        return replace(super().rules(), contract=self.contract, forward_price=self.forward_price)

    def post(self, body: on.Body, **more: Any) -> None:
        super().post(body, **more)
        if isinstance(body, on.RunStopped):
            (self.stopped.add if body.is_stopped else self.stopped.discard)(body.run)
            for one in self.documents.values():
                one["is_run_stopped"] = body.is_stopped
        if isinstance(body, on.Opened):
            lease = self.add_lease(body.lease_id, body.order)
            lease |= {"agent": body.offer_id, "offer_id": body.offer_id, "check_fraction": body.verify_fraction}
            lease |= {"escrow": body.deposit, "rate_per_hour": body.rate_per_hour, "deposit": body.deposit}
            lease |= {"bond": body.bond, "forecast": to_json(body.forecast)}


@pytest.fixture
def pool(tmp_path, monkeypatch) -> Pool:
    """The pool that the launcher talks to."""
    made = Pool(tmp_path / "blobs")
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path))
    monkeypatch.setattr(renting, "_client", lambda terms: made)
    monkeypatch.setattr(renting, "_blobs", lambda client, job, *_: BlobCache(made, tmp_path / "cache"))
    monkeypatch.setattr(renting, "_own_class", lambda: "")
    monkeypatch.setattr(rented_run, "LOOK_S", 0.0)
    made.offer("cheap", 100_000)
    made.offer("dear", 900_000)
    return made


def submission(**changes: Any) -> Submission:
    """A submission of a job of three lines."""
    code = Bundle(kind="code", name="job.py", files=(TreeFile.of_bytes("job.py", b"def job():\n    ...\n"),))
    stoker = Bundle(kind="stoker", name="Stoker", files=(TreeFile.of_bytes("stoker/__init__.py", b""),))
    settings: dict[str, Any] = {
        "run": JOB,
        "target": LAUNCHER.parse(""),
        "code": code,
        "stoker": stoker,
        "job_file": "job.py",
        "time_limit_s": 3600.0,
        "owner": "me@here:/runs/x",
        "options": {"verify": "100%"},
    }
    return Submission(**settings | changes)


def started(pool: Pool, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A handle, and its first lease, which runs."""
    handle = LAUNCHER.start(submission(**changes), lambda text: None)
    lease = pool.documents[f"{handle['job']}.0"]
    lease["state"] = "running"
    return handle, lease


def commit(
    pool: Pool, lease: dict[str, Any], tmp_path, *updates: int, total: int | None = None, verdict: str | None = None
) -> None:
    """Blocks of a lease, each with a sealed checkpoint and a log, of a job of `total` updates, or as there are.

    `plain`: the same file as it would be as results.
    """
    for update in updates:
        run = tmp_path / f"run-{lease['lease_id']}-{update}"
        run.mkdir()
        (run / "events.jsonl").write_text("".join(f'{{"update": {n}}}\n' for n in range(update)))
        (run / "plan.json").write_text(plan(total or max(updates)))
        manifest = save(CheckpointStore(run / "checkpoints"), update.to_bytes(32, "little"), update, verdict)
        pack_folder(run, plain_names(run), tmp_path / "tree", TreeLimits(num_bytes=1 << 20))
        plain, key = pool.put_blob(tmp_path / "tree"), seal(tmp_path / "tree")
        blob = pool.put_blob(tmp_path / "tree")
        order = read_order((pool.folder / lease["order"]).read_bytes())
        previous = lease["commitments"][-1]["state"] if lease["commitments"] else order.resume_head
        state = chain_head(previous, update, manifest.state_digest())
        lease["commitments"].append(
            {
                "block": len(lease["commitments"]),
                "update": update,
                "state": state,
                "blob": blob,
                "seal": key,
                "plain": plain,
                "running_s": lease["running_s"],
            }
        )


def judged(lease: dict[str, Any], *equal: bool) -> None:
    """Verdicts of replays of the first blocks."""
    lease["challenges"] = [replay(block, equal=one) for block, one in enumerate(equal)]


def replay(block: int, *, equal: bool, verifier: str = "v", fee: int = 0) -> dict[str, Any]:
    """The verdict of a replay, in JSON."""
    return {"block": block, "equal": equal, "fee": fee, "verifier": verifier, "since_s": 0.0}


def test_the_cheapest_offer_is_taken_and_its_deposit_covers_the_checks(pool) -> None:
    """Rate, deposit and inputs of the lease: a provider without a record is checked whole."""
    handle, lease = started(pool)
    opened = pool.of(on.Opened)[0]
    assert (opened.offer_id, opened.rate_per_hour) == ("cheap", 100_000)
    assert opened.deposit == 200_000
    assert opened.delegate == KEY
    assert len(opened.inputs) == 1
    assert LAUNCHER.state(handle).phase == "running"
    assert LAUNCHER.start(submission(), print)["job"] == handle["job"]
    assert len(pool.documents) == 1, "a run that is going on was started twice"
    assert lease["agent"] == "cheap"


@pytest.mark.parametrize(
    ("verify", "text"),
    [
        ("100%", "one of 67 blocks saves 0.001492 credits, and loses 0.20 credits with a chance of 100 %"),
        ("none", "nothing is replayed: no bond"),
    ],
)
def test_a_start_says_what_the_bond_is_good_for(pool, verify, text) -> None:
    """Deposit, bond, and what cheating in a block would save and lose."""
    told: list[str] = []
    LAUNCHER.start(submission(options={"verify": verify}), told.append)
    assert "bond 0.10 credits; " in told[-1]
    assert text in told[-1]


def test_the_rest_of_a_run_is_deposited_for_as_long_as_an_agent_may_take_to_accept(pool) -> None:
    """A pool takes no deposit for a few seconds, so that offers are not held for nothing."""
    started(pool, time_limit_s=5.0, options={"verify": "none"})
    assert pool.of(on.Opened)[0].deposit == pytest.approx(100_000 / 60, abs=1)


def test_all_devices_of_an_offer_are_taken_or_none(pool) -> None:
    """As many as are asked for, at the price of all; the order says so, and so do the leases that follow."""
    pool.offer("pair", 50_000, device=on.OfferedDevice(kind="cpu", count=2))
    pool.offer("quad", 10_000, device=on.OfferedDevice(kind="cpu", count=4))
    handle, lease = started(pool, target=LAUNCHER.parse("/2xcpu"))
    order = read_order((pool.folder / lease["order"]).read_bytes())
    assert (lease["offer_id"], lease["rate_per_hour"], order.num_devices) == ("pair", 50_000, 2)
    lease |= {"state": "closed", "reason": "lost", "num_devices": 2}
    pool.offer("spare", 70_000, device=on.OfferedDevice(kind="cpu", count=2))
    del pool.offers["pair"]
    assert LAUNCHER.state(handle).phase == "requeued"
    second = pool.documents[f"{handle['job']}.1"]
    assert second["offer_id"] == "spare"
    assert read_order((pool.folder / second["order"]).read_bytes()).num_devices == 2


def test_a_named_offer_of_several_devices_says_how_it_is_taken(pool) -> None:
    """`pool:pair` asks for one device; the offer has two."""
    pool.offer("pair", 50_000, device=on.OfferedDevice(kind="cpu", count=2))
    [missing] = LAUNCHER.probe(LAUNCHER.parse("pair"), {}).missing
    assert missing == "the offer pair has 2 devices: --on pool:pair/2xcpu"
    assert not LAUNCHER.probe(LAUNCHER.parse("pair/2xcpu"), {}).missing
    found = LAUNCHER.offers(Request(target=LAUNCHER.parse("/2xcpu")))
    assert [(one.text, one.devices_each) for one in found] == [("pool:/2xcpu", 2)]


def test_a_run_waits_in_the_queue_until_an_offer_is_free(pool, monkeypatch) -> None:
    """`--place-option wait=…`: its place is kept by events, and given up with a lease or when the time is over."""
    for offer in pool.offers.values():
        offer |= {"is_free": False, "lease_id": "of-another"}
    clock = SimpleNamespace(now_s=0.0)

    def sleep(seconds: float) -> None:
        clock.now_s += seconds
        if clock.now_s > 500:
            pool.offers["dear"] |= {"is_free": True, "lease_id": ""}

    fake = SimpleNamespace(sleep=sleep, monotonic=lambda: clock.now_s, time=lambda: 1e9 + clock.now_s)
    for module in (renting, rented_run, terms_module):
        monkeypatch.setattr(module, "time", fake)
    waits = {"wait": "10min", "verify": "none"}
    assert not LAUNCHER.probe(LAUNCHER.parse(""), waits).missing
    assert LAUNCHER.probe(LAUNCHER.parse(""), {}).missing
    with pytest.raises(PlaceFailed, match="no free offer"):
        LAUNCHER.start(submission(options={"wait": "100s"}), print)
    assert pool.of(on.Waiting)[-1].until_s <= fake.time(), "its place was not given up"
    told: list[str] = []
    handle = LAUNCHER.start(submission(run="other-1", options=waits), told.append)
    assert pool.of(on.Opened)[0].offer_id == "dear"
    mine = [one for one in pool.of(on.Waiting) if one.request_id == handle["job"]]
    assert [one.until_s > fake.time() for one in mine] == [True, True, False]
    assert sum("waiting in the queue" in line for line in told) == 1
    pool.documents[f"{handle['job']}.0"] |= {"state": "closed", "reason": "lost"}
    pool.offers["dear"] |= {"is_free": False}
    assert LAUNCHER.state(handle).phase == "queued"
    assert pool.of(on.Waiting)[-1].until_s > fake.time()


def test_only_offers_that_were_probed_where_that_is_asked_for(pool) -> None:
    """`--place-option probed=yes`: that met their times at one moment with others."""
    assert LAUNCHER.probe(LAUNCHER.parse(""), {"probed": "yes"}).missing
    pool.offers["dear"]["probed_s"] = 7.0
    _, lease = started(pool, options={"verify": "none", "probed": "yes"})
    assert lease["offer_id"] == "dear"


def test_a_faster_device_is_worth_a_dearer_hour(pool) -> None:
    """Offers are taken by money and hours until the run is done: ten times the speed for three times the price."""
    pool.offers.clear()
    pool.offer("slow", 300_000, measured=on.Measured(cores=1, fp32_flop_per_s=1e9))
    pool.offer("fast", 900_000, measured=on.Measured(cores=1, fp32_flop_per_s=1e10))
    started(pool)
    assert pool.of(on.Opened)[0].offer_id == "fast"


def test_no_more_than_the_most_is_deposited(pool, tmp_path) -> None:
    """Run, replays and what earlier leases cost together stay within --max-cost; an offer beyond it is left out."""
    handle, lease = started(pool, max_cost=0.15)
    opened = pool.of(on.Opened)[0]
    assert opened.deposit == pytest.approx(150_000, abs=100)
    assert opened.forecast.hours == pytest.approx(0.75)
    lease["running_s"] = 900
    commit(pool, lease, tmp_path, 10)
    lease |= {"state": "closed", "reason": "lost", "paid_s": 900, "rate_per_hour": 100_000}
    LAUNCHER.state(handle)
    second = pool.of(on.Opened)[1]
    assert second.deposit == pytest.approx(100_000, abs=1000), "as much as it was paid may be replayed"
    options = {"forecasts": json.dumps({"cpu/1": {"run_s": 3600.0}}), "verify": "100%"}
    with pytest.raises(BadJob, match="no free offer finishes the run for that"):
        LAUNCHER.start(submission(run="other-1", max_cost=0.15, options=options), print)


def test_forecasts_for_each_kind_decide_and_are_kept_for_the_next_time(pool) -> None:
    """A device on which the run cannot be is left out; the time that was expected stands in the lease."""
    pool.offers.clear()
    pool.offer("small", 100_000, device=on.OfferedDevice(kind="t4"))
    pool.offer("large", 900_000, device=on.OfferedDevice(kind="h100"))
    forecasts = {"t4": "it does not fit", "h100": {"run_s": 1800.0, "spread": 0.1, "raw_s": 3600.0}}
    started(pool, options={"forecasts": json.dumps(forecasts), "identity": "a job", "verify": "none"})
    opened = pool.of(on.Opened)[0]
    assert opened.offer_id == "large"
    assert (opened.forecast.raw_hours, opened.forecast.job) == (1.0, "a job")


def test_a_lost_agent_is_replaced_from_the_last_block_and_asked_last(pool, tmp_path) -> None:
    """The next lease names the block to go on from, and pays no more than what is left; the agent may come back."""
    handle, lease = started(pool)
    lease["running_s"] = 600
    commit(pool, lease, tmp_path, 10, 20)
    lease |= {"state": "closed", "reason": "lost", "running_s": 700, "closed_s": time.time() - 100}
    state = LAUNCHER.state(handle)
    assert (state.phase, state.restarts) == ("requeued", 1)
    opened = pool.of(on.Opened)[1]
    assert opened.offer_id == "dear"
    assert opened.forecast.hours == pytest.approx(3000 / 3600)
    assert lease["commitments"][1]["blob"] in opened.inputs
    order = read_order((pool.folder / opened.order).read_bytes())
    assert (order.resume, order.resume_seal) == tuple(lease["commitments"][1][name] for name in ("blob", "seal"))
    assert "update 20" in state.why
    pool.documents[opened.lease_id] |= {"state": "closed", "reason": "lost", "closed_s": time.time()}
    assert LAUNCHER.state(handle).phase == "requeued"
    assert pool.of(on.Opened)[2].offer_id == "cheap", "one cut of the line, and an agent is never asked again"


def test_an_agent_that_went_away_before_it_accepted_is_not_waited_for(pool) -> None:
    """Its time to accept is a minute; the pool hears of idle agents every two seconds."""
    handle, lease = started(pool)
    lease |= {"state": "funded", "is_agent_away": False}
    assert LAUNCHER.state(handle).phase == "queued"
    assert len(pool.of(on.Opened)) == 1
    terms = {"payer": f"0x{'1' * 40}", "payee": f"0x{'2' * 40}", "cosigner": f"0x{'3' * 40}", "deadline_s": 1}
    lease |= {"is_agent_away": True, "closed_s": time.time(), "contract": terms}
    assert LAUNCHER.state(handle).phase == "queued", "it waits for a chain"
    lease["contract"] = None
    assert LAUNCHER.state(handle).phase == "requeued"
    assert lease["reason"] == "its agent was away before it accepted"
    assert pool.of(on.Opened)[1].offer_id == "dear"


def test_no_second_lease_is_opened_while_the_first_goes_on(pool, monkeypatch) -> None:
    """A pool that is busy has not closed the lease of an agent that was away, which may accept it after all."""
    handle, lease = started(pool)
    lease |= {"state": "funded", "is_agent_away": True, "contract": None}
    post = pool.post

    def busy(body: on.Body, **more: Any) -> None:
        if isinstance(body, on.Closed):
            raise _Busy("too many requests")
        post(body, **more)

    monkeypatch.setattr(pool, "post", busy)
    assert LAUNCHER.state(handle).phase == "unknown"
    assert len(pool.of(on.Opened)) == 1

    def accepted(body: on.Body, **more: Any) -> None:
        if isinstance(body, on.Closed):
            lease.update(state="running", is_agent_away=False)
            raise on.Refused("not possible in that state")
        post(body, **more)

    monkeypatch.setattr(pool, "post", accepted)
    assert LAUNCHER.state(handle).phase == "running"
    assert len(pool.of(on.Opened)) == 1


def test_a_run_that_waits_for_an_offer_can_be_stopped(pool, monkeypatch, tmp_path) -> None:
    """It has no lease that could be closed: nothing is opened once there are offers, until it is started again.

    Whichever machine of the renter follows it: the pool knows it is stopped.
    """
    handle, lease = started(pool)
    offers = dict(pool.offers)
    pool.offers.clear()
    lease |= {"state": "closed", "reason": "lost"}
    assert LAUNCHER.state(handle).phase == "queued"
    LAUNCHER.stop(handle)
    pool.offers |= offers
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "elsewhere"))
    assert LAUNCHER.state(handle).phase == "stopped"
    assert len(pool.of(on.Opened)) == 1
    again = LAUNCHER.start(submission(), print)
    pool.documents[f"{again['job']}.1"]["state"] = "running"
    assert LAUNCHER.state(again).phase == "running"


def test_who_follows_a_stopped_run_closes_what_is_left_of_it(pool) -> None:
    """The machine that stopped it was cut off before it could close the lease."""
    handle, lease = started(pool)
    lease |= {"state": "running", "is_run_stopped": True}
    assert LAUNCHER.state(handle).phase == "stopped"
    assert [body.reason for body in pool.of(on.Closed)] == [rented_run.STOPPED]


def test_a_busy_pool_has_not_stopped_a_run(pool, monkeypatch) -> None:
    """The lease goes on and is paid for: the stop is asked for again."""
    handle, lease = started(pool)

    def busy(*_: Any, **__: Any) -> None:
        raise _Busy("too many requests")

    monkeypatch.setattr(pool, "post", busy)
    with pytest.raises(PlaceUnreachable, match="busy"):
        LAUNCHER.stop(handle)
    assert lease["state"] == "running"


def test_an_offer_that_refuses_is_asked_at_ever_longer_intervals(pool) -> None:
    """Offers that lack a package do not use up the leases of a run within minutes."""
    handle, lease = started(pool)
    pool.offers.pop("dear")
    for number, rest_s in enumerate((60, 120, 240)):
        lease |= {"state": "closed", "reason": "refused: no numpy", "closed_s": time.time() - rest_s + 30}
        assert LAUNCHER.state(handle).phase == "queued"
        lease["closed_s"] -= 31
        assert LAUNCHER.state(handle).phase == "requeued"
        lease = pool.documents[f"{handle['job']}.{number + 1}"]


def test_a_job_that_saves_nothing_for_too_long_is_not_tried_for_ever(pool, tmp_path) -> None:
    """Two agents in a row that left it without a block are enough; one that got on counts as none."""
    handle, lease = started(pool)
    left = {"state": "closed", "reason": "refused: it has saved nothing for 15 min 2 s", "closed_s": time.time() - 999}
    lease |= left
    assert LAUNCHER.state(handle).phase == "requeued"
    second = pool.documents[f"{handle['job']}.1"]
    commit(pool, second, tmp_path, 10)
    second |= left
    assert LAUNCHER.state(handle).phase == "requeued"
    for number in (2, 3):
        pool.documents[f"{handle['job']}.{number}"] |= left
        state = LAUNCHER.state(handle)
        assert state.phase == ("failed" if number == 3 else "requeued")
    assert "evaluate on fewer samples" in state.why


def test_the_most_leases_are_the_most_for_a_start_as_well(pool) -> None:
    """A lease that would never be looked at again is not opened."""
    handle, lease = started(pool)
    for number in range(1, 100):
        pool.documents[f"{handle['job']}.{number}"] = {**lease, "lease_id": f"{handle['job']}.{number}"}
    for one in pool.documents.values():
        one |= {"state": "closed", "reason": "stopped: asked", "closed_by": one["renter"]}
    with pytest.raises(PlaceFailed, match="has had 100 leases"):
        LAUNCHER.start(submission(), print)
    assert len(pool.documents) == 100


@pytest.mark.parametrize("settled", ["slashed", "final"])
def test_a_wrong_block_is_not_gone_on_from(pool, tmp_path, settled) -> None:
    """After a slash the run goes on from the block before the wrong one, also where another lease had taken it up."""
    handle, lease = started(pool)
    commit(pool, lease, tmp_path, 10, 20, 30)
    lease |= {"state": "closed", "reason": "lost"}
    LAUNCHER.state(handle)
    heir = pool.documents[f"{handle['job']}.1"]
    heir["state"] = "running"
    commit(pool, heir, tmp_path, 40)
    judged(lease, True, False, True)
    lease |= {"state": settled, "outcome": "slashed"}
    assert LAUNCHER.state(handle).phase == "requeued"
    assert heir["reason"].startswith("restarted")
    last = pool.of(on.Opened)[-1]
    assert last.offer_id == "dear", "the agent that went on from another one's wrong block did nothing wrong"
    assert lease["commitments"][0]["blob"] in last.inputs
    assert heir["commitments"][0]["blob"] not in last.inputs


def test_an_agent_that_was_cleared_is_not_wrong_any_more(pool, tmp_path) -> None:
    """One unequal replay that others contradicted costs neither its blocks nor the next lease."""
    handle, lease = started(pool)
    commit(pool, lease, tmp_path, 10, 20)
    lease |= {"state": "closed", "reason": "finished", "result": lease["commitments"][1]["plain"]}
    judged(lease, True, False)
    assert LAUNCHER.state(handle).phase == "saving"
    lease["state"] = "final"
    state = LAUNCHER.state(handle)
    assert state.phase == "finished"
    assert "1 could not be replayed" in state.why


def test_what_earlier_leases_paid_for_replays_counts(pool, tmp_path) -> None:
    """Fees come out of --max-cost; neither what a cheat got back counts, nor time after the last block, nor its pay."""
    handle, lease = started(pool, max_cost=0.15)
    lease["running_s"] = 900
    commit(pool, lease, tmp_path, 10)
    lease |= {"state": "closed", "reason": "lost", "running_s": 1800, "paid_s": 1800, "rate_per_hour": 100_000}
    lease["challenges"] = [replay(0, equal=True, fee=20_000)]
    LAUNCHER.state(handle)
    assert pool.of(on.Opened)[1].deposit == pytest.approx(100_000, abs=1000), "as much as it was paid may be replayed"
    for outcome, left in (("", 105_000), ("slashed", 130_000)):
        pool.documents.pop(f"{handle['job']}.1")
        lease |= {"state": "final", "outcome": outcome, "settlement": {"pay": 0 if outcome else 25_000}}
        LAUNCHER.state(handle)
        assert pool.of(on.Opened)[-1].deposit == pytest.approx(left, abs=1000)


def test_a_strangers_lease_is_not_taken_for_ones_own(pool) -> None:
    """Results of a stranger's lease under the run's name are not taken; and no answer is not no lease."""
    handle, lease = started(pool)
    lease["renter"] = "f" * 64
    with pytest.raises(PlaceFailed, match="of another renter"):
        LAUNCHER.state(handle)
    pool.lease = lambda _: (_ for _ in ()).throw(on.Refused("busy"))
    assert LAUNCHER.state(handle).phase == "unknown"


def test_results_count_once_their_blocks_were_replayed(pool, tmp_path) -> None:
    """A run is not finished for its renter while a drawn block waits for a verdict."""
    handle, lease = started(pool)
    commit(pool, lease, tmp_path, 10, 20)
    lease |= {"state": "closed", "reason": "finished", "result": lease["commitments"][1]["plain"]}
    assert LAUNCHER.state(handle).phase == "saving"
    judged(lease, True)
    assert LAUNCHER.state(handle).phase == "saving"
    judged(lease, True, True)
    assert LAUNCHER.state(handle).phase == "finished"
    LAUNCHER.fetch(handle, tmp_path / "home")
    assert (tmp_path / "home" / "events.jsonl").read_bytes() == LAUNCHER.events(handle, 0)
    assert LAUNCHER.events(handle, 15) == LAUNCHER.events(handle, 0)[15:]
    assert not list((tmp_path / "home").glob(".writing*"))


def test_a_full_disk_of_the_renter_opens_no_further_lease(pool, tmp_path) -> None:
    """Results that cannot be written here are no wrong results: they are fetched again, and nothing is paid twice."""
    handle, lease = started(pool)
    commit(pool, lease, tmp_path, 10, 20)
    judged(lease, True, True)
    lease |= {"state": "closed", "reason": "finished", "result": lease["commitments"][1]["plain"]}
    real, full = pool.get_blob, DiskFailed("Cannot write a blob: the disk is full.")
    pool.get_blob = lambda *_, **__: (_ for _ in ()).throw(full)
    state = LAUNCHER.state(handle)
    assert (state.phase, len(pool.documents)) == ("unknown", 1)
    assert "the disk is full" in state.evidence
    with pytest.raises(PlaceUnreachable, match="the disk is full"):
        LAUNCHER.events(handle, 0)
    pool.get_blob = real
    assert LAUNCHER.state(handle).phase == "finished"


def test_of_an_agent_that_was_wrong_only_replayed_blocks_count(pool, tmp_path) -> None:
    """An unchecked block, by an agent that cheated elsewhere, is not gone on from."""
    handle, lease = started(pool)
    commit(pool, lease, tmp_path, 10, 20, 30)
    lease |= {"state": "final", "outcome": "slashed", "reason": "finished"}
    lease["result"] = lease["commitments"][2]["plain"]
    lease["challenges"] = [
        replay(0, equal=True),
        replay(2, equal=False, verifier="v"),
        replay(2, equal=False, verifier="w"),
    ]
    assert LAUNCHER.state(handle).phase == "requeued"
    assert lease["commitments"][0]["blob"] in pool.of(on.Opened)[-1].inputs
    lease["challenges"] = lease["challenges"][1:]
    pool.documents.pop(f"{handle['job']}.1")
    assert LAUNCHER.state(handle).phase == "requeued"
    assert len(pool.of(on.Opened)[-1].inputs) == 1, "it begins anew"


@pytest.mark.parametrize("what", ["nothing committed", "another checkpoint", "no checkpoint"])
def test_results_that_were_not_committed_to_are_not_taken(pool, tmp_path, what) -> None:
    """An agent that commits to nothing cannot be checked; nor can one whose results hold another state."""
    handle, lease = started(pool)
    commit(pool, lease, tmp_path, 10, 20)
    result = lease["commitments"][0]["plain"]
    if what == "nothing committed":
        lease["commitments"] = []
    if what == "no checkpoint":
        pack_folder(tmp_path, [], tmp_path / "empty", TreeLimits(num_bytes=1))
        result = pool.put_blob(tmp_path / "empty")
    judged(lease, True, True)
    lease |= {"state": "closed", "reason": "finished", "result": result}
    state = LAUNCHER.state(handle)
    assert state.phase == "requeued"
    assert "committed" in state.why
    assert pool.of(on.Opened)[-1].offer_id == "dear"


@pytest.mark.parametrize("is_heir", [False, True])
def test_a_run_that_was_cut_short_is_not_finished(pool, tmp_path, is_heir) -> None:
    """An agent that makes a few updates honestly and says that this was all is not taken at its word."""
    handle, lease = started(pool)
    commit(pool, lease, tmp_path, 10, 20, total=1000)
    judged(lease, True, True)
    result, block = (lease["commitments"][-1][name] for name in ("plain", "blob"))
    if is_heir:
        lease |= {"state": "closed", "reason": "lost"}
        LAUNCHER.state(handle)
        lease = pool.documents[f"{handle['job']}.1"]
    lease |= {"state": "closed", "reason": "finished", "result": result}
    state = LAUNCHER.state(handle)
    assert state.phase == "requeued"
    assert "ended at update 20 of 1,000" in state.why
    assert pool.of(on.Opened)[-1].offer_id != lease["offer_id"]
    assert block in pool.of(on.Opened)[-1].inputs
    pool.documents[pool.of(on.Opened)[-1].lease_id] |= {"state": "closed", "reason": "reclaimed: it is needed"}
    LAUNCHER.state(handle)
    assert lease["offer_id"] not in {one.offer_id for one in pool.of(on.Opened)[-2:]}, "it was asked again"


def test_a_run_that_ended_early_by_its_own_rule_is_finished(pool, tmp_path) -> None:
    """The verdict is part of the state that was committed, and so of what replays compare."""
    handle, lease = started(pool)
    commit(pool, lease, tmp_path, 10, 20, total=1000, verdict="no better since update 10")
    judged(lease, True, True)
    lease |= {"state": "closed", "reason": "finished", "result": lease["commitments"][-1]["plain"]}
    assert LAUNCHER.state(handle).phase == "finished"


@pytest.mark.parametrize(("reason", "phase"), [("failed: lr is wrong", "failed"), ("stopped: asked", "stopped")])
def test_what_would_fail_again_is_not_tried_elsewhere(pool, reason, phase) -> None:
    """A job that fails by itself, and one that was stopped, end there."""
    handle, lease = started(pool)
    lease |= {"state": "closed", "reason": reason, "closed_by": lease["renter"]}
    state = LAUNCHER.state(handle)
    assert state.phase == phase
    assert not state.why.startswith(f"{phase}: "), "the phase is shown before it"
    assert len(pool.documents) == 1


@pytest.mark.parametrize("reason", ["finished", "stopped: asked"])
@pytest.mark.parametrize("verify", ["none", "100%"])
def test_an_agents_words_neither_finish_nor_stop_a_run(pool, tmp_path, reason, verify) -> None:
    """Without results a run is not finished, and only its renter stops it."""
    handle, lease = started(pool, options={"verify": verify})
    commit(pool, lease, tmp_path, 10)
    judged(lease, True)
    lease |= {"state": "closed", "reason": reason, "closed_by": "e" * 64}
    assert LAUNCHER.state(handle).phase == "requeued"
    assert lease["commitments"][0]["blob"] in pool.of(on.Opened)[-1].inputs


def test_a_stopped_run_goes_on_from_its_last_block(pool, tmp_path) -> None:
    """The same command continues; another code begins over."""
    handle, lease = started(pool)
    commit(pool, lease, tmp_path, 10)
    LAUNCHER.stop(handle)
    assert lease["reason"].startswith("stopped")
    assert LAUNCHER.state(handle).phase == "stopped"
    again = LAUNCHER.start(submission(), print)
    assert lease["commitments"][0]["blob"] in pool.of(on.Opened)[-1].inputs
    assert again["first"] == 1
    LAUNCHER.stop(again)
    other = replace(submission().code, files=(TreeFile.of_bytes("job.py", b"def job(): 1\n"),))
    LAUNCHER.start(submission(code=other), print)
    assert len(pool.of(on.Opened)[-1].inputs) == 1


def test_the_time_and_the_deadline_bound_what_is_spent(pool, tmp_path) -> None:
    """Nothing is opened for more than the deadline, nor after the time of the run is used up."""
    with pytest.raises(PlaceFailed, match=r"1 h .* deadline is in 10 min"):
        LAUNCHER.start(submission(options={"deadline": "10min"}), print)
    with pytest.raises(PlaceFailed, match="is not known"):
        LAUNCHER.start(submission(time_limit_s=None), print)
    assert not pool.documents
    handle, lease = started(pool)
    lease["running_s"] = 3600
    commit(pool, lease, tmp_path, 10)
    lease |= {"state": "closed", "reason": "lost"}
    assert LAUNCHER.state(handle).phase == "failed"


def going_well(
    pool: Pool, tmp_path, total: int = 1000, verdict: str | None = None, **changes: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A handle, and its lease at the offer `dear`, which has made 30 of 1,000 updates in half a minute."""
    pool.offers.pop("cheap")
    handle, lease = started(pool, **changes)
    commit(pool, lease, tmp_path, 10, 20, 30, total=total, verdict=verdict)
    for number, block in enumerate(lease["commitments"], 1):
        block |= {"at_s": 10.0 * number, "running_s": 10 * number}
    lease |= {"running_s": 31, "accepted_s": 0.0, "heard_s": 31.0, "rate_per_hour": 900_000}
    lease["forecast"] = {"hours": 1.0, "credits": 0}
    return handle, lease


def test_a_run_moves_to_a_much_cheaper_offer_from_its_last_block(pool, tmp_path) -> None:
    """It says so in the lease that it leaves and in its state, and does not move for little, or where it must not."""
    handle, lease = going_well(pool, tmp_path)
    pool.offer("same", 890_000)
    pool.offer("other-class", 1_000, determinism_class="another")
    assert LAUNCHER.state(handle).phase == "running"
    pool.offer("cheap", 100_000)
    bound = {**handle, "address": "dear"}
    unwilling = {**handle, "options": {**handle["options"], "move": "no"}}
    poor = {**handle, "max_credits": 300}
    over = {**handle, "until_s": 1.0}
    late = {**handle, "until_s": time.time() + 960}  # 970 s are left here, and the move takes more
    for stays in (bound, unwilling, poor, over, late):
        assert LAUNCHER.state(stays).phase == "running"
    unfetched: list[str] = []
    pool.peer = SimpleNamespace(note_unfetched=lambda *digests: unfetched.extend(digests))
    state = LAUNCHER.state(handle)
    assert (state.phase, state.restarts) == ("requeued", 1)
    assert unfetched == list(pool.of(on.Opened)[-1].inputs), "a renter that leaves now takes them with it"
    assert "at cheap, " in state.why
    assert "goes on from update 30" in state.why
    assert lease["reason"].startswith("moved: the rest is expected to cost 0.0")
    opened = pool.of(on.Opened)[-1]
    assert opened.offer_id == "cheap"
    assert lease["commitments"][-1]["blob"] in opened.inputs


def test_a_run_whose_results_are_on_their_way_stays(pool, tmp_path) -> None:
    """One that ended early by its own rule has updates left, and makes none of them."""
    handle, _ = going_well(pool, tmp_path, verdict="the loss does not fall any more")
    pool.offer("cheap", 100_000)
    assert LAUNCHER.state(handle).phase == "running"


def test_what_large_files_may_cost_is_set_aside(pool, tmp_path) -> None:
    """By a run that moves, of its credits and of --max-cost: without it the next lease could not get its data."""
    options = {"verify": "100%", "forwarding": "0.1usd"}
    handle, lease = going_well(pool, tmp_path, options=options)
    pool.offer("cheap", 100_000)
    pool.balance, lease["escrow"], pool.forward_price = 290_000, 0, 50_000
    assert LAUNCHER.state(handle).phase == "running"
    pool.balance = 390_000
    assert LAUNCHER.state({**handle, "max_credits": 300_000}).phase == "running"
    assert LAUNCHER.state({**handle, "max_credits": 400_000}).phase == "requeued"
    assert pool.of(on.Opened)[-1].deposit + 100_000 <= 390_000


def test_a_deposit_leaves_room_for_large_files_in_the_most_that_is_spent(pool) -> None:
    """--max-cost counts what goes through the pool, where that has a price."""
    options = {"verify": "none", "forwarding": "0.05usd"}
    for price, deposit in ((0, 100_000), (1, 50_000)):
        pool.forward_price = price
        pool.documents.clear()
        LAUNCHER.start(submission(options=options, max_cost=0.1, time_limit_s=7200.0), lambda text: None)
        assert pool.of(on.Opened)[-1].deposit == deposit
    options["forecasts"] = json.dumps({"cpu/1": {"run_s": 3600.0}})
    with pytest.raises(BadJob, match=r"0\.05 of 0\.1 credits are left, since 0\.05 are kept for forwarding") as refused:
        LAUNCHER.start(submission(run="other-1", options=options, max_cost=0.1, time_limit_s=7200.0), lambda text: None)
    assert "or --place-option forwarding" in str(refused.value.remedy)


@pytest.mark.parametrize("what", ["balance", "replays", "contract", "waiting"])
def test_a_lease_is_not_closed_for_one_that_could_not_be_opened(pool, tmp_path, what) -> None:
    """Too little money once the replays of this lease are paid, a deposit that stays in a contract, others who wait."""
    handle, lease = going_well(pool, tmp_path)
    pool.offer("cheap", 100_000)
    if what == "balance":
        pool.balance, lease["escrow"] = 100_000, 0
    elif what == "replays":
        handle = {**handle, "max_credits": 200_000}
    elif what == "contract":
        pool.contract = f"eip155:1:0x{'0' * 40}"
    else:
        pool.num_waiting = 1
    assert LAUNCHER.state(handle).phase == "running"
    assert lease["state"] == "running"
    pool.balance, pool.contract, pool.num_waiting = 300_000, "", 0
    assert LAUNCHER.state({**handle, "max_credits": 400_000}).phase == "requeued"
    assert pool.of(on.Opened)[-1].offer_id == "cheap"


@pytest.mark.parametrize("what", ["plan", "offer", "refused"])
def test_what_agents_say_ends_no_run_that_goes_well(pool, tmp_path, what) -> None:
    """A number that no float holds, an offer of another form, a list that is refused: the run stays where it is."""
    handle, lease = going_well(pool, tmp_path, total=10**400 if what == "plan" else 1000)
    pool.offer("cheap", 100_000)
    if what == "offer":
        pool.offers["new"] = {"is_free": True, "agent": "new", "offer": {"offer_id": "new"}}
    if what == "refused":
        pool.state = lambda *_, **__: (_ for _ in ()).throw(on.Refused("not shown"))
    assert LAUNCHER.state(handle).phase == "running"
    assert lease["state"] == "running"


def test_better_offers_are_looked_for_now_and_then(pool, tmp_path, monkeypatch) -> None:
    """A list of all offers may be megabytes, and the state is asked for every few seconds."""
    monkeypatch.setattr(rented_run, "LOOK_S", 300.0)
    monkeypatch.setattr(rented_run, "_looked_s", {})
    handle, _ = going_well(pool, tmp_path)
    asked, state = [], pool.state
    pool.state = lambda what, **more: (asked.append(what), state(what, **more))[1]
    for _ in range(3):
        assert LAUNCHER.state(handle).phase == "running"
    assert asked == ["offers"]


def test_a_run_moves_a_few_times_at_most(pool, tmp_path) -> None:
    """What an offer says of itself may be wrong, each time anew."""
    handle, lease = going_well(pool, tmp_path)
    for number in range(rented_run.MOST_MOVES):
        pool.documents[f"{handle['job']}.{number}"] = {
            **lease,
            "state": "closed",
            "reason": "moved: it is cheaper there",
        }
    pool.documents[f"{handle['job']}.{rented_run.MOST_MOVES}"] = lease
    pool.offer("cheap", 100_000)
    assert LAUNCHER.state(handle).phase == "running"
    pool.documents[f"{handle['job']}.0"]["reason"] = "lost"
    assert LAUNCHER.state(handle).phase == "requeued"


def test_a_better_offer_that_is_gone_by_then(pool, tmp_path) -> None:
    """The lease is closed by then: the run goes on at the best of what is left, after its rest."""
    handle, lease = going_well(pool, tmp_path)
    pool.offer("cheap", 100_000)
    post = pool.post

    def taken(body: on.Body, **more: Any) -> None:
        if isinstance(body, on.Opened) and body.offer_id == "cheap":
            raise on.Refused("the offer 'cheap' is taken")
        post(body, **more)
        lease["closed_s"] = time.time()

    pool.post = taken
    assert LAUNCHER.state(handle).phase == "queued"
    lease["closed_s"] = time.time() - 61
    assert LAUNCHER.state(handle).phase == "requeued"
    assert pool.of(on.Opened)[-1].offer_id == "dear"


def test_a_fraction_of_a_second_pays_for_no_further_lease(pool) -> None:
    """A forecast has fractions, leases are paid for whole seconds: what is left over opens nothing.

    Nor does the time of a lease that came to no block within it, and was paid nothing.
    """
    handle, lease = started(pool, time_limit_s=60.5)
    lease |= {"state": "closed", "reason": "the deposit is used up", "running_s": 60, "closed_by": lease["delegate"]}
    state = LAUNCHER.state(handle)
    assert state.phase == "failed"
    assert "are over" in state.why
    assert "the same command begins again, for as long as" in state.why
    assert len(pool.documents) == 1


@pytest.mark.parametrize(
    ("limit_s", "text"),
    [
        (1100.0, ""),
        (520.0, "; at its pace the 8 min 40 s of the run end at about 50 % of its updates, and the same command"),
    ],
)
def test_a_run_that_is_slower_than_its_forecast_is_known_to_be_short_of_time(
    pool, tmp_path, limit_s: float, text: str
) -> None:
    """Long before its deposit ends; then it says where it stands, and what to do."""
    forecast = {"run_s": 400.0, "total_updates": 1000}
    options = {"verify": "100%", FORECASTS: json.dumps({"cpu": forecast}), "move": "no"}
    handle, lease = going_well(pool, tmp_path, time_limit_s=limit_s, options=options)
    state = LAUNCHER.state(handle)
    assert state.phase == "running"
    assert text in state.why
    assert bool(text) == ("at its pace" in state.why)
    used_up = {"state": "closed", "reason": "the deposit is used up", "closed_by": lease["delegate"]}
    lease |= {**used_up, "running_s": math.ceil(limit_s)}
    state = LAUNCHER.state(handle)
    assert state.phase == "failed"
    assert "the same command goes on after update 30, for as long as" in state.why


PLAN = '{"candidates": [{"forecast": {"total_updates": 20}}]}'


@pytest.mark.parametrize(
    "content",
    ["[" * 5000 + "]" * 5000, PLAN.replace("20", "1e999"), PLAN + " " * (65 << 20)],
    ids=["deep", "inf", "big"],
)
def test_a_plan_that_an_agent_made_up_is_a_sentence(pool, tmp_path, content) -> None:
    """Deep, infinite or huge: the run goes on elsewhere, and its renter follows on."""
    handle, lease = started(pool)
    commit(pool, lease, tmp_path, 10, 20)
    run = tmp_path / f"run-{lease['lease_id']}-20"
    (run / "plan.json").write_text(content)
    pack_folder(run, plain_names(run), tmp_path / "tree", TreeLimits(num_bytes=1 << 30))
    lease["commitments"][-1]["blob"] = pool.put_blob(tmp_path / "tree")
    judged(lease, True, True)
    lease |= {"state": "closed", "reason": "finished", "result": lease["commitments"][-1]["plain"]}
    state = LAUNCHER.state(handle)
    assert state.phase == "requeued"
    assert "cannot be read" in state.why


def test_replicas_that_exchange_times_are_not_checked(pool) -> None:
    """No replay of DiLoCo's sites comes to the same state: refused with `--verify`, before anything is sent."""
    job = SimpleNamespace(sync=object(), until=SimpleNamespace(unit="epochs"))
    with pytest.raises(BadJob, match="2 replicas with updates of their own"):
        LAUNCHER.with_forecasts(job, None, submission(target=LAUNCHER.parse("/2xcpu")), print)


def test_a_length_in_seconds_is_not_checked(pool) -> None:
    """Where each machine makes another number of updates, no replay says whether the run is whole."""
    job = SimpleNamespace(until=SimpleNamespace(unit="seconds"))
    with pytest.raises(BadJob, match="given in seconds"):
        LAUNCHER.with_forecasts(job, None, submission(), print)


def test_a_weaker_isolation_than_asked_for_is_not_taken(pool) -> None:
    """An owner who offers less than the renter wants is left out; where there is no other, that is said."""
    probe = LAUNCHER.probe(LAUNCHER.parse(""), {"isolation": "gvisor"})
    assert probe.missing
    assert "gvisor" in probe.missing[0]
    pool.offer("strong", 950_000, isolation="gvisor")
    assert not LAUNCHER.probe(LAUNCHER.parse(""), {"isolation": "gvisor"}).missing
    started(pool, options={"isolation": "gvisor"})
    assert pool.of(on.Opened)[0].offer_id == "strong"


def test_several_agents_at_a_pool_with_a_contract_are_refused_before_anything_is_sent(pool) -> None:
    """A contract takes one deposit at a time: all of them or none could not be promised."""
    pool.contract = "eip155:1:0x" + "0" * 40
    with pytest.raises(PlaceFailed, match="takes one lease at a time"):
        LAUNCHER.start(submission(options={"agents": "2"}), print)
    assert not any(pool.folder.iterdir())


def test_secrets_and_images_are_refused_with_the_reason(pool) -> None:
    """An owner with root reads every job: no secret goes to a machine of a stranger."""
    with pytest.raises(BadJob, match="readable by the owner"):
        LAUNCHER.start(submission(secrets=("TOKEN",)), print)
    with pytest.raises(BadJob, match="own environment"):
        LAUNCHER.start(submission(image="x"), print)
    with pytest.raises(BadJob, match="outside of the job's folder"):
        LAUNCHER.start(submission(expected=("/data/x",)), print)


def test_checkpoints_and_memory_are_as_the_command_says(pool, tmp_path) -> None:
    """`--checkpoint-every` is the length of a block, `--memory` the most, unless the agent has less."""
    words = ("--checkpoint-every", "120.0", "--memory", "1GiB")
    started(pool, arguments=words)
    order = read_order((pool.folder / pool.of(on.Opened)[0].order).read_bytes())
    assert order.block_s == 120
    started(pool, run="other-1")
    at_most_a_minute = read_order((pool.folder / pool.of(on.Opened)[1].order).read_bytes())
    assert at_most_a_minute.block_s == 54, "the last part of a block is for sending its checkpoint"
    for own_gib, megabytes in ((64, 1024), (1, 819)):
        box = JobBox(tmp_path / f"{own_gib}", order)
        box.run.mkdir(parents=True)
        limits = Limits(memory_bytes=own_gib << 30, cores=1, disk_bytes=1)
        box.training(Host(isolation=None, limits=limits))
        sent = json.loads((box.run / "launch" / "order.json").read_text())["arguments"]
        assert sent[-4:] == ["--checkpoint-every", "120", "--memory", f"{megabytes}MiB"]
    gpus = ("/dev/nvidia0", "/dev/nvidia3", "/dev/nvidiactl")
    box = JobBox(tmp_path / "gpus", replace(order, arguments=(), num_devices=2))
    box.run.mkdir(parents=True)
    program = box.training(Host(isolation=None, limits=limits, devices=gpus))
    sent = json.loads((box.run / "launch" / "order.json").read_text())
    assert program.devices == gpus
    assert (sent["ranks_each"], sent["are_ranks_fixed"]) == (2, True)
    assert "--memory" not in sent["arguments"], "the host's memory limits no GPU's"
    for options, every in (({"block": "60s"}, "120"), ({}, "600")):
        with pytest.raises(BadJob, match=r"ends a block|takes no blocks of more"):
            LAUNCHER.start(submission(run="other-1", arguments=("--checkpoint-every", every), options=options), print)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"verify": "much"}, "share of the blocks"),
        ({"isolation": "none"}, "wanted bubblewrap"),
        ({"bond": "much"}, "--place-option bond much: wanted US dollars"),
        ({"value": "-1usd"}, "--place-option value -1usd: wanted US dollars"),
        ({"forwarding": "x"}, "--place-option forwarding x: wanted US dollars"),
    ],
)
def test_terms_that_cannot_be_meant_are_refused(options, why) -> None:
    """Nothing that cannot be meant becomes a default."""
    with pytest.raises(BadJob, match=why):
        Terms.of(options)


@pytest.mark.parametrize(
    "changes", [{"run": "../x"}, {"code": "/etc"}, {"job_file": "../../x"}, {"block_s": math.nan}, {"block_s": -1.0}]
)
def test_an_order_leads_nowhere_out_of_its_box(changes) -> None:
    """A renter's order cannot name a folder of the owner."""
    fields = {"run": "x", "tree": "0" * 64, "code": "code/1", "stoker": "stoker/1", "job_file": "job.py"}
    with pytest.raises(ValueError, match=r"name|leads out|wanted more than 0"):
        PoolOrder(**fields | changes)
    assert "code/1" in dumps(PoolOrder(**fields))
