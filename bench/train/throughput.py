"""Samples a second of Stoker, other trainers and loops written by hand, taking turns on one machine.

    python -m bench.train.throughput --case resnet9_w32 [--rounds 10] [--sets 2] [--out FILE]
    python -m bench.train.throughput --case gpt --quick          # tiny: shows that everything runs

Each contender has a process that stays; in each round every one runs a slice of its own training loop, in an order
drawn anew. All train the same model from the same weights on the same batches in the same order, which the losses of
their first updates show. Written: rates, ratios of Stoker to each with intervals, seconds to the first update, peaks
of memory. What was measured so far is written after each round. Exit code 1 if somebody did other work, or failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.forecast.registration import dated
from bench.train import results
from bench.train.agreement import disagreements
from bench.train.cases import CASES, Case, quick
from bench.train.contenders import CONTENDERS, Contender
from bench.train.driving import MOST_OTHERS, ContenderFailed, Running, Slice
from bench.train.intervals import ratio_of
from bench.train.material import prepare
from stoker.records import to_json
from stoker.records.codec import JSON

SLICE_S, LEAST_UPDATES = 0.7, 2
"""How long a slice lasts [s], and how many updates it has at least."""

REFERENCE = "plain"
"""Whose losses all others are held against."""


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A case, who takes part, and for how long. `seed` draws the order of turns; `at_once` start together."""

    case: Case
    contenders: Sequence[Contender]
    rounds: int
    sets: int
    is_quick: bool = False
    slice_s: float = SLICE_S
    most_others: float = MOST_OTHERS
    reference: str = REFERENCE
    seed: int = 0
    at_once: int = 1

    def run(self, path: Path, content: dict[str, JSON]) -> None:
        """Measure, adding what is found to `content`, which is written to `path` as it grows."""
        content |= {"slice_s": self.slice_s, "least_updates": LEAST_UPDATES, "most_others": self.most_others}
        content |= {"reference": self.reference, "started_at_once": self.at_once}
        content["contenders"] = {one.name: _described(one) for one in self.contenders}
        for number in range(self.sets):
            with tempfile.TemporaryDirectory(prefix="bench-train-") as folder, ExitStack() as stack:
                prepare(self.case, Path(folder))
                running = self._started(Path(folder), stack, content)
                chance = random.Random(self.seed + number)
                for turn in range(self.rounds):
                    self._round(running, chance, content)
                    results.save(path, content)
                    print(f"  set {number + 1}, round {turn + 1} of {self.rounds}: {_in_words(content)}", flush=True)
                for name, process in running.items():
                    told = content["contenders"][name]
                    try:
                        told["sets"][-1] |= process.stop()
                    except ContenderFailed as problem:
                        _drop(told, problem)
        summarise(content)
        results.save(path, content)

    def _started(self, folder: Path, stack: ExitStack, content: dict[str, JSON]) -> dict[str, Running]:
        """Everybody's process, made ready one group after the other, but for who is missing or failed before."""
        of = content["contenders"]
        able = [one for one in self.contenders if not of[one.name]["missing"] and "failed" not in of[one.name]]
        found: dict[str, Running] = {}
        for first in range(0, len(able), self.at_once):
            group = able[first : first + self.at_once]
            made = [stack.enter_context(Running(one, self.case, folder, is_quick=self.is_quick)) for one in group]
            for contender, process in zip(group, made, strict=True):
                told = of[contender.name]
                try:
                    start = process.started()
                except ContenderFailed as problem:
                    _drop(told, problem)
                    continue
                told["sets"].append({"start": to_json(start), "rounds": []})
                print(f"  {contender.title}: first update after {start.first_update_s:.1f} s", flush=True)
                found[contender.name] = process
        return found

    def _round(self, running: dict[str, Running], chance: random.Random, content: dict[str, JSON]) -> None:
        """A turn for everybody, in a new order."""
        for name in chance.sample(sorted(running), len(running)):
            told = content["contenders"][name]
            try:
                slices = running[name].turn(self.slice_s, LEAST_UPDATES, self.most_others)
            except ContenderFailed as problem:
                _drop(told, problem)
                del running[name]
                continue
            told["sets"][-1]["rounds"].append([dataclasses.asdict(one) for one in slices])


def _drop(told: dict[str, JSON], problem: ContenderFailed) -> None:
    """Say that a contender failed; what it did before is no result."""
    told |= {"failed": str(problem), "sets": []}
    print(f"  {problem}", flush=True)


def summarise(content: dict[str, JSON]) -> None:
    """Add to results what they come to: rates, ratios of Stoker to everybody, and who did other work."""
    most_others = content["most_others"]
    whole = {name: one for name, one in content["contenders"].items() if one["sets"]}
    content["samples_per_s"] = medians(content)
    if "stoker" in whole:
        content["ratios"] = {
            kind: {
                name: None if ratio is None else dataclasses.asdict(ratio)
                for name, one in whole.items()
                if name != "stoker"
                for ratio in [ratio_of(rates(whole["stoker"], seconds, most_others), rates(one, seconds, most_others))]
            }
            for kind, seconds in (("wall", "wall_s"), ("cpu", "cpu_s"))
        }
    losses = {name: one["sets"][0]["start"]["losses"] for name, one in whole.items()}
    if content["reference"] in losses:
        # To rounding agree those in fp32, if what they are held against is.
        fp32 = {name for name in whole if _is_fp32(name, whole)} if _is_fp32(content["reference"], whole) else set()
        other_form = {name for name, one in whole.items() if one["is_other_form"]}
        content["disagreements"] = disagreements(losses, content["reference"], fp32, other_form)


def medians(content: dict[str, JSON]) -> dict[str, float | None]:
    """Samples a second of everybody who ran, the median over rounds that count; None where none does."""
    found: dict[str, float | None] = {}
    for name, one in content["contenders"].items():
        if one["sets"]:
            clean = [r for of_set in rates(one, "wall_s", content["most_others"]) for r in of_set if r is not None]
            found[name] = statistics.median(clean) if clean else None
    return found


def rates(contender: dict[str, JSON], seconds: str, most_others: float) -> list[list[float | None]]:
    """Samples a second in each round of each set: of its last slice, if that counts; `seconds` is of which clock."""
    found: list[list[float | None]] = []
    for one in contender["sets"]:
        last = [Slice(**tries[-1]) for tries in one["rounds"]]
        found.append([it.samples / getattr(it, seconds) if it.is_clean(most_others) else None for it in last])
    return found


def _is_fp32(name: str, whole: dict[str, JSON]) -> bool:
    if name == "stoker":
        plan = whole[name]["sets"][0]["start"]["notes"]["plan"]
        return bool(plan["precision"] == "fp32")
    return bool(whole[name]["is_fp32"])


def _described(contender: Contender) -> dict[str, JSON]:
    return {
        "title": contender.title,
        "group": contender.group,
        "is_fp32": contender.is_fp32,
        "is_other_form": contender.is_other_form,
        "missing": contender.missing(),
        "sets": [],
    }


def _in_words(content: dict[str, JSON]) -> str:
    words = [f"{name} {rate:.0f}" for name, rate in medians(content).items() if rate is not None]
    return " · ".join(words) + " samples/s"


def told(content: dict[str, JSON]) -> list[str]:
    """The results, a line for each contender."""
    lines = [f"{'':44s}{'samples/s':>10s}{'Stoker is':>28s}{'by CPU time':>13s}{'first update':>14s}{'peak':>10s}"]
    for name, one in content["contenders"].items():
        if one["missing"] or "failed" in one:
            lines.append(f"{one['title']:44s}{'missing: ' + ', '.join(one['missing']) if one['missing'] else 'FAILED'}")
            continue
        rate, ratio = content["samples_per_s"][name], content.get("ratios", {}).get("wall", {}).get(name)
        by_cpu = content.get("ratios", {}).get("cpu", {}).get(name)
        interval = "" if ratio is None else f"{ratio['median']:.2f}× ({ratio['low']:.2f} to {ratio['high']:.2f})"
        first_s = statistics.median(part["start"]["first_update_s"] for part in one["sets"])
        peak = max(max(part["start"]["start_peak_bytes"], part.get("peak_bytes", 0)) for part in one["sets"])
        lines.append(
            f"{one['title']:44s}{'-' if rate is None else format(rate, '.1f'):>10s}{interval:>28s}"
            f"{'' if by_cpu is None else format(by_cpu['median'], '.2f') + '×':>13s}{first_s:>12.1f} s"
            f"{peak / 2**20:>6.0f} MiB"
        )
    for name, error in content.get("disagreements", {}).items():
        lines.append(f"{name} did not do the same work: its first losses differ by {error:.2g}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a case, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sets", type=int, default=1, help="sets of fresh processes; two or more for figures to keep")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--out", type=Path, help="where results go (default: bench/results, dated)")
    given = parser.parse_args(arguments)
    case = quick(CASES[given.case]) if given.quick else CASES[given.case]
    contest = Contest(
        case=case,
        contenders=[CONTENDERS[name] for name in given.contenders],
        is_quick=given.quick,
        rounds=min(given.rounds, 3) if given.quick else given.rounds,
        sets=given.sets,
        slice_s=0.1 if given.quick else SLICE_S,
        most_others=2.0 if given.quick else MOST_OTHERS,
    )
    kind = "train_quick" if given.quick else "train"
    path = given.out or dated(f"{kind}_{case.name}")
    command = f"python -m bench.train.throughput --case {case.name} --rounds {contest.rounds} --sets {given.sets}"
    versions = {name: version for one in contest.contenders for name, version in one.versions().items()}
    content = results.document("training speed", command + (" --quick" if given.quick else ""), versions)
    content["case"] = dataclasses.asdict(case)
    contest.run(path, content)
    print("\n".join(told(content)))
    return 1 if content.get("disagreements") or any("failed" in one for one in content["contenders"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
