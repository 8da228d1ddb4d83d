"""The agent's side of `joint_probe`: its idle devices answer the control plane's questions, until a lease comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from stoker.errors import PlaceFailed, StokerError
from stoker.pool.client import PoolClient, is_passing
from stoker.pool.hardware_proof import LocalDevice
from stoker.units import format_bytes

_AWAY_S, _RETRY_S = 90.0, 0.5
"""So long the device waits for a pool that does not answer, and between two tries [s]."""


class ProbedDevice:
    """One device that answers, in a thread, from now on.

    Args:
        client: of the pool, with the agent's key.
        place: the probe, and which device of the offer is asked.
        offer_id: of the agent.
        torch_name: of the device here.
        most_bytes: memory that is offered of it: more is not filled, whatever the pool asks for [bytes].
        cores: share of the CPUs that a job may have of it; None: all.
        tell: receives a line of text about what went wrong.
        open_device: starts it, with a share of the CPUs.
    """

    def __init__(
        self,
        client: PoolClient,
        place: tuple[str, int],
        offer_id: str,
        *,
        torch_name: str,
        most_bytes: int,
        cores: float | None,
        tell: Callable[[str], None],
        open_device: Callable[[float | None], LocalDevice] = LocalDevice,
    ) -> None:
        self.place = place
        self._client, self._offer_id, self._torch_name, self._tell = client, offer_id, torch_name, tell
        self._most_bytes, self._device = most_bytes, open_device(cores)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stoker-probe", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether it answers no more."""
        return not self._thread.is_alive()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._device.pid

    def stop(self) -> None:
        """Answer no more: its device is needed."""
        self._is_over.set()
        self._device.kill()

    def _run(self) -> None:
        heard_s = time.monotonic()
        try:
            self._device({"ask": "multiply", "device": self._torch_name, "seed": 1, "n": 64, "k": 64})  # loads it
            step, answer = 0, dict[str, object]()
            while not self._is_over.is_set():
                try:
                    said = self._client.probe(self.place[0], self._offer_id, self.place[1], step, answer)
                except StokerError as problem:
                    if not is_passing(problem) or time.monotonic() - heard_s > _AWAY_S:
                        raise
                    self._is_over.wait(_RETRY_S)
                    continue
                heard_s = time.monotonic()
                if said.get("over"):
                    break
                if said["question"] is not None:
                    step, answer = said["step"], self._answer(said["question"])
        except StokerError as problem:
            if not self._is_over.is_set():
                self._tell(f"a probe of {self._offer_id} ended: {problem.message}")
        finally:
            self._is_over.set()
            self._device.end()

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """What the device answers.

        Raises:
            PlaceFailed: the pool asks for more than is offered, or the device's process ended.
        """
        if question["ask"] == "multiply":
            n, k = question["n"], question["k"]
            if (num_bytes := 4 * (n * n + 2 * n * k)) > self._most_bytes:
                raise PlaceFailed(
                    f"the pool asks for more memory than is offered: {format_bytes(num_bytes)} of "
                    f"{format_bytes(self._most_bytes)}",
                    remedy="Do not answer this pool's probes: --no-probe.",
                )
        return self._device({**question, "device": self._torch_name})
