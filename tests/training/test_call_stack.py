"""How deep a reader has to go: the project's own files between the command line and the optimiser's kernel."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import pytest
import torch

import stoker
from stoker.cli.main import main
from stoker.records import Plan, dumps
from stoker.stepping import fused_update

PACKAGE = Path(stoker.__file__).parent
MOST_FILES = 6

JOB = """
import torch
from torch import nn

import stoker


def job() -> stoker.Job:
    data = torch.randn(32, 4), torch.randint(0, 2, (32,))
    return stoker.Job(model=lambda: nn.Linear(4, 2), data=data, loss="cross_entropy", optimizer=stoker.SGD(lr=0.1),
                      batch=16, until=stoker.updates(3))
"""


def test_few_files_stand_between_the_command_and_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stoker train` reaches the optimiser's kernel through at most six files of the package."""
    stacks: list[list[str]] = []
    kernel = fused_update._KERNELS[torch.optim.SGD]

    def watched(*arguments: object, **settings: object) -> object:
        files = [Path(frame.filename) for frame in traceback.extract_stack()]
        stacks.append(
            list(dict.fromkeys(str(file.relative_to(PACKAGE)) for file in files if file.is_relative_to(PACKAGE)))
        )
        return kernel(*arguments, **settings)

    monkeypatch.setitem(fused_update._KERNELS, torch.optim.SGD, watched)
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    plan = Plan(device="cpu", micro_batch=16, optimizer_implementation="fused")
    (tmp_path / "plan.json").write_text(dumps(plan), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["stoker", "train", "job.py", "--plan", "plan.json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    of_the_run = [files for files in stacks if "training/loop.py" in files]  # the others are of planning's trials
    assert len(of_the_run) == 3
    assert all(len(files) <= MOST_FILES for files in of_the_run), of_the_run
