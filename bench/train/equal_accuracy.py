"""What Stoker's plan learns against plain fp32: the same weights, order, batch and samples, several seeds.

    python -m bench.train.equal_accuracy [--case gpt …] [--seeds 3] [--out FILE]

The plan is the one Stoker chooses for the case as it is timed, once. For each seed a run under it, and a plain PyTorch
loop in fp32, train on the same samples and are evaluated by the same code on the test part, in fp32: accuracy of
images, loss of text. The learning rate rises at first and falls to 0 at the end, as in runs that people keep: under a
constant one the last weights are worth a point more or less from one update to the next. Each run is a process of its
own, and what is done is kept: the same command goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

import stoker
from bench.forecast.registration import dated
from bench.train import results
from bench.train.cases import CASES, WEIGHT_DECAY, Case, loss_of, quick
from bench.train.contenders.stoker_job import the_job
from bench.train.driving import ROOT
from bench.train.material import Material, prepare, read
from stoker import records
from stoker.records.codec import JSON

SIDES = ("fp32", "stoker")
_EVALUATED_AT_ONCE = 100
_WARMUP, _INITIAL = 0.05, 0.1


def share_of_rate(progress: float) -> float:
    """The share of the learning rate there is at a share of the run: from a tenth straight up to 1, then down to 0."""
    return min(_INITIAL + (1 - _INITIAL) * progress / _WARMUP, (1 - progress) / (1 - _WARMUP))


def in_fp32(material: Material, updates: int) -> nn.Module:
    """The model after so many updates of a plain loop."""
    case, model = material.case, material.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: share_of_rate(update / updates))
    for _, rows in zip(range(updates), material.batches(), strict=False):
        loss_of(case, model(material.inputs[rows]), material.targets[rows]).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


def under_plan(material: Material, plan: records.Plan, updates: int, seed: int) -> nn.Module:
    """The model after so many updates of `stoker.train` under a plan."""
    job = dataclasses.replace(the_job(material, seed=seed), until=stoker.updates(updates), schedule=share_of_rate)
    run = stoker.train(job, plan=plan, new=True, sink=lambda _event: None)
    model = material.model()
    model.load_state_dict(run.weights())
    return model


@torch.no_grad()
def evaluated(material: Material, model: nn.Module) -> dict[str, float]:
    """Mean loss on the test part, and of images the share of right answers."""
    model.eval()
    loss = right = 0.0
    inputs, targets = material.test_inputs, material.test_targets
    for x, y in zip(inputs.split(_EVALUATED_AT_ONCE), targets.split(_EVALUATED_AT_ONCE), strict=True):
        logits = model(x)
        loss += float(loss_of(material.case, logits, y)) * len(x)
        right += float((logits.argmax(-1) == y).float().mean()) * len(x)
    found = {"loss": loss / len(inputs)}
    return found if material.case.is_text else found | {"accuracy": right / len(inputs)}


def compared(runs: Mapping[str, Sequence[Mapping[str, float]]], measure: str) -> dict[str, float]:
    """Means over seeds of both sides, their difference, and how far seeds of fp32 lie apart (standard deviation)."""
    values = {side: [run[measure] for run in runs[side]] for side in SIDES}
    return {
        "fp32": statistics.mean(values["fp32"]),
        "stoker": statistics.mean(values["stoker"]),
        "difference": statistics.mean(values["stoker"]) - statistics.mean(values["fp32"]),
        "deviation_of_seeds": statistics.stdev(values["fp32"]) if len(values["fp32"]) > 1 else 0.0,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="tiny cases, to see that it works")
    parser.add_argument("--out", type=Path, help="where results go, and what was done so far is found")
    parser.add_argument("--one", nargs=3, metavar=("SIDE", "SEED", "PLAN"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        side, seed, plan = given.one
        print(json.dumps(_one(_case(given.case[0], is_quick=given.quick), side, int(seed), plan)))
        return 0
    path = given.out or dated(f"train_accuracy{'_quick' if given.quick else ''}")
    command = f"python -m bench.train.equal_accuracy --case {' '.join(given.case)} --seeds {given.seeds}"
    content = results.read(path) or results.document("what is learned against fp32", command, {}) | {"cases": {}}
    for name in given.case:
        found = content["cases"].setdefault(name, {"runs": {side: [] for side in SIDES}})
        if "plan" not in found:
            found["plan"] = _ask(name, "plan", 0, "", is_quick=given.quick)
        for seed in range(given.seeds):
            for side in SIDES:
                if len(found["runs"][side]) <= seed:
                    plan = json.dumps(found["plan"])
                    found["runs"][side].append(_ask(name, side, seed, plan, is_quick=given.quick))
                    results.save(path, content)
                    print(f"  {name}, seed {seed}, {side}: {found['runs'][side][-1]}", flush=True)
        measure = "loss" if CASES[name].is_text else "accuracy"
        found |= {"measure": measure, "compared": compared(found["runs"], measure)}
        results.save(path, content)
        print(f"{name}: {measure} {found['compared']}")
    return 0


def _case(name: str, *, is_quick: bool) -> Case:
    return quick(CASES[name]) if is_quick else CASES[name]


def _ask(name: str, side: str, seed: int, plan: str, *, is_quick: bool) -> JSON:
    """What `_one` returns, from a process of its own."""
    command = [sys.executable, "-m", "bench.train.equal_accuracy", "--case", name, "--one", side, str(seed), plan]
    done = subprocess.run(
        [*command, "--quick"] if is_quick else command,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": str(_case(name, is_quick=is_quick).threads)},
    )
    if done.returncode != 0:
        raise RuntimeError(f"{name}, {side}, seed {seed} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _one(case: Case, side: str, seed: int, plan: str) -> JSON:
    """The plan for a case, or what one side learned with one seed."""
    with tempfile.TemporaryDirectory(prefix="bench-accuracy-") as folder:
        os.environ["STOKER_RUNS"] = folder
        prepare(case, Path(folder), seed)
        material, updates = read(case, Path(folder)), case.compared_samples // case.batch
        if side == "plan":
            return records.to_json(stoker.plan(the_job(material)).chosen.plan)
        if side == "fp32":
            model = in_fp32(material, updates)
        else:
            model = under_plan(material, records.from_json(json.loads(plan), records.Plan), updates, seed)
        return evaluated(material, model) | {"seed": seed, "samples": updates * case.batch}


if __name__ == "__main__":
    sys.exit(main())
