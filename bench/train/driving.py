"""Contenders in their processes, each let run for a slice in turn; slices disturbed by other work are not counted.

A slice counts if other processes used less than 6 % of the CPUs while it ran, and the host's other guests as little.
One that does not is tried again, up to four times in all; how fast it was plays no part.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from bench.train.cases import Case
from bench.train.contenders import Contender
from stoker.devices.cpu import CpuSample, load_between, parse_stat, usable_cpus

ROOT = Path(__file__).parents[2]
"""Where modules of `bench` are found."""

MOST_OTHERS = 0.06
"""Share of the CPUs that others may use during a slice that counts."""

TRIES = 4
"""Slices in a contender's turn at most."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """What a contender did in one slice: samples and updates, seconds by the clock and of the CPU, what others used."""

    schema: ClassVar[int] = 1
    samples: int
    updates: int
    wall_s: float
    cpu_s: float
    others: float
    stolen: float = 0.0

    def is_clean(self, most_others: float) -> bool:
        """Whether it counts: others had less than that share of the CPUs."""
        return self.others < most_others and self.stolen < most_others


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a contender began: losses of its first updates, seconds to the first, the most memory until it was ready.

    `others` is the share of the CPUs that others used meanwhile.
    """

    schema: ClassVar[int] = 1
    losses: tuple[float, ...]
    first_update_s: float
    start_peak_bytes: int
    others: float
    notes: dict[str, Any] = field(default_factory=dict)


class ContenderFailed(Exception):
    """A contender's process ended or fell silent; the text has the last it wrote."""


class Running:
    """A contender's process, kept between its slices; a context manager that ends it."""

    def __init__(self, contender: Contender, case: Case, folder: Path, *, is_quick: bool) -> None:
        self.contender = contender
        self._before = cpu_sample()
        self._own = Path(tempfile.mkdtemp(prefix=f"{contender.name}-", dir=folder))
        self._log = (self._own / "output.txt").open("wb+")
        inward, outward = os.pipe(), os.pipe()
        arguments = [contender.name, case.name, "quick" if is_quick else "whole", str(folder)]
        ends = [repr(time.monotonic()), str(inward[0]), str(outward[1])]
        with on_last_cores(case.threads):
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.train.worker", *arguments, *ends],
                pass_fds=(inward[0], outward[1]),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                cwd=ROOT,
                env=environment(contender, case, self._own),
            )
        os.close(inward[0])
        os.close(outward[1])
        self._commands, self._answers = os.fdopen(inward[1], "w"), os.fdopen(outward[0])

    def __enter__(self) -> Self:
        """Nothing more to do."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for end in (self._commands, self._answers, self._log):
            try:
                end.close()
            except BrokenPipeError:  # a command that was never read
                continue

    def started(self) -> Start:
        """Wait until it has made its first updates."""
        answer = self._answer()
        return Start(
            losses=tuple(answer["losses"]),
            first_update_s=answer["first_update_s"],
            start_peak_bytes=answer["start_peak_bytes"],
            notes=answer["notes"],
            others=load_between(self._before, cpu_sample(self._process.pid)).others,
        )

    def turn(self, slice_s: float, least_updates: int, most_others: float) -> list[Slice]:
        """Slices until one counts; the last is it, or none does."""
        return until_clean(lambda: self._slice(slice_s, least_updates), most_others)

    def stop(self) -> dict[str, Any]:
        """End it; its peak of memory since it was ready [bytes], and its notes."""
        self._tell(stop=True)
        return self._answer()

    def _slice(self, slice_s: float, least_updates: int) -> Slice:
        before = cpu_sample(self._process.pid)
        self._tell(slice_s=slice_s, least_updates=least_updates)
        answer = self._answer()
        load = load_between(before, cpu_sample(self._process.pid))
        return Slice(
            samples=answer["samples"],
            updates=answer["updates"],
            wall_s=answer["wall_s"],
            cpu_s=answer["cpu_s"],
            others=load.others,
            stolen=load.stolen,
        )

    def _tell(self, **command: object) -> None:
        try:
            self._commands.write(json.dumps(command) + "\n")
            self._commands.flush()
        except BrokenPipeError:
            raise self._failed() from None

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise self._failed()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self) -> ContenderFailed:
        code = self._process.wait()
        self._log.seek(0)
        last = self._log.read()[-2000:].decode(errors="replace")
        return ContenderFailed(f"{self.contender.name} ended with {code}:\n{last}")


def environment(contender: Contender, case: Case, own: Path) -> dict[str, str]:
    """What the process finds around it: as many threads as the case has, caches and runs in a folder of its own."""
    threads = {name: str(case.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    kept = {name: value for name, value in os.environ.items() if name not in {"LD_PRELOAD", "MALLOC_CONF"}}
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    quiet |= {"STOKER_WATCHDOG": "0"}  # between slices a contender rests for longer than any hang would be let go on
    # Rates of operations that `stoker doctor` measured stay, as they do between a user's runs; the rest starts empty.
    places = {"STOKER_RUNS": str(own / "runs"), "KERAS_HOME": str(own / "keras")}
    places["STOKER_CACHE"] = os.environ.get("STOKER_CACHE", str(own / "cache"))
    return kept | threads | quiet | places | dict(contender.environment)


@contextlib.contextmanager
def on_last_cores(number: int) -> Iterator[None]:
    """Within the block, processes that are started have so many of this one's cores, the last ones; for good.

    Libraries size their pools of threads by that, also those that heed no variable, as JAX's.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[-number:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def until_clean(once: Callable[[], Slice], most_others: float, tries: int = TRIES) -> list[Slice]:
    """What `once` gives, again and again until a slice counts or there were `tries`."""
    found: list[Slice] = []
    while len(found) < tries and not (found and found[-1].is_clean(most_others)):
        found.append(once())
    return found


def cpu_sample(*own: int) -> CpuSample:
    """The CPUs now; what this process and those numbered in `own` used is not others'.

    Raises:
        OSError: this is not Linux.
    """
    spent = os.times()
    sample = parse_stat(
        Path("/proc/stat").read_text(encoding="ascii"),
        usable_cpus(),
        ticks_per_s=os.sysconf("SC_CLK_TCK"),
        own_s=spent.user + spent.system + sum(map(process_seconds, own)),
    )
    assert sample is not None, "the CPUs this process runs on are listed"
    return sample


def process_seconds(pid: int) -> float:
    """CPU time of a process, its threads and the children it has waited for [s]; 0 once it is gone.

    Source: proc(5), /proc/PID/stat, fields 14 to 17.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    after_name = stat.rpartition(")")[2].split()
    return sum(int(ticks) for ticks in after_name[11:15]) / os.sysconf("SC_CLK_TCK")
