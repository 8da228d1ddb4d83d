"""How a run is executed elsewhere, and the question to the place, which is asked before PyTorch is loaded here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

from stoker.launching import launcher_of
from stoker.launching.bundle import MOST_BYTES
from stoker.launching.launcher import LaunchTarget, Probe


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How a run is executed elsewhere; nothing of it changes what is learned.

    Attributes:
        run_dir: the run's directory here; its name is the run's name there.
        new: start another run even where one could be continued.
        env: `lock`: the versions of this machine, installed there once; `theirs`: the place's own Python; or a path
            to one.
        image: container image, at places that run images.
        secrets: names of environment variables whose values are sent.
        send: further files and folders that the job reads.
        data: files and folders of data, found at the place by their digest or sent.
        plan: a plan file to train under.
        variables: environment variables to set there.
        place: options of the place, by name: `root`, `data`, and what its kind knows.
        arguments: further arguments of `stoker train` at the place.
        send_limit: most bytes to send [bytes].
        max_cost: the run is saved and stopped before its cost, with that of earlier starts, exceeds this.
        time_limit_s: the longest that it may hold devices [s], over all starts that follow from this call; None: no
            limit, and each start asks a scheduler for the upper bound of the forecast, if there is one.
    """

    run_dir: Path | None = None
    new: bool = False
    env: str = "lock"
    image: str = ""
    secrets: tuple[str, ...] = ()
    send: tuple[Path, ...] = ()
    data: tuple[Path, ...] = ()
    plan: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    place: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    send_limit: float = MOST_BYTES
    max_cost: float | None = None
    time_limit_s: float | None = None


class PlaceQuestion:
    """The question to a place what it has, asked in the background: loading PyTorch and the job take as long.

    Asking changes nothing there. The answer is not used where the job cannot be read.

    Attributes:
        began_s: when it was asked [s], by `time.monotonic`.
    """

    def __init__(self, target: LaunchTarget, options: LaunchOptions) -> None:
        self.began_s = time.monotonic()
        self._target, self._options = target, options
        self._answer: Future[Probe] = Future()
        Thread(target=self._ask, name="stoker-probe", daemon=True).start()

    def answer(self) -> Probe:
        """The resources of the place.

        Raises:
            PlaceFailed: the place refuses, or (PlaceUnreachable) does not answer.
        """
        return self._answer.result()

    def _ask(self) -> None:
        try:
            launcher = launcher_of(self._target.kind)
            place = {name: value for name, value in self._options.place.items() if name != "price"}
            if "python" in launcher.options and self._options.env not in {"lock", "theirs"}:
                place["python"] = self._options.env
            self._answer.set_result(launcher.probe(self._target, place))
        except BaseException as problem:  # noqa: BLE001 - it is raised where the answer is wanted
            self._answer.set_exception(problem)
