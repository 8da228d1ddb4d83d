from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from click.testing import Result
from typer.testing import CliRunner

from stoker.cli.main import app
from stoker.errors import NoDevice
from stoker.pool import events as on
from stoker.pool import presence
from stoker.pool.agent import Lending
from stoker.pool.client import PoolClient
from stoker.pool.events import CREDIT, Measured, OfferedDevice, canonical
from stoker.pool.isolation import Bubblewrap
from stoker.pool.keys import Key, own_key
from stoker.pool.matching import RunForecast
from stoker.records import Device
from tests.pool.book import offer, opened
from tests.pool.server import in_thread, until
from tests.pool.test_watch import Dispute, states_of

JOB = str(Path(__file__).parents[2] / "examples" / "digits.py")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without keys."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.delenv("STOKER_POOL", raising=False)
    return tmp_path


def said(*arguments: str) -> Result:
    """What `stoker pool` answers."""
    return CliRunner().invoke(app, ["pool", *arguments])


def test_a_wallet_from_its_key_to_credits(home: Path) -> None:
    """The first look makes the key and says how to be admitted; a grant by the operator is there at once."""
    with in_thread(home / "pool") as (_, operator):
        address = str(operator.address)
        first = said("wallet", "--pool", address)
        assert first.exit_code == 0, first.output
        assert "the key is not admitted" in first.output
        key = own_key().public
        assert key in first.output
        folder = str(home / "pool")
        granted = said("wallet", "--pool", address, "--grant", f"{key}=2.50usd", "--folder", folder, "--json")
        assert json.loads(granted.output) == {"key": key, "balance": 2_500_000, "in_escrow": 0, "bonds": 0}
        other = said("wallet", "--pool", address, "--grant", f"{'0' * 64}=1usd", "--folder", folder).output
        assert f"granted  1.00 credits to {'0' * 64}" in other
        assert "balance  2.50 credits" in other
        for word, text in (("abc", "wanted KEY=AMOUNT"), ("abc=1usd", "wanted 64 hexadecimal digits")):
            wrong = said("wallet", "--pool", address, "--grant", word, "--folder", folder)
            assert wrong.exit_code == 2
            assert text in wrong.output


def test_a_ledger_that_anyone_can_audit(home: Path) -> None:
    """Every event is a line; the exported log is right, and one changed byte of it is not."""
    with in_thread(home / "pool") as (_, operator):
        for amount in (5, 6, 7):
            operator.post(on.Deposited(account="0" * 64, amount=amount))
        address = str(operator.address)
        lines = said("ledger", "--pool", address, "--after", "1").output.splitlines()
        assert [line.split()[0] for line in lines] == ["2", "3", "4"]
        assert "deposited" in lines[0]
        assert "amount 0.000005 credits" in lines[0]
        documents = [json.loads(line) for line in said("ledger", "--pool", address, "--json").output.splitlines()]
        assert [one["kind"] for one in documents] == ["founded", "deposited", "deposited", "deposited"]
        assert said("ledger", "--pool", address, "--export", str(home / "log.jsonl")).exit_code == 0
    good = said("audit", str(home / "log.jsonl"), "--head", documents[2]["hash"])
    assert good.exit_code == 0, good.output
    assert "4 events are right" in good.output
    assert said("audit", str(home / "pool" / "log.db")).exit_code == 0
    content = (home / "log.jsonl").read_bytes()
    (home / "log.jsonl").write_bytes(content.replace(b'"amount":6', b'"amount":9'))
    bad = said("audit", str(home / "log.jsonl"), "--json")
    assert bad.exit_code == 2
    assert json.loads(bad.output)["bad_event"] == 3
    assert said("audit", str(home / "none.jsonl")).exit_code == 2


def test_an_audit_lists_updates_on_which_an_agent_and_a_verifier_differ(home: Path) -> None:
    """With both states and the arbiter's, so that anyone who can make the update may hold it against them."""
    dispute = Dispute(states_of(wrong=17), [states_of(), states_of()])
    assert dispute.run() == "slashed"
    lines = [canonical(event.document()).decode() for event in dispute.book.events]
    (home / "log.jsonl").write_text("\n".join(lines))
    shown = said("audit", str(home / "log.jsonl"))
    assert shown.exit_code == 0, shown.output
    assert "lease job, block 0: update 17 is the first that differs" in shown.output
    assert "1 for the verifier, 0 for the agent" in shown.output
    [found] = json.loads(said("audit", str(home / "log.jsonl"), "--json").output)["updates_in_dispute"]
    assert (found["update"], found["agent_state"]) == (17, states_of(wrong=17)[17])
    assert [state for _, state in found["arbiters"]] == [found["verifier_state"]] == [states_of()[17]]


def test_teams(home: Path) -> None:
    """The operator makes them; what cannot be meant is said."""
    with in_thread(home / "pool") as (plane, operator):
        options = ("--pool", str(operator.address), "--folder", str(home / "pool"))
        made = said("team", "a", "--member", "1" * 64, "--weight", "2", "--priority", "1", "--quota", "8", *options)
        assert made.exit_code == 0, made.output
        assert plane.state.teams["a"].most_devices == 8
        wrong = said("team", "a", "--member", "x", *options)
        assert wrong.exit_code == 2
        assert "wanted keys" in wrong.output


def agent_of(operator: PoolClient, name: str, price: float, device: OfferedDevice, measured: Measured) -> None:
    """An agent that offers a device, and is there."""
    agent = PoolClient(operator.address, Key.made())
    assert agent.key is not None
    operator.post(on.Deposited(account=agent.key.public, amount=CREDIT))
    made = offer(name, time.time(), device=device, measured=measured, price_per_hour=round(price * CREDIT))
    agent.post(on.Offered(offer=made))
    agent.work()


@pytest.fixture
def agents_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that asked for work once are there until the test ends, however long a forecast takes."""
    for limit in ("HERE_S", "PRESENT_S"):
        monkeypatch.setattr(presence, limit, math.inf)


@pytest.mark.usefixtures("agents_stay")
def test_offers_for_a_job(home: Path) -> None:
    """In the order of money and hours until it is done, with why not; alone, in the order of prices."""
    with in_thread(home / "pool") as (_, operator):
        agent_of(operator, "here", 0.10, OfferedDevice(kind="cpu"), Measured(cores=1))
        agent_of(operator, "large", 300.00, OfferedDevice(kind="h100"), Measured())
        agent_of(operator, "odd", 0.01, OfferedDevice(kind="toaster"), Measured())
        address = str(operator.address)
        assert [line.split()[0] for line in said("offers", "--pool", address).output.splitlines()[1:]] == [
            "odd",
            "here",
            "large",
        ]
        ranked = said("offers", "--pool", address, "--for", JOB, "--verify", "0", "--json")
        assert ranked.exit_code == 0, ranked.output
        document = json.loads(ranked.stdout)
        names = [match["listed"]["offer"]["offer_id"] for match in document["matches"]]
        assert sorted(names) == ["here", "large"]
        assert names[0] == "here"  # a minute or more, most of it to start: cheaper at any load of this machine
        assert document["num_usable"] == 2
        assert any("toaster" in why for why in document["refused"])
        shown = said("offers", "--pool", address, "--for", JOB, "--max-cost", "0.000001usd")
        assert shown.exit_code == 3
        assert "costs more than" in shown.output
        operator.post(on.Deposited(account=own_key().public, amount=9 * CREDIT))
        PoolClient(operator.address, own_key()).post(opened(offer_id="here", rate_per_hour=CREDIT // 10))
        assert "1 more are taken" in said("offers", "--pool", address).output
        assert "taken" in said("offers", "--pool", address, "--all").output


def test_without_a_pool(home: Path) -> None:
    """What is missing, and where it comes from."""
    result = said("offers")
    assert result.exit_code == 2
    assert "STOKER_POOL" in result.output
    assert said("serve", "--host", "nowhere", "--folder", str(home / "pool")).exit_code == 2


def test_names_that_no_pool_has_are_sentences(home: Path) -> None:
    """Of a lease, and of an offer, which the agent finds when it makes it."""
    if problem := Bubblewrap().trial():
        pytest.skip(problem)
    with in_thread(home / "pool", is_open=True) as (_, operator):
        address = ("--pool", str(operator.address))
        offered = ("--price", "1usd/h", "--no-measure", "--isolation", "bubblewrap", "--folder", str(home / "agent"))
        for words in (("dispute", "../x", *address), ("offer", "--name", "a b", *address, *offered)):
            answer = said(*words)
            assert answer.exit_code == 2, answer.output
            assert isinstance(answer.exception, SystemExit)
            assert "wanted 1 to 64 letters, digits, '.', '_' or '-'" in answer.output


@pytest.mark.parametrize(
    ("option", "value"), [("--price", "nan/h"), ("--cost", "much"), ("--disk", "much"), ("--max-upload", "much/day")]
)
def test_an_amount_that_is_none_is_named_by_its_option(
    home: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: str
) -> None:
    """Not by another one that also takes amounts."""
    monkeypatch.setattr("stoker.pool.isolation.best_isolation", lambda name, devices: Bubblewrap())
    words = {"--price": "1usd/h", "--pool": f"http://127.0.0.1:1#{'a' * 64}", "--folder": str(home), option: value}
    answer = said("offer", "--no-measure", *(word for pair in words.items() for word in pair))
    assert answer.exit_code == 2
    assert f"error: {option} {value.partition('/')[0]}: wanted" in answer.output


@pytest.mark.parametrize("command", ["wallet", "pause", "serve", "offer"])
def test_a_folder_that_cannot_be_made_is_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Keys, the agent's folder, the pool's: which path, and what the system says of it."""
    monkeypatch.setattr("stoker.pool.isolation.best_isolation", lambda name, devices: Bubblewrap())
    (home / "file").write_text("")
    folder = str(home / "file" / "below")
    address = ("--pool", f"http://127.0.0.1:1#{'a' * 64}")
    words = {
        "wallet": ("wallet", *address),
        "pause": ("pause", "--folder", folder),
        "serve": ("serve", "--folder", folder),
        "offer": ("offer", "--price", "1usd/h", "--no-measure", "--folder", folder, *address),
    }[command]
    if command == "wallet":
        monkeypatch.setenv("XDG_CONFIG_HOME", folder)
    answer = said(*words)
    assert answer.exit_code == 2, answer.output
    assert isinstance(answer.exception, SystemExit)
    assert f"{folder}" in answer.output.replace("\n", "")


def test_an_offers_limits_are_those_that_are_asked_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may run for as long as the longest lease; bond and window are bounded as the owner says."""
    lent: list[Lending] = []
    monkeypatch.setattr("stoker.pool.isolation.best_isolation", lambda name, devices: Bubblewrap())
    monkeypatch.setattr("stoker.pool.agent.Agent.run", lambda agent: lent.append(agent.lending))
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    words = [
        "offer",
        "--price",
        "1usd/h",
        "--pool",
        f"http://127.0.0.1:1#{'a' * 64}",
        "--device",
        "cpu",
        "--no-measure",
        "--longest",
        "3d",
        "--most-bond",
        "2usd",
        "--longest-window",
        "6h",
        "--folder",
        str(home / "agent"),
    ]
    answer = said(*words)
    assert answer.exit_code == 0, answer.output
    (lending,) = lent
    assert lending.limits.time_s == lending.max_s == 3 * 86_400
    assert (lending.most_bond, lending.longest_window_s) == (2 * CREDIT, 6 * 3600)


def test_several_gpus_are_lent_with_their_files_and_no_others(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of one offer, at the price of all; a CPU's processes need a core each."""
    lent: list[Lending] = []
    gpu = Device(name="cuda:0", kind="cuda", model="NVIDIA L4", cores=0, memory_bytes=24 << 30, fast_dtypes=("fp32",))
    gpus = tuple(replace(gpu, name=f"cuda:{index}", index=index) for index in range(3))
    monkeypatch.setattr("stoker.api.attached_devices", lambda: gpus, raising=False)
    monkeypatch.setattr("stoker.pool.isolation.best_isolation", lambda name, devices: Bubblewrap())
    monkeypatch.setattr("stoker.pool.agent.Agent.run", lambda agent: lent.append(agent.lending))
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    address, folder = f"http://127.0.0.1:1#{'a' * 64}", str(home / "agent")
    words = ["offer", "--price", "1usd/h", "--pool", address, "--no-measure", "--folder", folder]
    answer = said(*words, "--device", "2xl4")
    assert answer.exit_code == 0, answer.output
    (lending,) = lent
    assert (lending.num_devices, lending.gpus, lending.price_per_hour) == (2, (0, 1), CREDIT)
    assert lending.devices[:3] == ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl")
    assert lending.limits.processes == 1024
    assert "at 1usd/h for all 2 devices" in answer.output
    assert "not all attached" in said(*words, "--device", "4xl4").output
    monkeypatch.setattr("stoker.api.attached_devices", lambda: (replace(gpu, name="cpu", kind="cpu", cores=4),))
    assert "2 processes share 1 cores" in said(*words, "--device", "2xcpu", "--cores", "1").output


def owner_words(operator: PoolClient, home: Path, *more: str) -> list[str]:
    """`stoker pool offer` of a small CPU, which is measured first."""
    small = ("--memory", "64MiB", "--cores", "1", "--disk", "16MiB", "--device", "cpu", "--name", "box", "--no-replay")
    return [
        "offer",
        "--price",
        "1usd/h",
        "--pool",
        str(operator.address),
        "--folder",
        str(home / "agent"),
        *small,
        *more,
    ]


@pytest.mark.slow
def test_a_device_is_measured_offered_found_and_taken_back(home: Path) -> None:
    """The commands one after the other: admit, measure and offer, look, and end; what was shown is what is offered."""
    if problem := Bubblewrap().trial():
        pytest.skip(problem)
    with in_thread(home / "pool") as (_, operator):
        address = str(operator.address)
        key, control = own_key("owner").public, str(home / "pool")
        assert said("wallet", "--pool", address, "--grant", f"{key}=1usd", "--folder", control).exit_code == 0
        words = owner_words(operator, home, "--key", "owner", "--isolation", "bubblewrap")
        command = [sys.executable, "-m", "stoker", "pool", *words]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                until(lambda: operator.state("offers") or process.poll() is not None, 300)
                offers = operator.state("offers")
                process.send_signal(signal.SIGINT)
                told = process.communicate(timeout=60)[1]
            finally:
                process.kill()
        assert len(offers) == 1, told
        listed = offers[0]
        measured = listed["offer"]["measured"]
        assert listed["agent"] == key
        assert f"{measured['fp32_flop_per_s'] / 1e9:,.1f} GFLOP/s in fp32" in told
        assert measured["cores"] == 1
        assert min(listed["offer"][f"{way}load_bytes_per_s"] for way in ("up", "down")) > 0
        assert "the link to the pool: " in told
        assert listed["offer"]["device"]["memory_bytes"] == 64 << 20
        assert process.returncode == 0, told
        assert operator.state("offers") == [], "it was not withdrawn"
        kinds = [event.kind for event in operator.events()]
        assert kinds == ["founded", "deposited", "offered", "withdrawn"]


def test_a_device_that_does_not_pass_is_not_offered(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner reads what was wrong, and the log of the pool nothing."""

    class Lying:
        def __init__(self, cores: float) -> None:
            assert cores == 1

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def __call__(self, question: dict[str, Any]) -> dict[str, Any]:
            return {"root": "0" * 64} if question["ask"] != "rows" else {"rows": "", "first": "", "salted": ""}

    monkeypatch.setattr("stoker.pool.isolation.best_isolation", lambda name, devices: Bubblewrap())
    monkeypatch.setattr("stoker.pool.hardware_proof.LocalDevice", Lying)
    with in_thread(home / "pool", is_open=True) as (plane, operator):
        answer = said(*owner_words(operator, home))
        assert answer.exit_code == NoDevice.exit_code
        assert "did not pass its own measurement" in answer.output
        assert plane.state.seq == 1


@pytest.mark.slow
@pytest.mark.usefixtures("agents_stay")
def test_close_forecasts_name_what_to_try(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a minute's lease could change the order, the commands are there; after it they are not."""
    kinds = {"here": 1.0, "there": 1.02}
    bases = ["datasheet", "history"]
    monkeypatch.setattr(
        "stoker.pool.forecasting.job_forecasts",
        lambda *_: lambda word: RunForecast(run_s=3600.0 * kinds.get(word, 1.0), spread=0.3, basis=bases[0]),
    )
    with in_thread(home / "pool") as (_, operator):
        for name in kinds:
            agent_of(operator, name, 1.0, OfferedDevice(kind=name), Measured())
        words = ("offers", "--pool", str(operator.address), "--for", JOB)
        shown = said(*words)
        for name in kinds:
            assert f"stoker train {JOB} --on pool:{name} --time-limit 60s" in shown.output
        assert json.loads(said(*words, "--json").stdout)["probes"] == ["here", "there"]
        bases.pop(0)
        assert "may change the order" not in said(*words).output
