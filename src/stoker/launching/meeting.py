"""What a process is told of the generation that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Meeting:
    """A generation: processes that train together until one of them is lost, or another one comes.

    Attributes:
        number: counts generations of a run, from 1.
        rank: of this process, from 0; survivors of the generation before keep their order and come first.
        size: how many processes there are.
        name: of the generation, which no other one in the store has.
        notes: what was given to `Member.lost` by those that came from the generation before; of what several name, the
            word of the lowest rank counts.
        num_veterans: so many ranks, from 0, come straight from the generation before and have its weights; the others
            have none. 0: nobody has, as at the start of a run.
        age_s: time since the first generation of the run met [s].
    """

    number: int
    rank: int
    size: int
    name: str
    notes: dict[str, Any] = field(default_factory=dict)
    num_veterans: int = 0
    age_s: float = 0.0


class Dismissed(Exception):
    """This process takes no further part; why is told elsewhere, so it leaves without a word.

    `exit_code` is what it ends with: 0 if the run was finished without it. `why` is what to say all the same, where
    processes have no common output.
    """

    def __init__(self, exit_code: int, why: str = "") -> None:
        super().__init__(why or f"dismissed with exit code {exit_code}")
        self.exit_code, self.why = exit_code, why
