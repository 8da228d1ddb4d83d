"""The regret of a choice, with measurements that are made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.forecast.measuring import Measured, Request
from bench.forecast.regret import Choice, Contest
from stoker.records import Plan

Seconds = Callable[[Plan, int], float]


class Machine:
    """A machine on which a plan takes what `seconds(plan, seed)` says; remembers what was asked of it."""

    def __init__(self, seconds: Seconds) -> None:
        self.seconds = seconds
        self.requests: list[Request] = []

    def ask(self, request: Request) -> list[Measured]:
        """Made-up times; a bf16 plan of a quarter of the batch fails."""
        self.requests.append(request)
        return [
            Measured(plan=at, round=turn, error="it broke")
            if plan.precision == "bf16" and plan.micro_batch == 8
            else Measured(plan=at, round=turn, update_s=(self.seconds(plan, request.seed),) * request.updates)
            for turn in range(request.rounds)
            for at, plan in enumerate(request.plans)
        ]


def contest(machine: Machine, chosen: Plan) -> Contest:
    """Twelve plans of a tiny MLP, two passes, five processes."""
    return Contest(
        size="tiny",
        most=12,
        passes=2,
        processes=5,
        ask=machine.ask,
        choose=lambda _name, _size: Choice(plan=chosen, took_s=1.0),
    )


def faster_fused(plan: Plan, seed: int) -> float:
    """Fused saves a tenth, mapped memory costs a fifth, one thread as much again; a later process is slower."""
    return (
        (0.9 if plan.optimizer_implementation == "fused" else 1.0)
        * (1.2 if plan.malloc == "mapped" else 1.0)
        * (2.0 if plan.threads == 1 else 1.0)
        * (1 + seed / 1000)
        * 32
        / plan.micro_batch
    )


def outcome(path: Path) -> dict[str, object]:
    """The result of the one job."""
    found: dict[str, object] = json.loads(path.read_text())["results"]["mlp"]
    return found


def test_a_choice_a_tenth_slower_than_the_best_has_a_regret_of_a_ninth(tmp_path: Path) -> None:
    """1 / 0.9 in every process, so with certainty."""
    path = tmp_path / "regret.json"
    chosen = Plan(device="cpu", micro_batch=32, threads=2, optimizer_implementation="default")
    assert not contest(Machine(faster_fused), chosen).run(["mlp"], path, "a test")
    assert outcome(path)["regret"] == pytest.approx(1 / 9)
    assert outcome(path)["regret_upper"] == pytest.approx(1 / 9)


def test_a_choice_that_was_not_named_is_timed_with_the_others(tmp_path: Path) -> None:
    """It may even be better than all that were."""
    path = tmp_path / "regret.json"
    chosen = Plan(device="cpu", micro_batch=32, threads=7, optimizer_implementation="fused", checkpoint_every_s=5.0)
    machine = Machine(lambda plan, seed: 0.1 if plan.threads == 7 else faster_fused(plan, seed))
    assert contest(machine, chosen).run(["mlp"], path, "a test")
    found = outcome(path)
    assert (found["regret"], found["regret_upper"], found["best"]) == (0.0, 0.0, found["chosen"])
    assert len(json.loads(path.read_text())["results"]["mlp"]["finalists"]) == 4


def test_the_three_fastest_go_on(tmp_path: Path) -> None:
    """By their brief times, wherever they are among the plans named."""
    path = tmp_path / "regret.json"
    machine = Machine(lambda plan, _seed: plan.micro_batch * (2.0 if plan.threads == 1 else 1.0))
    contest(machine, Plan(device="cpu", micro_batch=32, threads=2)).run(["mlp"], path, "a test")
    found = json.loads(path.read_text())
    brief = found["results"]["mlp"]["brief_s"]
    fastest = sorted(brief, key=brief.__getitem__)[:3]
    plans = found["registered"]["jobs"]["mlp"]["plans"]
    assert [one["plan"] for one in found["results"]["mlp"]["finalists"][:3]] == [plans[int(at)] for at in fastest]
    assert fastest != ["0", "1", "2"]


def test_nothing_is_timed_before_the_plans_are_on_disk(tmp_path: Path) -> None:
    """When the first question is asked, the file holds every plan and its digest."""
    path = tmp_path / "regret.json"
    machine, seen = Machine(faster_fused), []

    def asking(request: Request) -> list[Measured]:
        seen.append(json.loads(path.read_text()))
        return machine.ask(request)

    chosen = Plan(device="cpu", micro_batch=32, threads=2)
    Contest(
        size="tiny",
        most=12,
        passes=1,
        processes=5,
        ask=asking,
        choose=lambda _name, _size: Choice(plan=chosen, took_s=1.0),
    ).run(["mlp"], path, "a test")
    assert len(seen[0]["registered"]["jobs"]["mlp"]["plans"]) == 12
    assert "results" not in seen[0]
    assert seen[0]["registered_digest"] == json.loads(path.read_text())["registered_digest"]


def test_plans_of_one_process_share_their_malloc(tmp_path: Path) -> None:
    """Whatever the finalists are, no request mixes the two."""
    machine = Machine(faster_fused)
    contest(machine, Plan(device="cpu", micro_batch=32, threads=2)).run(["mlp"], tmp_path / "regret.json", "a test")
    assert all(len({plan.malloc for plan in request.plans}) == 1 for request in machine.requests)
    assert {plan.malloc for request in machine.requests for plan in request.plans} == {"retained", "default", "mapped"}
