"""Jobs that cannot be trained: what the command line says, its exit code, and that nothing is left behind."""

from __future__ import annotations

import gzip
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.flow.command import Outcome, job_file, plan_file, stoker_here


@dataclass(frozen=True)
class Case:
    """A job file, the options it is trained with, and what must be said; `code` is the exit code."""

    says: tuple[str, ...]
    changes: str = ""
    head: str = ""
    text: str | None = None
    options: tuple[str, ...] = ()
    code: int = 2


ITEMS = """
class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        {body}
settings.update(data=Items(), valid=None, test=None)
"""

CASES = {
    "does not parse": Case(("broken.py, line 2", "def job(:"), text="import stoker\ndef job(:\n    pass\n"),
    "has no job": Case(("has no function `job`", "It has jobs", "def job("), text="def jobs(): pass\n"),
    "raises on import": Case(("broken.py, line 1: `1 / 0`", "raised ZeroDivisionError on import"), text="1 / 0\n"),
    "imports what is not there": Case(
        ("No module named 'absent_package'", "Install absent_package into this Python"), head="import absent_package\n"
    ),
    "exits on import": Case(("SystemExit", "on import"), text="raise SystemExit(0)\n"),
    "raises in job": Case(("broken.py, line", "KeyError", "'a'", "while job(…) ran"), changes="{}['a']"),
    "returns something else": Case(
        ("job(…) returned a dict, wanted a stoker.Job", "return stoker.Job("), text="def job():\n    return {}\n"
    ),
    "returns nothing": Case(("returned nothing (None)",), text="def job():\n    pass\n"),
    "unknown setting": Case(("no setting 'widht'", "Did you mean 'width'?"), options=("--set", "widht=4")),
    "setting of another type": Case(("--set width=wide", "a whole number"), options=("--set", "width=wide")),
    "setting without a value": Case(("--set width: wanted NAME=VALUE",), options=("--set", "width")),
    "setting without a name": Case(("wanted NAME=VALUE",), options=("--set", "=3")),
    "value out of range": Case(("lr must be positive and finite, got -1.0",), options=("--set", "lr=-1")),
    "nothing to train for": Case(("a positive number of epochs, got 0",), options=("--set", "epochs=0")),
    "empty data": Case(
        ("data has no samples", "at least one sample"), changes="settings.update(data=(inputs[:0], target[:0]))"
    ),
    "empty test data": Case(("test has no samples",), changes="settings.update(test=(inputs[:0], target[:0]))"),
    "arrays of different lengths": Case(
        ("different numbers of samples (0: 100, 1: 99)",), changes="settings.update(data=(inputs, target[1:]))"
    ),
    "all held out": Case(
        ("a holdout of 0.001 sets 0 of 100 samples aside",), changes="settings.update(valid=stoker.holdout(0.001))"
    ),
    "samples of different shapes": Case(
        ("differ in shape: [6] and [7]", "collate"),
        changes=ITEMS.format(body="return torch.zeros(7 if index == 13 else 6), 0"),
    ),
    "a sample that raises": Case(
        ("sample 13 of Items raised ValueError: no such file",),
        changes=ITEMS.format(body="if index == 13: raise ValueError('no such file')\n        return torch.zeros(6), 0"),
    ),
    "data of a strange kind": Case(("data is a int, wanted arrays",), changes="settings.update(data=3)"),
    "a stream": Case(
        ("data is a stream that does not say how many samples it has", "length="),
        changes="class S(torch.utils.data.IterableDataset):\n    def __iter__(self):\n        return iter([])\n"
        "settings.update(data=S(), valid=None)",
    ),
    "labels out of range": Case(
        ("labels go from", "to 7", "2 classes"), changes="target[3::9] = 7\nsettings.update(data=(inputs, target))"
    ),
    "labels below range": Case(
        ("labels go from -1 to 1", "2 classes"), changes="target[3::9] = -1\nsettings.update(data=(inputs, target))"
    ),
    "no labels at all": Case(("look at the data",), changes="target[:] = -100\nsettings.update(data=(inputs, target))"),
    "inputs of another width": Case(
        (
            "RuntimeError",
            "broken.py, line",
            "shapes cannot be multiplied",
            "Net(in_features=6, out_features=2, bias=True) takes 6 values, and is given 5",
        ),
        changes="class Net(nn.Linear):\n    def forward(self, x):\n        return super().forward(x)\n"
        "settings.update(data=(inputs[:, :5], target), test=None, model=lambda: Net(6, 2))",
    ),
    "images of other channels": Case(
        ("Conv2d(3, 2, kernel_size=(3, 3), stride=(1, 1)) takes 3 channels, and is given 1 in a batch of",),
        changes="settings.update(data=(torch.zeros(40, 1, 5, 5), target[:40]), test=None, "
        "model=lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(18, 2)))",
    ),
    "inputs of another type": Case(
        ("must have the same dtype", "give inputs as float32"),
        changes="settings.update(data=(inputs.long(), target), test=None)",
    ),
    "a loss without history": Case(
        ("does not depend on the weights by way of autograd", ".detach()"),
        changes="settings.update(loss=lambda output, target: nn.functional.cross_entropy(output.detach(), target))",
    ),
    "labels that are texts": Case(
        ("loss needs targets as numbers", "a tuple of strs, such as 'cat'", "Number the classes"),
        changes=ITEMS.format(body="return torch.zeros(6), 'cat'"),
    ),
    "labels that are no whole numbers": Case(
        ("compares with class numbers, and targets are float32", "labels.long()", 'loss="mse"'),
        changes="settings.update(data=(inputs, target.float()), test=None)",
    ),
    "labels that are a column of numbers": Case(
        ("(output [16, 2], target [16, 1])", "labels.squeeze(1).long()"),
        changes="settings.update(data=(inputs, target.float()[:, None]), test=None)",
    ),
    "a model that returns a dict": Case(
        ("the model returned a dict with the entries 'scores'", "under 'logits'"),
        changes="class Net(nn.Linear):\n    def forward(self, x):\n        return {'scores': super().forward(x)}\n"
        "settings.update(model=lambda: Net(6, 2))",
    ),
    "a model that takes more": Case(
        ("missing 1 required positional argument: 'mask'", "stoker.Fields(inputs=[0, 1])"),
        changes="class Net(nn.Linear):\n    def forward(self, x, mask):\n        return super().forward(x)\n"
        "settings.update(model=lambda: Net(6, 2))",
    ),
    "entries that the model does not take": Case(
        ("unexpected keyword argument 'x'", "all but the target", "stoker.Fields(inputs=[…], target=…)"),
        changes="settings.update(data={'x': inputs, 'id': target, 'label': target}, valid=None, test=None)",
    ),
    "a loss that takes less": Case(
        ("takes 1 positional argument but 2 were given", "loss(output, target)"),
        changes="settings.update(loss=lambda output: output.sum())",
    ),
    "an index beyond the table": Case(
        ("not below the number of rows of Embedding(3, 2)",),
        changes="settings.update(data=(inputs.long().abs() + 50, target), test=None, "
        "model=lambda: nn.Sequential(nn.Embedding(3, 2), nn.Flatten(), nn.Linear(12, 2)))",
    ),
    "a model that raises": Case(
        ("raised ValueError", "broken.py, line", "`raise ValueError('too deep')`", "too deep"),
        changes="class Net(nn.Linear):\n    def forward(self, x):\n        raise ValueError('too deep')\n"
        "settings.update(model=lambda: Net(6, 2))",
    ),
    "a model that cannot be made": Case(
        ("raised TypeError", "broken.py, line"), changes="settings.update(model=lambda: nn.Linear())"
    ),
    "lazy layer": Case(
        ("weight of LazyLinear has no size before the first batch",),
        changes="settings.update(model=lambda: nn.LazyLinear(2))",
    ),
    "no model": Case(("made a int, wanted a torch.nn.Module",), changes="settings.update(model=lambda: 3)"),
    "a model without weights": Case(("ReLU has no parameter to train",), changes="settings.update(model=nn.ReLU)"),
    "loss not finite at the first update": Case(
        ("the loss is nan at update 1", "look at the data"),
        changes="inputs[:, 0] = float('nan')\nsettings.update(data=(inputs, target))",
    ),
    "loss not finite soon": Case(
        ("at update", "learning rate"), changes="settings.update(optimizer=stoker.SGD(lr=1e30))"
    ),
    "a loss of another type": Case(
        ("loss returned a str",), changes="settings.update(loss=lambda output, target: 'small')"
    ),
    "an output taken for the model": Case(
        (
            "'Tensor' object is not callable",
            "`m` is the model's output, a Tensor",
            "Call it that to be given the model",
        ),
        changes="settings.update(metrics=[], loss=lambda m, b: torch.nn.functional.cross_entropy(m(b[0]), b[1]))",
    ),
    "an output whose parts are looked for": Case(
        ("'Tensor' object has no attribute 'body'", "loss(model, batch) if its first parameter is called `model`"),
        changes="settings.update(metrics=[], loss=lambda net, batch: net.body(batch[0]).sum())",
    ),
    "a batch taken for its only entry": Case(
        ("'tuple' object has no attribute 'float'", "(inputs,) = batch"),
        changes="settings.update(data=inputs, valid=None, test=None, metrics=[], "
        "loss=lambda model, batch: model(batch.float()).sum())",
    ),
    "unknown loss": Case(
        ("'cross_entropi' is no loss", "Did you mean 'cross_entropy'?"), changes="settings.update(loss='cross_entropi')"
    ),
    "unknown metric": Case(
        ("'acuracy' is no metric", "Did you mean 'accuracy'?"), changes="settings.update(metrics=['acuracy'])"
    ),
    "a metric that raises": Case(
        ("IndexError",), changes="settings.update(metrics=[lambda output, target: output[:, 5]])"
    ),
    "an optimiser that is none": Case(
        ("made a list, wanted a torch.optim.Optimizer",), changes="settings.update(optimizer=lambda params: params)"
    ),
    "an optimiser of a model's parameters": Case(
        ("called with a list of the parameters to train, and asks it for 'parameters'", "lambda parameters: torch."),
        changes="settings.update(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))",
    ),
    "an optimiser that raises": Case(
        ("raised TypeError", "broken.py, line"),
        changes="settings.update(optimizer=lambda params: torch.optim.SGD(params, speed=3))",
    ),
    "an optimiser group that matches nothing": Case(
        ("group 'head.*' matches no parameter",),
        changes="settings.update(optimizer=stoker.SGD(lr=0.1, groups={'head.*': {'lr': 0.2}}))",
    ),
    "unknown device": Case(("no device named 'hhere'", "Did you mean 'here'?"), options=("--on", "hhere")),
    "a device that is not here": Case(("t4 is in the catalogue", "not attached", "--on here"), options=("--on", "t4")),
    "several devices": Case(("the plan is for one process", "--on here"), options=("--on", "2xhere")),
    "new and resume": Case(("exclude each other",), options=("--new", "--resume", "latest")),
    "resume of an unknown run": Case(("no run 'nothing'", "no runs in runs"), options=("--resume", "nothing")),
    "fork of an unknown run": Case(("no run 'nothing'",), options=("--fork", "nothing")),
    "an unknown plan file": Case(("there is no plan file absent.json",), options=("--plan", "absent.json")),
    "words for a plan file": Case(("stoker plan JOB --plan shards=2 --json",), options=("--plan", "shards=2")),
}


def tried(case: Case, *options: str) -> Outcome:
    """The case's job file, trained."""
    if case.text is not None:
        Path("broken.py").write_text(case.text)
    else:
        job_file(case.changes, name="broken.py", head=case.head)
    planned = () if "--plan" in case.options else ("--plan", plan_file())
    return stoker_here("train", "broken.py", *planned, *case.options, *options)


HELD_OUT = {
    "a metric that raises": ("evaluating valid", "metrics=[lambda output, target: output[:, 5]]"),
    "a metric of another type": ("returned a NoneType", "metrics=[lambda output, target: None]"),
    "labels out of range in valid": ("evaluating valid", "valid=(inputs, target + 2)"),
    "inputs of another width in test": ("evaluating test", "test=(inputs[:, :5], target)"),
}


@pytest.mark.parametrize("name", HELD_OUT)
def test_what_cannot_be_evaluated_is_refused_before_a_run_that_begins_at_once(name: str) -> None:
    """Not after its first epoch, or its last; and there is no run to be deleted."""
    says, changes = HELD_OUT[name]
    job_file(f"settings.update({changes})", name="broken.py")
    outcome = stoker_here("train", "broken.py")
    assert says in outcome.err
    assert outcome.code == 2
    assert "Traceback" not in outcome.err
    assert_nothing_is_left()


def assert_nothing_is_left() -> None:
    """No run, not even a half-made one."""
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


@pytest.mark.parametrize("name", CASES)
def test_a_bad_job_is_refused_in_words(name: str) -> None:
    """What is wrong, with names and numbers; the exit code; no traceback; no run."""
    case = CASES[name]
    outcome = tried(case)
    for words in case.says:
        assert words in outcome.err
    assert outcome.code == case.code
    assert re.search("^error: ", outcome.err, re.MULTILINE)  # lines before it say what takes long
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
    assert_nothing_is_left()


@pytest.mark.parametrize(
    "name",
    [
        "imports what is not there",
        "inputs of another width",
        "a loss without history",
        "labels that are texts",
        "a model that returns a dict",
        "a model that takes more",
        "an output taken for the model",
        "an output whose parts are looked for",
        "a batch taken for its only entry",
        "entries that the model does not take",
    ],
)
def test_usual_mistakes_have_a_remedy_of_their_own(name: str) -> None:
    """Other than to look at the traceback."""
    assert "--debug" not in tried(CASES[name]).err


@pytest.mark.parametrize("name", ["raises on import", "labels out of range", "unknown device"])
def test_debug_shows_where_it_came_from_and_says_the_same(name: str) -> None:
    """The traceback comes first; words and exit code are as without."""
    case = CASES[name]
    plain, debugged = tried(case), tried(case, "--debug")
    assert debugged.code == plain.code
    assert debugged.err.startswith("Traceback")
    assert debugged.err.endswith(plain.err)


@pytest.mark.parametrize("name", ["empty data", "loss not finite at the first update", "several devices"])
def test_with_json_errors_stay_off_standard_output(name: str) -> None:
    """Words for people go to standard error in any case."""
    outcome = tried(CASES[name], "--json")
    assert (outcome.code, outcome.out) == (2, "")
    assert re.search("^error: ", outcome.err, re.MULTILINE)  # lines before it say what takes long


def test_a_job_file_that_is_absent_is_refused_with_the_nearest() -> None:
    """Of the files that are there."""
    job_file(name="blobs.py")
    outcome = stoker_here("train", "blob.py")
    assert outcome.code == 2
    assert "there is no job file blob.py" in outcome.err
    assert "Did you mean 'blobs.py'?" in outcome.err
    assert_nothing_is_left()


def test_bad_values_are_seen_in_planning_too() -> None:
    """`stoker plan` refuses what `stoker train` does."""
    job_file("target[3::9] = 7\nsettings.update(data=(inputs, target))")
    outcome = stoker_here("plan", "blobs.py")
    assert outcome.code == 2
    assert "labels go from" in outcome.err
    assert "to 7" in outcome.err


TOO_LARGE = """
class Huge(nn.Linear):
    def forward(self, x):
        if self.training and len(x) == 16:
            torch.empty(2**60)
        return super().forward(x)
settings.update(model=lambda: Huge(6, 2), loss=stoker.Objective("cross_entropy", scope={scope!r}))
"""


@pytest.mark.parametrize("scope", ["sample", "batch"])
def test_what_no_memory_holds_is_exit_code_three(scope: str) -> None:
    """Whether the probe meets it or the trial of the plan; no run is left."""
    job_file(TOO_LARGE.format(scope=scope))
    outcome = stoker_here("train", "blobs.py", "--plan", plan_file())
    assert outcome.code == 3
    assert "ran out of memory" in outcome.err
    assert "allocate" in outcome.err
    assert_nothing_is_left()


FASHION = Path("/usr/share/datasets/fashion-mnist")
FASHION_JOB = """\
from torch import nn

import stoker


def job():
    train, test = stoker.data.fashion_mnist()
    return stoker.Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), data=train, loss="cross_entropy", test=test,
        optimizer=stoker.SGD(lr=0.1), batch=512, until=stoker.updates(3),
    )
"""


@pytest.mark.slow
@pytest.mark.skipif(not FASHION.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
def test_data_with_a_wrong_checksum_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file with one flipped bit is named with both checksums; nothing is trained on it."""
    data = shutil.copytree(FASHION, tmp_path / "data")
    path = data / "train-labels-idx1-ubyte.gz"
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[1000] ^= 1
    path.write_bytes(gzip.compress(bytes(content), compresslevel=1))
    monkeypatch.setenv("STOKER_DATA", str(data))
    Path("fashion.py").write_text(FASHION_JOB)
    outcome = stoker_here("train", "fashion.py", "--plan", plan_file())
    assert outcome.code == 2
    assert str(path) in outcome.err
    assert "bad3541b69d9" in outcome.err  # what was published begins with this
    assert "Traceback" not in outcome.err
    assert_nothing_is_left()
