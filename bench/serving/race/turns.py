"""The order of the race: who is started with which settings, and what is then measured, as far as it is not yet.

First each server is tuned: throughput with 16 callers under each of its settings, on one workload of each model. Then
rounds, in each of which every contender has one turn with its best setting, the order moving on from round to round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.serving.race.contenders import Contender, Setting
from bench.serving.race.workloads import Workload
from stoker.records.codec import JSON

CALLERS = (1, 4, 16, 64)
TUNING_CALLERS = 16
OPEN = "open"


@dataclass(frozen=True)
class Turn:
    """A server that is started once, and the cells measured meanwhile: a number of callers, or the open loop."""

    workload: Workload
    contender: Contender
    setting: Setting
    phase: str
    cells: tuple[int | str, ...]

    def key(self, cell: int | str) -> str:
        """The cell's name in the results."""
        return "/".join((self.workload.name, self.contender.name, self.phase, str(self.setting), str(cell)))


def tuning_turns(workload: Workload, contenders: Sequence[Contender]) -> Iterator[Turn]:
    """Each setting of each contender."""
    for contender in contenders:
        for setting in contender.settings:
            yield Turn(workload, contender, setting, "tuning", (TUNING_CALLERS,))


def round_turns(
    number: int, workload: Workload, contenders: Sequence[Contender], best: Mapping[str, Setting]
) -> Iterator[Turn]:
    """One turn of each contender that has a best setting; eager PyTorch has no open loop, which it would only lose."""
    start = number % len(contenders)
    for contender in (*contenders[start:], *contenders[:start]):
        if contender.name in best:
            yield Turn(workload, contender, best[contender.name], f"round {number}", (*CALLERS, OPEN))


def best_settings(workload: Workload, contenders: Sequence[Contender], cells: Mapping[str, JSON]) -> dict[str, Setting]:
    """Of each contender the setting with the highest throughput in the tuning; none where it answered in none."""
    found: dict[str, Setting] = {}
    for contender in contenders:
        rates = {
            turn.setting: rate_of(cells[turn.key(TUNING_CALLERS)])
            for turn in tuning_turns(workload, [contender])
            if turn.key(TUNING_CALLERS) in cells
        }
        if rates and max(rates.values()) > 0:
            found[contender.name] = max(rates, key=lambda setting: rates[setting])
    return found


def rate_of(cell: JSON) -> float:
    """Answers a second of a measurement; 0 of one that failed."""
    return 0.0 if "error" in cell or not cell["duration_s"] else float(cell["answered"]) / float(cell["duration_s"])


def p99_of(cell: JSON) -> float:
    """The p99 of a measurement [s]; infinite of one that failed."""
    if "error" in cell:
        return float("inf")
    return next(float(one["seconds"]) for one in cell["quantiles"] if one["q"] == 0.99)
