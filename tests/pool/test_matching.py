from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from stoker.devices.hardware import daly_interval_s, lost_s
from stoker.pool.events import CREDIT, Measured, OfferedDevice
from stoker.pool.matching import (
    PRIOR_HOURS,
    PRIOR_LOSSES,
    Columns,
    EarlierRun,
    Match,
    Needs,
    RunForecast,
    after_runs,
    best_move,
    calibrated,
    earlier_ratios,
    earlier_runs,
    expected_costs,
    forecast_word,
    hazard_per_hour,
    listed_offers,
    offer_word,
    rank_offers,
    worth_moving,
    worth_probing,
)
from stoker.pool.state import ListedOffer, Record
from stoker.records.codec import to_json
from tests.pool.book import offer
from tests.pool.fake_pool import shown

HOUR_S = 3600.0
BARE = Needs(setup_s=0.0, checkpoint_blocked_s=0.0)


def listed(name: str, kind: str, price: float, **more: Any) -> ListedOffer:
    """An offer of one GPU at a price in credits an hour, by an agent of the same name."""
    made = offer(
        name, device=OfferedDevice(kind=kind), price_per_hour=round(price * CREDIT), isolation="podman", min_s=0
    )
    return ListedOffer(offer=replace(made, **more), agent=name, offered_s=0.0)


def box(name: str, price: float, *, cores: int = 2, flop_per_s: float = 1e9, **more: Any) -> ListedOffer:
    """An offer of cores, by an agent of the same name."""
    measured = Measured(cores=cores, fp32_flop_per_s=flop_per_s)
    return listed(name, "cpu", price, **{"measured": measured, "determinism_class": "same", **more})


def forecasts(**hours: float) -> Any:
    """Forecasts without errors, by kind."""
    return lambda kind: RunForecast(run_s=hours[kind] * HOUR_S, spread=0.0) if kind in hours else f"{kind} is too small"


SURE = {name: Record(ran_s=1e12, finished=10**6, passed=10**6) for name in ("fast", "slow", "middle", "x", "y")}
MARKET = [listed("slow", "rtx", 0.69), listed("fast", "h100", 2.69), listed("middle", "a100", 1.39)]


def test_the_cheapest_hour_is_not_the_cheapest_finish() -> None:
    """The case of the anchors: 1 h, 2.5 h and 5.56 h at three prices; the order of prices is the other way round."""
    ranking = rank_offers(Columns.of(MARKET, SURE, 0.0), BARE, forecasts(h100=1.0, a100=2.5, rtx=5.56))
    assert [match.listed.agent for match in ranking.matches] == ["fast", "middle", "slow"]
    assert [match.price_rank for match in ranking.matches] == [3, 2, 1]
    assert [round(match.credits / CREDIT, 2) for match in ranking.matches] == [2.69, 3.48, 3.84]
    assert "though 0.69 credits an hour against 2.69 credits: 5.6 times as many hours" in ranking.matches[2].why
    assert "2 cheaper an hour" in ranking.matches[0].why


def test_hours_count_as_much_as_they_are_worth() -> None:
    """A patient renter takes the cheap slow machine, one in a hurry the fast one."""
    columns = Columns.of(MARKET, SURE, 0.0)
    hours = forecasts(h100=1.0, a100=2.5, rtx=3.0)
    for value, best in ((0.0, "slow"), (5.0, "fast")):
        ranking = rank_offers(columns, replace(BARE, value_per_hour=round(value * CREDIT)), hours)
        assert ranking.best is not None
        assert ranking.best.listed.agent == best


def test_what_cannot_be_taken_is_counted_by_its_reason() -> None:
    """Memory, isolation, devices, hours, money and time: each with how many offers it excludes."""
    market = [
        *MARKET,
        listed("weak", "h100", 0.1, isolation="bubblewrap"),
        listed("eight", "h100", 0.1, device=OfferedDevice(kind="h100", count=8)),
        listed("night", "h100", 0.1, hours=(22, 6)),
        listed("full", "h100", 0.1, disk_bytes=5),
    ]
    market = [
        one if one.agent == "full" else replace(one, offer=replace(one.offer, disk_bytes=10**12)) for one in market
    ]
    needs = replace(
        BARE,
        least_isolation="podman",
        disk_bytes=1e9,
        max_credits=3 * CREDIT,
        deadline_s=2 * HOUR_S,
    )
    ranking = rank_offers(Columns.of(market, SURE, 12 * HOUR_S), needs, forecasts(h100=1.0, a100=2.1))
    assert [match.listed.agent for match in ranking.matches] == ["fast"]
    assert dict(ranking.refused) == {
        "rtx is too small": 1,
        "isolates less than podman": 1,
        "has another number of devices than 1": 1,
        "has less disk than 953.7 MiB": 1,
        "is not lent at this hour": 1,
        "is finished after 2 h": 1,
    }
    assert rank_offers(Columns.of([], {}, 0.0), needs, forecasts()).best is None


def test_a_record_of_losses_costs() -> None:
    """Of like machines the one that is lost more often comes last, and a new one is neither trusted nor damned."""
    records = {"x": Record(lost=30, ran_s=100 * HOUR_S), "y": Record(lost=1, ran_s=1000 * HOUR_S)}
    market = [listed(name, "h100", 1.0) for name in ("x", "new", "y")]
    needs = replace(BARE, setup_s=300.0, checkpoint_blocked_s=30.0)
    ranking = rank_offers(Columns.of(market, records, 0.0), needs, forecasts(h100=10.0))
    assert [match.listed.agent for match in ranking.matches] == ["y", "new", "x"]
    assert hazard_per_hour(Record()) == PRIOR_LOSSES / PRIOR_HOURS


def test_the_cost_of_losses_is_the_planners() -> None:
    """Interval and expected time are those of `devices.hardware`, which plans checkpoints of all other runs."""
    columns = Columns.of([listed("x", "h100", 1.0)], {"x": Record(lost=2, ran_s=26 * HOUR_S)}, 0.0)
    needs = replace(BARE, setup_s=120.0, checkpoint_blocked_s=20.0)
    costs = expected_costs(columns, needs, [RunForecast(run_s=10 * HOUR_S, spread=0.0)])
    mtbf_s = HOUR_S / columns.hazard[0]
    interval_s = daly_interval_s(20.0, mtbf_s)
    assert costs.interval_s[0] == pytest.approx(interval_s)
    run_s = 10 * HOUR_S * (1 + 20.0 / interval_s)
    expected_s = run_s + lost_s(run_s, interval_s, 120.0, mtbf_s)
    assert costs.metered_hours[0] * HOUR_S == pytest.approx(expected_s + 120.0)


def test_slow_links_and_measured_speeds_count() -> None:
    """Data over the measured link, and a machine that was measured slower than its kind."""
    market = [
        listed("x", "h100", 1.0, download_bytes_per_s=1e6),
        listed("y", "h100", 1.0, download_bytes_per_s=1e8, measured=Measured(fp32_flop_per_s=5e13)),
    ]
    forecast = RunForecast(run_s=HOUR_S, spread=0.0, reference_flop_per_s=1e14)
    costs = expected_costs(Columns.of(market, SURE, 0.0), replace(BARE, sent_bytes=3.6e9), [forecast])
    assert costs.hours == pytest.approx([2.0, 2.01], rel=1e-3)


def test_replays_of_new_providers_are_part_of_the_price() -> None:
    """A new provider is replayed whole, a known one by the share that was asked for."""
    market = [listed("x", "h100", 1.0), listed("new", "h100", 0.6)]
    columns = Columns.of(market, SURE, 0.0)
    for verify, best in ((0.0, "new"), (0.05, "x")):
        ranking = rank_offers(columns, replace(BARE, verify_fraction=verify), forecasts(h100=1.0))
        assert ranking.best is not None
        assert ranking.best.listed.agent == best


def test_a_minute_of_probing_only_where_it_can_change_the_choice() -> None:
    """Two kinds that are close and unsure are probed; one that is far ahead is not."""
    columns = Columns.of(MARKET, SURE, 0.0)

    def of(spread: float, a100: float) -> list[str]:
        hours = {"h100": 1.0, "a100": a100, "rtx": 50.0}
        ranking = rank_offers(columns, BARE, lambda kind: RunForecast(run_s=hours[kind] * HOUR_S, spread=spread))
        return [match.listed.agent for match in worth_probing(ranking, 0)]

    assert of(0.1, 2.0) == ["fast", "middle"]
    assert of(0.1, 4.0) == []
    assert of(0.001, 2.0) == []


def test_offers_of_several_devices_have_a_forecast_of_their_own() -> None:
    """By number, kind and cores; with any number allowed all are ranked together, by money and hours."""
    pair = box("pair", 0.8, cores=4, device=OfferedDevice(kind="cpu", count=2))
    eight = listed("eight", "h100", 20.0, device=OfferedDevice(kind="h100", count=8))
    assert [forecast_word(one) for one in (pair, eight, MARKET[1])] == ["2xcpu/4", "8xh100", "h100"]
    assert forecast_word(pair, {"pair"}) == "2xcpu/4@pair"
    assert [offer_word(one.offer) for one in (pair, eight, MARKET[1])] == [
        "pool:pair/2xcpu",
        "pool:eight/8xh100",
        "pool:fast",
    ]
    hours = {"h100": 8.0, "8xh100": 1.0}

    def forecast_of(word: str) -> RunForecast:
        return RunForecast(run_s=hours[word] * HOUR_S, spread=0.0)

    columns = Columns.of([MARKET[1], eight], SURE | {"eight": SURE["fast"]}, 0.0)
    ranking = rank_offers(columns, replace(BARE, num_devices=0), forecast_of)
    assert [match.listed.agent for match in ranking.matches] == ["eight", "fast"]
    ranking = rank_offers(columns, replace(BARE, num_devices=8), forecast_of)
    assert [match.listed.agent for match in ranking.matches] == ["eight"]
    assert ranking.refused == {"has another number of devices than 8": 1}


def test_history_corrects_a_forecast() -> None:
    """By how far earlier runs were off, the more the more there were; without any it stays."""
    first = RunForecast(run_s=1000.0, spread=0.1)
    assert calibrated(first, []) is first
    one, five = calibrated(first, [1.5]), calibrated(first, [1.5] * 5)
    assert 1000 < one.run_s < five.run_s < 1500
    assert five.spread < one.spread
    of_job = {"hours": 1.0, "credits": 0, "job": "j", "raw_hours": 1.0}
    lease = shown(reason="finished", device="h100", running_s=5400, forecast=of_job)
    others = [
        replace(lease, reason="lost"),
        replace(lease, device="l4"),
        replace(lease, forecast=replace(lease.forecast, job="k")),
        replace(lease, forecast=replace(lease.forecast, raw_hours=0.0)),
    ]
    assert earlier_ratios([replace(lease, num_devices=8)], "j", "h100") == []
    assert earlier_ratios([replace(lease, num_devices=8)], "j", "h100", 8) == [1.5]
    assert earlier_ratios([replace(lease, gang="run")], "j", "h100") == []  # it has waited for others
    assert earlier_ratios([lease, *others], "j", "h100") == [1.5]


def blocks_at(*places: tuple[int, float]) -> list[dict[str, Any]]:
    """Blocks that were committed after so many updates, so long after the meter began [s]."""
    return [
        {"block": number, "update": update, "state": "a", "blob": "b", "at_s": at_s, "running_s": int(at_s)}
        for number, (update, at_s) in enumerate(places)
    ]


def test_a_short_lease_says_how_fast_a_job_is_on_an_offer() -> None:
    """Pace between blocks, set-up before them: of each offer by itself, whatever kind of device it is said to be."""
    blocks = blocks_at((20, 1020.0), (50, 1035.0), (80, 1050.0))
    lease = shown(
        offer_id="slow",
        accepted_s=1000.0,
        heard_s=1052.0,
        running_s=50,
        commitments=blocks,
        forecast={"hours": 1.0, "credits": 0, "job": "j", "raw_hours": 0.5},
    )
    resumed = replace(
        lease,
        forecast=replace(lease.forecast, raw_hours=0.0),
        commitments=shown(commitments=blocks_at((20, 1020.0), (140, 1080.0))).commitments,
    )
    others = [
        replace(lease, forecast=replace(lease.forecast, job="k")),
        replace(lease, commitments=lease.commitments[:1]),
    ]
    of_list = replace(lease, commitments=())
    site = replace(lease, gang="run", gang_leases=(("run-s0.0",), ("run-s1.0",)))
    of_gang = earlier_runs([site, resumed], "j", sites=2)
    assert earlier_runs([site, resumed], "j", sites=3) == {}, "each has another part of the batch"
    assert [[run.has_exchanges for run in each] for each in of_gang.values()] == [[True]]
    assert after_runs(RunForecast(run_s=9.0), *of_gang.values(), 60).has_exchanges
    runs = earlier_runs([lease, resumed, *others, of_list, site], "j")
    assert runs == {
        "slow": [
            EarlierRun(updates_per_s=2.0, over_s=30.0, setup_s=8.0),
            EarlierRun(updates_per_s=2.0, over_s=60.0, setup_s=None),
        ]
    }

    finished = replace(lease, reason="finished", running_s=47, heard_s=1075.0)  # its results took 25 s
    [[run]] = earlier_runs([finished], "j").values()
    after = after_runs(RunForecast(run_s=9.0), [run], 80)
    assert after.setup_s is not None
    assert after.setup_s + after.run_s == 47, "the same run would take what its meter said"

    def forecast_of(word: str) -> RunForecast:
        first = RunForecast(run_s=HOUR_S, spread=0.3, reference_flop_per_s=1e14)
        return after_runs(first, runs["slow"], 1000) if word == "h100@slow" else first

    offers = [listed("slow", "h100", 1.0), listed("fast", "h100", 1.0)]
    matches = rank_offers(Columns.of(offers, {}, 0.0, runs), replace(BARE, setup_s=30.0), forecast_of).matches
    metered = {match.listed.agent: match.metered_hours * HOUR_S for match in matches}
    assert metered["slow"] == pytest.approx(508, rel=0.01)
    assert metered["fast"] > HOUR_S
    assert {match.listed.agent: match.forecast.raw_s for match in matches if match.forecast}["slow"] == HOUR_S


def test_a_job_moves_only_for_a_tenth() -> None:
    """What the move itself takes counts against it."""
    stay, go = (Match(listed=MARKET[0], score=score * CREDIT) for score in (10.0, 8.0))
    assert worth_moving(stay, go, move_credits=0, value_per_hour=0, move_s=0.0)
    assert not worth_moving(stay, go, move_credits=CREDIT, value_per_hour=0, move_s=0.0)
    assert not worth_moving(stay, go, move_credits=0, value_per_hour=CREDIT, move_s=HOUR_S)


def moved(here: ListedOffer, others: list[ListedOffer], pace: float = 1.0, runs: Any = None, **more: Any) -> str:
    """Where a job of 10,000 updates goes on that made 100 at `pace` [updates/s]; "": it stays."""
    blocks = blocks_at(*((10 * n, 10 * n / pace) for n in range(1, 11)))
    lease = shown(**{"commitments": blocks, "running_s": int(100 / pace), **more})
    needs = replace(BARE, value_per_hour=CREDIT, setup_s=60.0)
    found = best_move(here, others, {}, lease=lease, total_updates=10_000, needs=needs, runs=runs or {}, now_s=0.0)
    return "" if found is None else found[1].listed.offer.offer_id


def test_a_job_moves_to_where_its_rest_costs_a_tenth_less() -> None:
    """Cheaper by the hour, or faster by what it did there or was measured at; never to another determinism class."""
    here = box("here", 1.0)
    assert moved(here, [box("dear", 2.0), box("same", 1.0), box("a-little", 0.9)]) == ""
    assert moved(here, [box("cheap", 0.4), box("cheaper", 0.3)]) == "cheaper"
    assert moved(here, [box("other", 0.1, determinism_class="other")]) == ""
    assert moved(here, [box("small", 0.1, cores=1)]) == ""
    assert moved(here, [box("fast", 1.0, flop_per_s=3e9)]) == "fast"
    ran = {"known": [EarlierRun(updates_per_s=4.0, over_s=100.0, setup_s=60.0)]}
    assert moved(here, [box("known", 1.0)], runs=ran) == "known"
    assert moved(here, [box("known", 1.0)], pace=4.0, runs=ran) == ""


def test_a_move_that_costs_more_than_it_saves_is_not_made() -> None:
    """Near the end, with much to make again, or where too little is known of the pace here."""
    here, cheap = box("here", 1.0), [box("cheap", 0.4)]
    assert moved(here, cheap) == "cheap"
    assert moved(here, cheap, pace=500.0) == ""
    assert moved(here, cheap, running_s=5000) == ""
    assert moved(here, cheap, forwarded_credits=2 * CREDIT) == "", "sending it all again costs more than it saves"
    few = blocks_at((10, 10.0), (20, 20.0))
    assert moved(here, cheap, commitments=few, running_s=20) == ""


def test_offers_as_the_control_plane_shows_them() -> None:
    """What is taken, or whose agent is away, is left out."""
    document = {**to_json(MARKET[0]), "is_free": True, "is_present": True, "record": to_json(Record(lost=3))}
    offers, records = listed_offers([document, {**document, "is_free": False}, {**document, "is_present": False}])
    assert offers == [MARKET[0]]
    assert records == {"slow": Record(lost=3)}


def test_a_machine_that_is_always_lost_is_not_taken() -> None:
    """Rather than forecast in ages."""
    columns = Columns.of([listed("x", "h100", 0.01)], {"x": Record(lost=10**6, ran_s=HOUR_S)}, 0.0)
    ranking = rank_offers(columns, replace(BARE, setup_s=3600.0), forecasts(h100=10.0))
    assert ranking.best is None
    costs = expected_costs(columns, replace(BARE, setup_s=3600.0), [RunForecast(run_s=36000.0)])
    assert math.isinf(costs.hours[0])
