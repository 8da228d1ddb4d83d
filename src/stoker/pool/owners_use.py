"""Whether the owner has the machine back: what an agent looks at while it lends.

What: a file (`stoker pool pause`), the hours of the day, the upload of the day, the temperature of a lent GPU, and with
`--when idle` what processes outside of the job take of the CPUs and of the GPU. The first reason that holds gives the
job its notice; nothing is lent until it is gone.
Costs: two calls of `nvidia-smi` every five seconds where a GPU is watched, in a thread of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from stoker.devices.cpu import usable_cpus
from stoker.errors import BadRun, NoDevice
from stoker.store.files import write_atomic
from stoker.units import format_bytes

BUSY = 0.5
"""Share of the CPUs that others use, from which on the owner is taken to be back [0 to 1]."""
GPU_BUSY = 0.2
"""Share of a GPU's time that others use, likewise [0 to 1]."""
COOLED_C = 10.0
"""So far below the highest temperature a GPU has to be before it is lent again [°C]."""

_HOT = "the GPU is at"
_LOOKS = 3
_LOOK_S, _GPU_LOOK_S = 2.0, 5.0
_COMMAND_S = 10.0
_STALE_S = 60.0
"""Age of the last look at a GPU from which it counts as not watched [s]."""
_WRITE_S = 10.0


def is_lent_at(hours: tuple[int, int] | None, time_s: float) -> bool:
    """Whether a time [s since 1970] is within hours of the day, UTC, which may go over midnight; None: always.

    >>> [is_lent_at((22, 6), hour * 3600.0) for hour in (21, 22, 0, 5, 6)]
    [False, True, True, True, False]
    """
    if hours is None:
        return True
    begin, end = hours
    hour = int(time_s // 3600) % 24
    return begin <= hour < end if begin <= end else hour >= begin or hour < end


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """A look at a GPU: its temperature [°C], and the share of its time that each process uses [0 to 1], by number."""

    temperature_c: float
    use: Mapping[int, float] = field(default_factory=dict)

    def use_of_others(self, pids: Collection[int]) -> float:
        """Share of its time that processes besides these use [0 to 1]."""
        return sum(share for pid, share in self.use.items() if pid not in pids)


class LentGpu:
    """The GPU number `index` as its owner sees it, through `nvidia-smi`."""

    def __init__(self, index: int) -> None:
        self.index = index

    def read(self, *, with_use: bool) -> GpuReading:
        """Look at it; `with_use`: also at the processes that use it.

        Raises:
            NoDevice: `nvidia-smi` does not say.
        """
        temperature_c = self._number("temperature.gpu", "temperature")
        return GpuReading(temperature_c=temperature_c, use=self._use() if with_use else {})

    def _use(self) -> dict[int, float]:
        """What `nvidia-smi pmon` says of one second: the columns have names, which differ between drivers."""
        lines = [line.split() for line in self._asked("pmon", "-c", "1", "-s", "u").splitlines()]
        header = next((words[1:] for words in lines if words[:2] == ["#", "gpu"]), [])
        if not {"pid", "sm"} <= set(header):
            raise NoDevice(f"nvidia-smi pmon does not say which processes use GPU {self.index}")
        rows = [dict(zip(header, words, strict=False)) for words in lines if words and words[0] == str(self.index)]
        return {int(row["pid"]): float(row["sm"]) / 100 for row in rows if row["pid"].isdigit() and row["sm"].isdigit()}

    def power_limit_w(self) -> float:
        """Its power limit [W].

        Raises:
            NoDevice: `nvidia-smi` does not say.
        """
        return self._number("power.limit", "power limit")

    def limit_power(self, watts: float) -> None:
        """Set its power limit [W], which is root's to do.

        Raises:
            NoDevice: it cannot be set.
        """
        self._asked("-pl", f"{watts:g}", remedy="A power limit is set by root, within what the board allows.")

    def _number(self, query: str, what: str) -> float:
        said = self._asked(f"--query-gpu={query}", "--format=csv,noheader,nounits")
        try:
            return float(said)
        except ValueError:
            raise NoDevice(f"nvidia-smi gives no {what} of GPU {self.index}: {said[:80]!r}") from None

    def _asked(self, *words: str, remedy: str = "Without --when idle and limits of the GPU it is not asked.") -> str:
        command = ["nvidia-smi", *words, "-i", str(self.index)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as problem:
            raise NoDevice(f"`{' '.join(command)}` did not answer: {problem}", remedy=remedy) from problem
        if done.returncode != 0:
            said = " ".join((done.stdout + done.stderr).split())
            raise NoDevice(f"`{' '.join(command)}` failed: {said or 'no message'}", remedy=remedy)
        return done.stdout.strip()


def gpu_links() -> str:
    """How the GPUs of this machine are connected, as `nvidia-smi` says; "" where it does not."""
    with suppress(OSError, subprocess.TimeoutExpired):
        command = ["nvidia-smi", "topo", "-m"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


class GpuWatch:
    """Looks at lent GPUs every few seconds, in a thread: `nvidia-smi` may take long, and beats may not wait for it.

    Args:
        gpus: which; the hottest one and the most used one count.
        pids: processes of the job; None: it does not matter who uses the GPU.
        max_temperature_c: highest temperature [°C]; None: any.

    Raises:
        NoDevice: it cannot be looked at now: then nothing would be noticed later either.
    """

    def __init__(
        self, *gpus: LentGpu, pids: Callable[[], Collection[int]] | None = None, max_temperature_c: float | None = None
    ) -> None:
        self._gpus, self._pids, self._max_c = gpus, pids, max_temperature_c
        self._temperatures_c, self._others = deque[float](maxlen=_LOOKS), deque[float](maxlen=_LOOKS)
        self._failures, self._reason, self._looked_s = 0, "", time.monotonic()
        self.look()

    @property
    def reason(self) -> str:
        """Why the GPU goes back to its owner, as words; "" if it does not. A thread that hangs or died is one."""
        if (age_s := time.monotonic() - self._looked_s) > _STALE_S:
            return f"the GPU was last looked at {age_s:.0f} s ago"
        return self._reason

    def start(self) -> None:
        """Look from now on, as long as the process lives."""
        threading.Thread(target=self._run, name="stoker-gpu", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(_GPU_LOOK_S)
            self.try_look()

    def try_look(self) -> None:
        """Look once; if that fails three times in a row, the GPU goes back to its owner."""
        try:
            self.look()
        except Exception as problem:  # noqa: BLE001 - the watch goes on, whatever one look met
            self._failures += 1
            if self._failures >= _LOOKS:
                said = problem.message if isinstance(problem, NoDevice) else repr(problem)
                self._reason = f"the GPU cannot be watched any more: {said}"

    def look(self) -> None:
        """Look once; `reason` says why the GPU goes back to its owner, as words, or "".

        Raises:
            NoDevice: `nvidia-smi` does not say.
        """
        readings = [gpu.read(with_use=self._pids is not None) for gpu in self._gpus]
        self._failures, self._looked_s = 0, time.monotonic()
        hottest_c = max(reading.temperature_c for reading in readings)
        self._temperatures_c.append(hottest_c)
        own = None if self._pids is None else self._pids()
        self._others.append(0.0 if own is None else max(reading.use_of_others(own) for reading in readings))
        was_hot, reason = self._reason.startswith(_HOT), ""
        if self._max_c is not None:
            least = self._max_c - COOLED_C if was_hot else self._max_c
            if (was_hot or len(self._temperatures_c) == _LOOKS) and min(self._temperatures_c) > least:
                reason = f"{_HOT} {hottest_c:g} °C, above {self._max_c:g} °C"
        if not reason and len(self._others) == _LOOKS and min(self._others) > GPU_BUSY:
            reason = "the owner uses the GPU"
        self._reason = reason


@contextmanager
def limited_power(gpu: LentGpu, watts: float | None, kept: Path) -> Iterator[None]:
    """Within the block a GPU's power is limited [W], or as its owner has it (None), which it is afterwards.

    The owner's limit is in the file `kept` during the block, where the next one finds it if this process is killed.

    Raises:
        NoDevice: it cannot be limited.
        BadRun: the file cannot be written.
    """
    if watts is None and not kept.exists():
        yield
        return
    try:
        before = float(json.loads(kept.read_text())["watts"])
    except (OSError, ValueError, TypeError, KeyError):
        before = gpu.power_limit_w()
        write_atomic(kept, json.dumps({"watts": before}), error=BadRun)
    try:
        gpu.limit_power(before if watts is None else watts)
        yield
    finally:
        gpu.limit_power(before)
        kept.unlink(missing_ok=True)


class UploadQuota:
    """What may be sent in a day (UTC), and what was: kept in a file, so that a new agent goes on counting.

    Args:
        path: the file.
        most_bytes: a day [bytes].
        sent: bytes that were sent by this process.
        today: the day.
    """

    def __init__(
        self,
        path: Path,
        most_bytes: int,
        sent: Callable[[], int],
        today: Callable[[], str] = lambda: datetime.now(UTC).date().isoformat(),
    ) -> None:
        self._path, self._most_bytes, self._sent, self._today = path, most_bytes, sent, today
        self._day, self._before_bytes, self._counted_bytes = today(), 0, sent()
        self._written_s, self._written_bytes = 0.0, 0
        with suppress(FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
            known = json.loads(path.read_text())
            if known["day"] == self._day:
                self._before_bytes = int(known["bytes"])

    def reason(self) -> str:
        """Why nothing is lent, as words; "" if there is some left."""
        day, sent = self._today(), self._sent()
        if day != self._day:
            self._day, self._before_bytes, self._counted_bytes = day, 0, sent
        used = self._before_bytes + sent - self._counted_bytes
        if used != self._written_bytes and time.monotonic() - self._written_s > _WRITE_S:
            self._written_s, self._written_bytes = time.monotonic(), used
            with suppress(BadRun):  # a full disk: it goes on counting in memory
                write_atomic(self._path, json.dumps({"day": day, "bytes": used}), error=BadRun)
        if used < self._most_bytes:
            return ""
        return f"{format_bytes(used)} were sent today, and {format_bytes(self._most_bytes)} are the most"


class OwnersUse:
    """Whether the owner has the machine: a file says so, the hour does, a limit is reached, or others use it.

    Args:
        paused: the file.
        looks_at_load: whether the load of the CPUs counts.
        hours: in which it is lent.
        uploads: what may be sent; None: any.
        gpu: watch of a lent GPU; None: none is watched.
        clock: time of any origin [s].
    """

    def __init__(
        self,
        paused: Path,
        *,
        looks_at_load: bool,
        hours: tuple[int, int] | None = None,
        uploads: UploadQuota | None = None,
        gpu: GpuWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paused, self._looks_at_load, self._hours, self._clock = paused, looks_at_load, hours, clock
        self._uploads, self._gpu = uploads, gpu
        self._before: tuple[float, float, float] | None = None
        self._busy_looks = 0

    def is_back(self, job_cpu_s: Callable[[], float]) -> str:
        """Why the device goes back to its owner, as words; "" if it does not.

        `job_cpu_s` returns the CPU time of the job [s], and is called where the load counts.
        """
        sent = "" if self._uploads is None else self._uploads.reason()  # counted, whatever else is wrong
        if self._paused.exists():
            return "the owner has paused lending"
        if not is_lent_at(self._hours, time.time()):
            return "the hours in which it is lent are over"
        if sent:
            return sent
        if self._gpu is not None and self._gpu.reason:
            return self._gpu.reason
        return self._load_reason(job_cpu_s) if self._looks_at_load else ""

    def _load_reason(self, job_cpu_s: Callable[[], float]) -> str:
        now = self._clock()
        if self._before is not None and now - self._before[0] < _LOOK_S:
            return "" if self._busy_looks < _LOOKS else "the owner uses the machine"
        busy_s, own_s = _busy_s(), job_cpu_s()
        before, self._before = self._before, (now, busy_s, own_s)
        if before is None:
            return ""
        elapsed_s = now - before[0]
        others = (busy_s - before[1] - max(0.0, own_s - before[2])) / elapsed_s / max(1, len(usable_cpus()))
        self._busy_looks = self._busy_looks + 1 if others > BUSY else 0
        return "the owner uses the machine" if self._busy_looks >= _LOOKS else ""


def _busy_s() -> float:
    """Time that all CPUs were busy since the start of the machine [s]."""
    with suppress(OSError, ValueError, IndexError):
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
    return 0.0
