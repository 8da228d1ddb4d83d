"""`stoker plan`: its JSON document, its table, and what it says of bad rows in a user's files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from stoker.cli.plan_table import render_decision
from stoker.records import Breakdown, Candidate, Decision, Estimate, Layout, Plan, Rejection, Share
from tests.cli.page import Page
from tests.flow.command import Outcome, job_file, stoker_here
from tests.planning.trials import candidate

JOBS = Path(__file__).parents[1] / "flow" / "jobs"
ESTIMATED = {"peak_bytes": "bytes", "step_s": "s", "total_s": "s", "energy_kwh": "kWh", "cost_usd": "USD"}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which these tests leave each other what they traced."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, traces: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own, and no files of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOKER_CACHE", str(traces))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("STOKER_PRICES", "STOKER_CATALOGUE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def shown(decision: Decision, *, width: int = 100, explain: bool = False) -> str:
    """What is printed of a decision."""
    console = Page(width)
    render_decision(decision, console, explain=explain)
    return console.text


def decision(*candidates: Candidate, rejected: tuple[Rejection, ...] = (), advice: str = "") -> Decision:
    """Of these candidates, the first of which is chosen."""
    shares = (Share(what="activation", value=6e8, where="train_me.py:12"), Share(what="parameter", value=4e8))
    return Decision(
        device=candidates[0].device,
        candidates=candidates,
        rejected=rejected,
        explanation=("a reason",),
        took_s=1.0,
        advice=advice,
        breakdown=Breakdown(
            peak_bytes=shares,
            peak_at="in the backward pass, train_me.py:30",
            step_s=(Share(what="mm, forward", value=0.07, where="train_me.py:12"),),
        ),
    )


H100 = candidate("h100", total_s=3600, cost=3.0)
L4 = candidate("l4", total_s=36000, cost=2.0)
LOST = Rejection(device="t4", plan=Plan(device="cuda:0", micro_batch=8), reason="takes 20 h, the deadline is 11 h")


def plan_json(*options: str) -> Outcome:
    """The command with `--json` on a small job."""
    return stoker_here("plan", job_file(), "--json", *options)


def test_json_is_one_document_with_every_estimate() -> None:
    """Devices that are not here: value, interval, unit and basis of each; best first; the rejected with reasons."""
    ended = plan_json("--on", "l4,h100")
    assert (ended.code, ended.err) == (0, "")
    document = json.loads(ended.out)
    assert document["record"] == "Decision"
    assert {one["device"] for one in document["candidates"]} == {"l4", "h100"}
    for one in document["candidates"]:
        assert one["plan"]["micro_batch"] == 16
        assert one["memory_bytes"] > 0
        for name, unit in ESTIMATED.items():
            estimate = one["forecast"][name]
            assert estimate["low"] <= estimate["value"] <= estimate["high"], name
            assert (estimate["unit"], estimate["basis"]) == (unit, "datasheet"), name
    times = [one["forecast"]["total_s"]["value"] for one in document["candidates"]]
    assert times == sorted(times)
    assert document["rejected"]
    assert all(one["reason"] and one["device"] for one in document["rejected"])


def test_a_device_that_is_here_costs_nothing_in_json() -> None:
    """Neither a price nor a cost; its time was measured. The advice is there for who asks no further."""
    document = json.loads(plan_json().out)
    (here,) = document["candidates"]
    assert here["is_here"]
    assert here["price"] is None
    assert here["forecast"]["cost_usd"] is None
    assert here["forecast"]["step_s"]["basis"] == "measured here"
    assert document["advice"].startswith("What is here is enough")


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--on", "h10"), 2, "There is no device named 'h10'"),
        (("--on", "0xh100"), 2, "asks for 0 devices"),
        (("--on", ","), 2, "names no device"),
        (("--deadline", "soon"), 2, "--deadline soon: wanted a time with its unit"),
        (("--max-cost", "-3"), 2, "--max-cost -3: wanted US dollars"),
        (("--max-cost", "20eur"), 2, "--max-cost 20eur: wanted US dollars"),
        (("--on", "h100", "--set", "epochs=1e9", "--deadline", "1min"), 3, "within 1 min; the nearest is h100"),
    ],
)
def test_what_cannot_be_had_ends_with_its_code(options: tuple[str, ...], code: int, says: str) -> None:
    """2 for what was asked wrongly, 3 for what no device does; nothing on standard output."""
    ended = plan_json(*options)
    assert (ended.code, ended.out) == (code, "")
    assert says in ended.err
    assert "try:" in ended.err or code == 2


def test_a_bad_row_of_a_price_file_is_named_and_the_rest_used(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line and column on standard error, even where the document goes to standard output."""
    prices = place / "prices.csv"
    prices.write_text("device,provider,usd_per_hour\nh100,Mine,cheap\nl4,Mine,0.01\n")
    monkeypatch.setenv("STOKER_PRICES", str(prices))
    from stoker.devices import prices as known

    monkeypatch.setattr(known, "_price_list", known.price_list)
    ended = plan_json("--on", "l4")
    assert ended.code == 0
    assert f"warning: {prices}, line 2, column 'usd_per_hour': wanted 0 to 1000 US dollars, found 'cheap'" in ended.err
    (l4,) = json.loads(ended.out)["candidates"]
    assert (l4["price"]["provider"], l4["price"]["usd_per_hour"]) == ("Mine", 0.01)


def test_a_bad_row_of_a_catalogue_is_named_and_the_rest_used(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device and column; a word of the built-in catalogue still means what it did."""
    catalogue = place / "catalogue.json"
    catalogue.write_text(json.dumps({"devices": [{"name": "dream", "cells": {"memory_gib": ["lots", "me", "today"]}}]}))
    monkeypatch.setenv("STOKER_CATALOGUE", str(catalogue))
    from stoker.devices import catalogue as known

    known.cache_clear()
    try:
        ended = plan_json("--on", "l4")
    finally:
        known.cache_clear()
    assert ended.code == 0
    assert f"warning: {catalogue}, device 'dream'" in ended.err
    assert ended.err.count("dream") == 1
    assert [one["device"] for one in json.loads(ended.out)["candidates"]] == ["l4"]


def test_the_table_has_a_line_a_device() -> None:
    """Memory of what there is, an update, the whole, what it costs and why; the chosen one is marked."""
    text = shown(decision(H100, L4))
    (chosen,) = [line for line in text.splitlines() if "▸" in line]
    assert "h100" in chosen
    assert "1.0 / 16 GiB" in chosen
    assert "$3.00" in chosen
    (other,) = [line for line in text.splitlines() if line.strip().startswith("l4 ")]
    assert "10 h" in other
    assert "• a reason" in text


def test_what_is_here_is_yours() -> None:
    """It is printed without a price."""
    text = shown(decision(H100, candidate("cpu", total_s=9e4, cost=None, is_here=True)))
    (here,) = [line for line in text.splitlines() if line.strip().startswith("cpu ")]
    assert "$" not in here


def test_a_price_nobody_asks_is_unknown() -> None:
    """Which is not the same as nothing."""
    assert "unknown" in shown(decision(H100, candidate("p4", total_s=9e4, cost=None)))


def test_explaining_shows_bytes_time_and_what_was_rejected() -> None:
    """With the user's lines; without, only how many were rejected."""
    told = decision(H100, rejected=(LOST,))
    text = " ".join(shown(told, explain=True).split())
    for words in (
        "where the bytes are at the peak",
        "in the backward pass, train_me.py:30",
        "train_me.py:12",
        "60%",
        "where the time of an update goes",
        "takes 20 h, the deadline is 11 h",
    ):
        assert words in text
    assert "traced as" not in text
    brief = shown(told)
    assert "takes 20 h" not in brief
    assert "--explain" in brief


def test_a_trace_that_expects_more_than_was_measured_says_its_own_whole() -> None:
    """Shares are of what the parts add up to, and that is not passed off as the forecast."""
    step_s = Estimate(value=0.02, low=0.02, high=0.02, unit="s", basis="measured here")
    forecast = dataclasses.replace(H100.forecast, step_s=step_s)
    text = " ".join(shown(decision(dataclasses.replace(H100, forecast=forecast)), explain=True).split())
    assert "where the time of an update goes, 20 ms, traced as 70 ms" in text


def test_advice_comes_last() -> None:
    """The sentence for who asks no further."""
    lines = shown(decision(H100, advice="What is here is enough.")).rstrip().splitlines()
    assert lines[-1] == "→ What is here is enough."


def test_a_plan_in_brief_leaves_out_what_is_usual() -> None:
    """Threads only of a CPU; memory format, checkpoints, compiling and workers where they are chosen."""
    assert Plan(device="cuda:0", micro_batch=8).in_brief() == "fp32 · micro-batch 8"
    loaded = Plan(
        device="cpu",
        micro_batch=8,
        precision="bf16",
        memory_format="channels_last",
        checkpointed_blocks=3,
        compile=True,
        threads=2,
        loader="workers",
        num_workers=4,
        optimizer_implementation="fused",
    )
    brief = loaded.in_brief()
    for words in ("bf16", "channels-last", "3 checkpointed blocks", "compiled", "fused", "2 threads", "4 loader"):
        assert words in brief


def test_one_of_a_thing_is_not_said_as_of_several() -> None:
    """A block, a worker; also where a plan is reported in full."""
    plan = Plan(device="cpu", micro_batch=8, checkpointed_blocks=1, loader="workers", num_workers=1)
    brief = plan.in_brief()
    assert "1 checkpointed block" in brief
    assert brief.endswith("1 loader worker")
    assert "1 loader worker · default optimiser · 1 checkpointed block" in plan.in_words()


def test_layouts_stand_beside_each_other() -> None:
    """A column for the layout in place of the device, and one for what processes tell each other."""

    def under(layout: Layout, exposed_s: float) -> Candidate:
        one = candidate("2xh100", total_s=3600, cost=3.0)
        exposed, hidden = (
            Estimate(value=value, low=value, high=value, unit="s", basis="datasheet") for value in (exposed_s, 2e-3)
        )
        forecast = dataclasses.replace(one.forecast, exposed_s=exposed, hidden_s=hidden, communication_bytes=3 * 2**20)
        return dataclasses.replace(one, plan=dataclasses.replace(one.plan, layout=layout), forecast=forecast)

    lost = Rejection(device="2xh100", plan=Plan(device="cuda:0", micro_batch=1, layout=Layout(tensor=2)), reason="odd")
    found = shown(
        decision(under(Layout(replicas=2), 0.004), under(Layout(shards=2), 0.007), rejected=(lost,)),
        width=160,
        explain=True,
    )
    assert "layout" in found
    assert "2 replicas" in found
    assert "3.0 MiB · 4 ms + 2 ms hidden" in found
    assert "3.0 MiB · 7 ms + 2 ms hidden" in found
    assert "2-way tensor" in found


def test_layouts_on_several_kinds_of_devices_name_them() -> None:
    """Rows of equal layouts on different devices can be distinguished, and 80 columns cut nothing off."""

    def on(device: str, why: str) -> Candidate:
        one = candidate(device, total_s=17_820, cost=91.49)
        exposed = Estimate(value=0.0357, low=0.03, high=0.04, unit="s", basis="datasheet")
        plan = dataclasses.replace(one.plan, layout=Layout(shards=8), micro_batch=4 if device == "8xb200" else 2)
        forecast = dataclasses.replace(one.forecast, exposed_s=exposed, communication_bytes=2**36)
        return dataclasses.replace(one, plan=plan, forecast=forecast, why=why)

    found = shown(decision(on("8xb200", "fastest"), on("8xh100", "2.8× the time, 1.1× the cost")), width=80)
    assert "8xb200: 8 shards:" in found
    assert "8xh100: 8 shards:" in found
    rows = found[: found.index("8xb200: 8 shards:")].split()
    assert [word for word in ("8xb200:", "8xh100:", "2.8×", "the", "time,", "1.1×", "cost") if word not in rows] == []


def test_how_far_forecasts_were_off_is_for_those_who_ask() -> None:
    """It is an explanation of the interval, which is there anyway."""
    line = "errors of forecasts here so far (median): time from traces alone over ten times off"
    decided = dataclasses.replace(decision(L4), explanation=("a reason", line))
    assert "a reason" in shown(decided)
    assert "errors of forecasts" not in shown(decided)
    assert "errors of forecasts" in shown(decided, explain=True)
