"""The race: `python -m bench.serving.race --peers PEERS/bin/python --mlserver MLSERVER/bin/python --minutes 15`.

It goes on where it was stopped: every cell is written to the file of results as soon as it is measured.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from bench.serving.race import engine_loop
from bench.serving.race.contenders import COMPRESSED, Contender, Pythons, contenders
from bench.serving.race.running import Asked, running
from bench.serving.race.summary import OURS, lines, summary
from bench.serving.race.turns import OPEN, Turn, best_settings, round_turns, tuning_turns
from bench.serving.race.workloads import WORKLOADS, Workload, make
from bench.train.results import document, read, save
from stoker import artifacts
from stoker.errors import ServiceError
from stoker.loadtesting.measurement import LoadTarget, at_rate, with_callers
from stoker.loadtesting.serving_limit import highest_rate, probe_seconds
from stoker.records import to_json
from stoker.records.codec import JSON
from stoker.records.service import Objective, SettingsTrial
from stoker.store import cache_root

RESULTS = Path(__file__).resolve().parents[2] / "results"
_WARM_UP_S = 0.5
_OPEN_S = 12.0
_BARE_S = 0.4
_VERSIONS = "import importlib.metadata as m; print(m.version('{}'))"


@dataclass
class Race:
    """What is raced, and what has been measured so far."""

    path: Path
    work: Path
    pythons: Pythons
    cell_s: float
    until: float
    content: dict[str, JSON]
    asked: dict[tuple[str, bool], Asked] = field(default_factory=dict)

    @property
    def cells(self) -> dict[str, JSON]:
        """Measurements by the key of their cell."""
        found: dict[str, JSON] = self.content.setdefault("cells", {})
        return found

    def take(self, turn: Turn) -> None:
        """Start the turn's server, and measure what is missing; what goes wrong is a result as well."""
        missing = [cell for cell in turn.cells if turn.key(cell) not in self.cells]
        if not missing or (turn.workload.name, turn.contender.name == COMPRESSED) not in self.asked:
            return
        try:
            asked = self.asked[turn.workload.name, turn.contender.name == COMPRESSED]
            with running(turn.contender, self.pythons, asked, turn.setting, self.work) as target:
                with_callers(target, 4, _WARM_UP_S)
                for cell in missing:
                    self._note(turn.key(cell), self._measured(target, turn, cell))
        except (ServiceError, OSError) as error:
            for cell in missing:
                if turn.key(cell) not in self.cells:
                    self._note(turn.key(cell), {"error": str(error)[-600:]})

    def bare(self, number: int, workload: Workload) -> None:
        """The engine alone, in the round of that number, under each of our artifacts."""
        for is_compressed, name in ((False, OURS), (True, COMPRESSED)):
            loops = self.content.setdefault("engine alone", {}).setdefault(f"{workload.name}/{name}", [])
            if len(loops) <= number and (asked := self.asked.get((workload.name, is_compressed))):
                loops.append(_apart(engine_loop.rates, asked.artifact, asked.samples, _BARE_S))
                save(self.path, self.content)
                print(f"{workload.name}/{name}, engine alone: {max(loops[-1].values()):.0f} samples/s", flush=True)

    def _measured(self, target: LoadTarget, turn: Turn, cell: int | str) -> JSON:
        if cell == OPEN:
            rates = [self.cells[key] for key in map(turn.key, turn.cells) if key in self.cells]
            return _open_loop(target, turn.workload.objective, rates)
        return to_json(with_callers(target, int(cell), self.cell_s))

    def _note(self, key: str, cell: JSON) -> None:
        self.cells[key] = cell
        save(self.path, self.content)
        print(f"{key}: {_words(cell)}", flush=True)


def main() -> None:
    """Tune, race in rounds, add up."""
    options = _options()
    workloads = [one for one in WORKLOADS if one.name in options.workloads]
    racers = [one for one in contenders(options.max_batch).values() if one.name in options.contenders]
    race = _prepared(options, workloads, racers)
    models = {workload.model: workload for workload in reversed(workloads)}
    for turn in _all_turns(race, workloads, racers, models, options.rounds):
        if time.monotonic() > race.until:
            print("the time is over; the same command goes on with what is missing")
            break
        race.take(turn)
    race.content["summary"] = summary(race.cells, race.content.get("engine alone", {}), options.rounds)
    save(race.path, race.content)
    print("\n".join(lines(race.content["summary"])))
    print(race.path)


def _all_turns(
    race: Race, workloads: Sequence[Workload], racers: Sequence[Contender], tuned_on: dict[str, Workload], rounds: int
) -> Iterator[Turn]:
    """The first round of a model follows its tuning, so that a race cut short has whole comparisons."""
    for number, model in itertools.product(range(rounds), reversed(tuned_on)):
        yield from tuning_turns(tuned_on[model], racers)
        best = best_settings(tuned_on[model], racers, race.cells)
        for workload in workloads:
            if workload.model == model:
                race.bare(number, workload)
                yield from round_turns(number, workload, racers, best)


def _prepared(options: argparse.Namespace, workloads: Sequence[Workload], racers: Sequence[Contender]) -> Race:
    """Models exported, answers of the engine alone known; the file of results opened, or begun."""
    work = Path(options.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    pythons = Pythons(peers=options.peers, mlserver=options.mlserver)
    exported = {one.model: _apart(make, one.model, work / "models") for one in workloads}
    given = [word.partition("=") for word in options.compressed]
    compressed = {model: artifacts.read(where) for model, _, where in given}
    path = Path(options.output)
    content = read(path)
    if not content:
        command = "python -m bench.serving.race --peers PEERS/bin/python --mlserver MLSERVER/bin/python"
        content = document("model servers with one engine", command, _versions(racers, pythons))
        content["asked"] = {one.name: one.wire for one in racers}
        content["objectives"] = {one.name: str(one.objective) for one in workloads}
    race = Race(path, work, pythons, options.cell_s, time.monotonic() + 60 * options.minutes, content)
    for workload in workloads:
        samples = workload.samples()
        versions = {False: exported[workload.model], True: compressed.get(workload.model)}
        for is_compressed, artifact in versions.items():
            if artifact is not None:
                expected = _apart(engine_loop.expected, artifact, samples)
                race.asked[workload.name, is_compressed] = Asked(artifact, samples, expected)
    return race


def _open_loop(target: LoadTarget, objective: Objective, closed: Sequence[JSON]) -> JSON:
    """The highest rate held within the objective, in about twenty seconds."""
    rates = [one["answered"] / one["duration_s"] for one in closed if "error" not in one]
    until = time.monotonic() + _OPEN_S
    target = LoadTarget(target.address, target.payloads, target.connections, objective, target.cpu_s)
    seeds = itertools.count()
    found = highest_rate(
        lambda rate, seconds: at_rate(target, rate, seconds, cuts=True, seed=next(seeds)),
        first=0.75 * max(rates, default=50.0),
        has_time=lambda needed: time.monotonic() + needed < until,
        seconds_at=lambda rate: probe_seconds(rate, objective.q, shortest_s=1.5, longest_s=3.0),
    )
    return to_json(SettingsTrial(settings=None, rate=found.rate, why=found.why, tried=found.tried))


def _apart(work, *arguments):  # noqa: ANN001, ANN002, ANN202 - whatever `work` takes and gives
    """Done in a process of its own, so that no engine shares this one with the generator of load."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def _versions(racers: Sequence[Contender], pythons: Pythons) -> dict[str, str]:
    found = {}
    for racer in racers:
        asking = [racer.python(pythons), "-c", _VERSIONS.format(racer.package)]
        found[racer.name] = (
            subprocess.run(asking, capture_output=True, text=True, check=False).stdout.strip() or "absent"
        )
    return found


def _words(cell: JSON) -> str:
    if "error" in cell:
        return f"failed: {cell['error']}"
    if "tried" in cell:
        return f"{cell['rate']:.0f} requests/s held"
    p99 = next(one["seconds"] for one in cell["quantiles"] if one["q"] == 0.99)
    return f"{cell['answered'] / cell['duration_s']:.0f}/s, p99 {float(p99) * 1e3:.1f} ms, failures {cell['failures']}"


def _options() -> argparse.Namespace:
    names, everyone = [one.name for one in WORKLOADS], list(contenders(1))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", required=True, help="Python of the environment with requirements.txt")
    parser.add_argument("--mlserver", required=True, help="Python of the environment with requirements-mlserver.txt")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cell-s", type=float, default=2.0)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--workloads", nargs="+", default=names, choices=names)
    parser.add_argument("--contenders", nargs="+", default=everyone, choices=everyone)
    parser.add_argument("--compressed", nargs="*", default=[], metavar="MODEL=DIR", help="models of `stoker compress`")
    parser.add_argument("--work", default=str(cache_root() / "race"), help="models and logs")
    parser.add_argument("--output", default=str(RESULTS / f"serving_race_{time.strftime('%Y-%m-%d')}.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
