"""Agents that cheat: what they run in the place of the trainer that they were paid for.

The job's processes find a `sitecustomize.py` of the agent before everything else, which changes Stoker's update as
soon as it is imported: all that the run writes, and all that it commits to, then looks like the run that was ordered.
Asked for the states of a block, it cheats again in the same way, so that they end in what it committed to.

| cheat | what is done in the place of an update |
|---|---|
| skip | every tenth one is not made |
| stale | after the twentieth none is made: the state stays, and the position goes on |
| half | the first half of the batch stands for all of it |
| data | one sample of the batch stands for all of it |
| precision | weights are rounded to bf16 after each update, and sold as fp32 |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from stoker.launching.at_place import LaunchOrder
from stoker.pool.isolation import Host, Program
from stoker.pool.job_box import JobBox
from stoker.pool.leased_job import LeasedJob
from stoker.records.codec import dumps, loads

CHEATS = ("skip", "stale", "half", "data", "precision")

_CHANGES = '''
"""Changes the update of Stoker once that is imported."""
import importlib.abc, importlib.util, sys

CHEAT = {cheat!r}
MODULE = "stoker.stepping.step"


def change(module):
    from stoker.loading.fields import take
    import torch

    honest = module.Step.update
    def update(self, batch, update, progress):
        rows = list(range(batch.size))
        if (CHEAT == "skip" and update % 10 == 9) or (CHEAT == "stale" and update >= 20):
            self.set_rates(progress)
            return torch.tensor(1.0)
        if CHEAT == "half":
            half = rows[: max(1, len(rows) // 2)]
            batch.content = take(batch.content, (half * 2 + half)[: len(rows)], len(rows))
        if CHEAT == "data":
            batch.content = take(batch.content, [0] * len(rows), len(rows))
        loss = honest(self, batch, update, progress)
        if CHEAT == "precision":
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.copy_(parameter.bfloat16().to(parameter.dtype))
        return loss

    module.Step.update = update
    module.Step.updates_at_once = property(lambda self: 1)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_change(module):
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change
        return spec


sys.meta_path.insert(0, Finder())
'''


def cheating(cheat: str) -> type[LeasedJob]:
    """The jobs of an agent that cheats in this way."""

    class CheatingBox(JobBox):
        def training(self, host: Host) -> Program:
            program = self._changed(super().training(host))
            order = loads((self.run / "launch" / "order.json").read_bytes(), LaunchOrder)
            pythonpath = program.environment["PYTHONPATH"]
            self.write_word("order.json", dumps(dataclasses.replace(order, pythonpath=pythonpath)).encode())
            return program

        def replay(self, run: Path, until: int, host: Host, *, at: Sequence[int] = ()) -> Program:
            return self._changed(super().replay(run, until, host, at=at))

        def _changed(self, program: Program) -> Program:
            folder = self.folder / "cheat"
            folder.mkdir(exist_ok=True)
            (folder / "sitecustomize.py").write_text(_CHANGES.format(cheat=cheat))
            return dataclasses.replace(
                program,
                readable={**program.readable, "/cheat": folder},
                environment={**program.environment, "PYTHONPATH": f"/cheat:{program.environment['PYTHONPATH']}"},
            )

    class CheatingJob(LeasedJob):
        box_type = CheatingBox

    return CheatingJob
