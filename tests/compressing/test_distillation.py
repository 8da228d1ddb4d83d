"""What is left of a pruned network is trained by a run like any other: exact, resumable, and made again from JSON."""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import stoker
from stoker.compressing import distillation
from stoker.compressing.channel_cuts import prunable, sound_cut
from stoker.compressing.channel_importance import removed_at, scores_of
from stoker.compressing.distillation import share_of, trained, tuning_job
from stoker.errors import BadJob, BadRun, RunFailed
from stoker.jobs import Job
from stoker.records import ArtifactSource
from stoker.records.compression import Interval, Pruning
from stoker.training.pruned_network import rebuild_pruned
from tests.flow.builders import PLAN, Stopping, assert_equal_weights, blobs, blobs_job

pytestmark = pytest.mark.usefixtures("place")

KILLED = '''\
import os, signal
from tests.compressing.test_distillation import begun, trained

def kill(event):
    """At the first update after an evaluation, as by a lack of memory."""
    if event.kind == "checkpointed":
        os.kill(os.getpid(), signal.SIGKILL)

trained(*begun(), kill)
'''


def wide() -> nn.Module:
    """Two layers with forty channels between them."""
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 2))


def ask(model: nn.Module) -> Sequence[torch.Tensor]:
    """What a model says of four points."""
    return (model(blobs(4)[0]),)


def half_of(model: nn.Module, original: str) -> Pruning:
    """A pruning that takes half of the channels."""
    cut = sound_cut(model, ask, removed_at(scores_of(model, ask, prunable(model, ask), importance="magnitude"), 0.5))
    return Pruning(
        source=ArtifactSource(kind="run", name=original, digest=""),
        target=1.5,
        ratio=0.5,
        importance="magnitude",
        speed_up=Interval(value=1.5, low=1.4, high=1.6),
        engine_precision="openvino fp32",
        batch_sizes=(1,),
        threads=1,
        proved_on="here",
        until=stoker.epochs(4),
        cut=cut,
    )


def job() -> Job:
    """A job of forty channels, of which checkpoints are written at every evaluation."""
    return blobs_job(model=wide, until=stoker.epochs(2))


def begun() -> tuple[stoker.Run, Job, nn.Module, Pruning]:
    """The run whose model is pruned, trained now or found, and what was decided of it; under one plan."""
    if not isinstance(distillation.train, functools.partial):
        distillation.train = functools.partial(  # type: ignore[assignment]
            stoker.train, plan=PLAN, checkpoint_every=stoker.seconds(1e-9)
        )
    path = Path("whole")
    run = stoker.load(path) if path.is_dir() else stoker.train(job(), plan=PLAN, run_dir=path, sink=lambda event: None)
    teacher = run.model(job())
    return run, job(), teacher, half_of(teacher, str(path.resolve()))


@pytest.fixture(autouse=True)
def own_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever `begun` puts in the place of `train` is taken away again."""
    monkeypatch.setattr(distillation, "train", distillation.train)


@pytest.mark.slow  # a minute on a busy machine
def test_a_killed_run_goes_on_bit_for_bit(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same call after SIGKILL ends with the weights of one that was never interrupted; a third trains nothing."""
    begun()
    repository = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", KILLED],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(repository), str(repository / "src")])},
    )
    assert found.returncode == -signal.SIGKILL, found.stderr
    heard = Stopping(10**9)
    run = trained(*begun(), heard)
    assert "resumed" in heard.kinds
    again = Stopping(10**9)
    assert trained(*begun(), again).path == run.path
    assert again == []
    monkeypatch.setenv("STOKER_RUNS", str(place / "others"))
    other = trained(*begun(), Stopping(10**9))
    assert other.path != run.path
    assert_equal_weights(run, other)
    assert run.model()(blobs(3)[0]).shape == (3, 2)


def test_a_run_that_was_asked_to_stop_says_how_to_go_on(place: Path) -> None:
    """Nothing of it is taken before it is finished."""
    with pytest.raises(RunFailed, match="was stopped before") as error:
        trained(*begun(), Stopping(80))
    assert "same command" in str(error.value.remedy)
    assert not list(place.glob("runs/*/pruning.json"))


def test_the_model_is_made_again_from_json_and_safetensors() -> None:
    """Without the process that pruned it: the whole model's code, the record of what was kept, the run's weights."""
    arguments = begun()
    whole, teacher, pruning = arguments[0], arguments[2], arguments[3]
    run = trained(*arguments, lambda event: None)
    again = stoker.load(run.path).model(job())
    small = rebuild_pruned(teacher, pruning.cut)
    small.load_state_dict(run.weights())
    inputs = blobs(9, seed=4)[0]
    assert torch.equal(again(inputs), small(inputs))
    assert sum(p.numel() for p in again.parameters()) < sum(p.numel() for p in teacher.parameters())
    assert whole.pruning is None
    with pytest.raises(BadJob, match="cut out of another one"):
        stoker.load(run.path).model(blobs_job())


@pytest.mark.slow
def test_a_network_that_was_pruned_twice_is_made_again_cut_by_cut() -> None:
    """The second run's record has the first cut as well."""
    original, _, teacher, pruning = begun()
    once = trained(original, job(), teacher, pruning, lambda event: None)
    smaller = once.model()
    twice = trained(once, job(), smaller, half_of(smaller, str(once.path)), lambda event: None)
    again = stoker.load(twice.path).model(job())
    assert again[0].out_features < smaller[0].out_features < teacher[0].out_features  # type: ignore[index, operator]
    assert len(twice.cuts) == 2


def test_a_pruned_run_without_its_job_says_whose_it_needs() -> None:
    """Its own job has the cut model in it, and no file."""
    run = trained(*begun(), lambda event: None)
    with pytest.raises(BadRun, match=r"what pruning left of .*whole, whose job cannot be had: .*made in Python"):
        stoker.load(run.path).model()
    (run.path / "pruning.json").write_text("{")
    with pytest.raises(BadRun, match=r"pruning\.json cannot be used"):
        stoker.load(run.path).job()


def test_it_learns_from_the_whole_network() -> None:
    """After its training it answers as the whole one more often than right after the cut."""
    run, _, teacher, pruning = begun()
    model = trained(run, job(), teacher, pruning, lambda event: None).model()
    inputs = blobs(500, seed=8)[0]

    def apart(one: nn.Module) -> float:
        with torch.no_grad():
            return float((one(inputs) - teacher(inputs)).square().mean())

    assert apart(model) < apart(rebuild_pruned(teacher, pruning.cut))


def test_nothing_of_the_validation_data_chooses_its_weights() -> None:
    """The last weights are kept, nothing stops early or begins elsewhere, and the test set is left alone."""
    run, original, teacher, pruning = begun()
    given = stoker.Job(
        **{name: getattr(original, name) for name in ("model", "data", "valid", "test", "optimizer", "batch", "until")},
        loss=stoker.Objective("cross_entropy", label_smoothing=0.1),
        average=0.9,
        evaluation=stoker.Evaluation(select="best"),
        name=run.name,
    )
    found = tuning_job(given, rebuild_pruned(teacher, pruning.cut), teacher, stoker.epochs(1), name="small")
    assert (found.evaluation.select, found.test, found.average) == ("last", None, None)
    assert (found.objective.label_smoothing, found.objective.loss.label_smoothing) == (0.0, 0.1)
    assert found.valid is given.valid
    assert found.data is given.data
    assert found.schedule(0.05) < 0.5


def test_a_quarter_of_a_run_in_its_own_unit() -> None:
    """Updates stay whole."""
    assert share_of(stoker.epochs(6)) == stoker.epochs(1.5)
    assert share_of(stoker.updates(5)) == stoker.updates(2)


def test_losses_of_a_whole_batch_are_refused() -> None:
    """A teacher answers sample by sample."""
    with pytest.raises(BadJob, match="of a whole batch"):
        tuning_job(
            blobs_job(loss=stoker.Objective("cross_entropy", scope="batch")), wide(), wide(), stoker.epochs(1), name="x"
        )
