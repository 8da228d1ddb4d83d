"""Training a job from data to metrics, weights and a report."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stoker
from stoker.errors import BadJob, BadRun, RunFailed
from stoker.records import Event, Plan
from stoker.reporting.run_page import render_html
from stoker.store import CheckpointStore
from stoker.training.checkpoints import kept_weights
from tests.flow.builders import PLAN, Heard, assert_equal_tensors, assert_equal_weights, blobs, blobs_job, net


def test_a_run_keeps_metrics_weights_a_model_and_a_report() -> None:
    """The model predicts as it was evaluated: its own loss and accuracy on the test set are the run's."""
    run = stoker.train(blobs_job(), plan=PLAN)
    assert run.status == "finished"
    assert run.metrics.keys() == {"valid/loss", "valid/accuracy", "test/loss", "test/accuracy"}
    inputs, target = blobs(30, seed=1)
    model = run.model()
    assert not model.training
    with torch.no_grad():
        output = model(inputs)
    assert run.metrics["test/accuracy"] == pytest.approx(float((output.argmax(1) == target).float().mean()))
    assert run.metrics["test/loss"] == pytest.approx(float(F.cross_entropy(output, target)), rel=1e-5)
    assert_equal_tensors(run.weights(), model.state_dict())
    assert "<html" in run.report_path.read_text()


class Cooling(nn.Module):
    """Logits over a temperature that falls with each pass of training, a plain number, until they are overconfident."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.temperature = nn.Linear(6, 2), 4.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.temperature /= 2
        return self.layers(inputs) / self.temperature


def test_a_model_has_the_plain_values_that_its_weights_were_evaluated_with() -> None:
    """Of the best checkpoint, of weights that were kept, and where the run is loaded again."""
    inputs, target = blobs(100)
    flipped = torch.where(torch.rand(100, generator=torch.Generator().manual_seed(2)) < 0.2, 1 - target, target)
    evaluation = stoker.Evaluation(select="valid/loss", keep_every=stoker.epochs(1))
    job = blobs_job(model=Cooling, data=(inputs, flipped), evaluation=evaluation)
    run = stoker.train(job, plan=PLAN)
    temperatures = [4 / 2**updates for updates in (5, 10, 15)]
    assert [run.model(at=stoker.epochs(number)).temperature for number in (1, 2, 3)] == temperatures
    inputs, target = blobs(30, seed=1)
    for found in (run, stoker.load(run.path, job)):
        model = found.model()
        assert model.temperature in temperatures[:2], "the last is not the best, or this test shows nothing"
        assert run.metrics["test/loss"] == pytest.approx(
            float(F.cross_entropy(model(inputs), target).detach()), rel=1e-5
        )


def test_a_run_is_found_again_by_path_by_name_and_as_the_latest() -> None:
    """With the same record and weights; its model is made with the job it came from."""
    run = stoker.train(blobs_job(name="blobs"), plan=PLAN)
    assert re.fullmatch(r"blobs-[0-9a-f]{6}", run.name)
    for word in (run.path, str(run.path.resolve()), run.name, run.name[:-2], "latest"):
        assert stoker.load(word).record == run.record
    loaded = stoker.load(run.name, blobs_job())
    assert_equal_weights(loaded, run)
    assert_equal_tensors(loaded.model().state_dict(), run.weights())
    assert "finished" in repr(loaded)


def test_the_model_of_a_run_made_in_python_needs_its_job() -> None:
    """Its architecture is nowhere on the disk; its weights are."""
    run = stoker.load(stoker.train(blobs_job(), plan=PLAN).path)
    with pytest.raises(BadRun, match="without a job file") as caught:
        run.model()
    assert "run.model(job=…)" in (caught.value.remedy or "")
    with pytest.raises(BadRun, match="holds another model"):
        run.model(blobs_job(model=lambda: nn.Linear(6, 2)))
    assert run.weights()["3.bias"].shape == (2,)


def test_the_planner_chooses_where_no_plan_is_given() -> None:
    """The run keeps its decision, which says what it begins under and why, and what it will need."""
    heard = Heard()
    run = stoker.train(blobs_job(), sink=heard)
    decision = run.directory.read_decision()
    assert decision is not None
    assert decision.chosen.plan.device == "cpu"
    begins, finishes = heard.of("planned")[0]["explanation"]
    assert begins == f"begins under {decision.chosen.plan.in_words()}, which is legal whatever the model"
    assert finishes.startswith("to finish: ")
    assert finishes.endswith("for 240 samples in 15 updates")
    assert decision.chosen.forecast.total_samples == 240
    assert run.metrics["test/accuracy"] > 0.5


FIELDS = {
    match[1]: set(re.sub(r"\(.*?\)", "", match[2]).replace(" ", "").split(","))
    for match in re.finditer(r"^    - (\w+): (.+)$", Event.__doc__ or "", re.MULTILINE)
}
"""The fields of each kind of event, as its documentation lists them."""


def test_events_tell_the_story_in_order_with_every_documented_field() -> None:
    """planned, started, training with its evaluations and checkpoints, the test, the end; the log has the same."""
    assert FIELDS.keys() >= {"planned", "started", "progress", "evaluated", "checkpointed", "finished"}
    heard = Heard()
    run = stoker.train(blobs_job(), plan=PLAN, sink=heard)
    for event in heard:
        assert FIELDS[event.kind] <= event.fields.keys(), event.kind
    assert heard.kinds[:3] == ["planned", "started", "progress"]
    assert heard.kinds[-2:] == ["evaluated", "finished"]
    assert [fields["samples"] for fields in heard.of("evaluated", split="valid")] == [80, 160, 240]
    assert [fields["samples"] for fields in heard.of("progress")][-1] == 240
    assert heard.of("checkpointed")[-1]["samples"] == 240
    assert {Path(fields["path"]).parent.name for fields in heard.of("checkpointed")} == {"checkpoints"}
    finished = heard.of("finished")[0]
    assert (finished["run"], finished["metrics"], finished["samples"]) == (run.name, run.metrics, 240)
    assert Path(finished["report"]).is_file()
    assert list(run.directory.read_events()) == heard


def test_whoever_hears_that_a_run_is_finished_finds_all_of_it() -> None:
    """Weights, record and report are there when the event comes."""
    found: list[Any] = []

    def sink(event: Event) -> None:
        if event.kind == "finished":
            run = stoker.load(event.fields["run"])
            found.extend([run.status, run.weights().keys(), Path(event.fields["report"]).read_text()])

    run = stoker.train(blobs_job(), plan=PLAN, sink=sink)
    assert found[:2] == ["finished", run.weights().keys()]
    page = render_html(run.directory.read_report(), run.directory.read_examples())
    assert without_times(found[2]) == without_times(page)


def without_times(text: str) -> str:
    """A report but for the times of day in it, and those in seconds since 1970."""
    return re.sub(r"\d+:\d\d:\d\d|\d{10}\.\d+", "", text)


def test_the_test_set_is_used_once_at_the_end() -> None:
    """One evaluation, after the last of training, on the weights that are kept; it chooses nothing."""
    heard = Heard()
    run = stoker.train(blobs_job(), plan=PLAN, sink=heard)
    (tested,) = heard.of("evaluated", split="test")
    assert {f"test/{name}": value for name, value in tested["metrics"].items()} == {
        name: value for name, value in run.metrics.items() if name.startswith("test/")
    }
    without = stoker.train(blobs_job(test=None), plan=PLAN)
    assert_equal_weights(without, run)
    assert without.metrics.keys() == {"valid/loss", "valid/accuracy"}


def smallness(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> stoker.Loss:
    """A metric that is best before training moved the weights far."""
    norm = sum(float(parameter.norm()) for parameter in model.parameters())
    return stoker.Loss(torch.tensor(-norm * len(batch[0])), len(batch[0]))


smallness.lower_is_better = False


@pytest.mark.parametrize("select", ["best", "last"])
def test_the_weights_kept_are_the_best_on_valid_or_the_last(select: str) -> None:
    """The metrics at the end are those of the weights kept, and say which evaluation they were."""
    heard = Heard()
    job = blobs_job(
        metrics=[smallness, "accuracy"],
        evaluation=stoker.Evaluation(select=select),
        optimizer=stoker.SGD(lr=0.5, momentum=0.9),
    )
    run = stoker.train(job, plan=PLAN, sink=heard)
    seen = [fields["metrics"]["smallness"] for fields in heard.of("evaluated", split="valid")]
    assert seen[0] == max(seen) > seen[-1]
    assert [fields["best"] for fields in heard.of("evaluated", split="valid")] == [True, False, False]
    assert run.metrics["valid/smallness"] == (seen[0] if select == "best" else seen[-1])
    tested = heard.of("evaluated", split="test")[0]
    assert tested["samples"] == (80 if select == "best" else 240)


def test_without_valid_the_last_weights_are_kept() -> None:
    """There is nothing to choose by."""
    run = stoker.train(blobs_job(valid=None), plan=PLAN)
    assert run.metrics.keys() == {"test/loss", "test/accuracy"}
    found = CheckpointStore(run.directory.checkpoints).newest()
    assert found is not None
    assert_equal_tensors(run.weights(), kept_weights(*found))


@pytest.mark.slow
def test_a_job_with_an_average_keeps_the_average() -> None:
    """It is what was evaluated, and what the run's model has."""
    run = stoker.train(blobs_job(average=0.9, evaluation=stoker.Evaluation(select="last")), plan=PLAN)
    found = CheckpointStore(run.directory.checkpoints).newest()
    assert found is not None
    assert "average" in found[1].skeleton
    assert_equal_tensors(run.weights(), kept_weights(*found))
    plain = stoker.train(blobs_job(evaluation=stoker.Evaluation(select="last")), plan=PLAN)
    assert not torch.equal(plain.weights()["0.weight"], run.weights()["0.weight"])


def margin(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A metric of one's own: how far the right class is above the other, one value per sample."""
    return output.gather(1, target[:, None])[:, 0] - output.gather(1, 1 - target[:, None])[:, 0]


def test_metrics_of_ones_own_are_summed_over_samples() -> None:
    """Under the function's name; the mean over the whole set."""
    run = stoker.train(blobs_job(metrics=[margin]), plan=PLAN)
    inputs, target = blobs(30, seed=1)
    with torch.no_grad():
        assert run.metrics["test/margin"] == pytest.approx(float(margin(run.model()(inputs), target).mean()), rel=1e-5)


class Sentences(torch.utils.data.Dataset):
    """Dict samples of different lengths, which need padding."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(1, 12, (2 + index % 4,), generator=generator)
        return {"words": words, "label": int(words.float().mean() > 6)}


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch of sentences, padded with zeros."""
    words = nn.utils.rnn.pad_sequence([sample["words"] for sample in samples], batch_first=True)
    return {"words": words, "label": torch.tensor([sample["label"] for sample in samples])}


class Bag(nn.Module):
    """The mean of the words' vectors, classified; padding left out."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(12, 8, padding_idx=0)
        self.layer = nn.Linear(8, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        lengths = (words != 0).sum(1, keepdim=True)
        return self.layer(self.vectors(words).sum(1) / lengths)


def of_the_right_class(model: nn.Module, batch: dict[str, torch.Tensor]) -> stoker.Loss:
    """A loss of the form (model, batch)."""
    output = model(batch["words"])
    return stoker.Loss(F.cross_entropy(output, batch["label"], reduction="sum"), len(output))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cross_entropy", of_the_right_class])
def test_dict_samples_with_a_collate_function_of_ones_own(loss: Any) -> None:
    """The model gets the input by name, the loss the target, or both get the batch; both ways learn the same."""
    job = blobs_job(
        model=Bag,
        data=Sentences(64),
        test=Sentences(20),
        fields=stoker.Fields(collate=padded),
        loss=loss,
        optimizer=stoker.Adam(lr=0.05),
        until=stoker.epochs(6),
    )
    run = stoker.train(job, plan=Plan(device="cpu", micro_batch=16, loader="inline"))
    assert run.metrics["test/accuracy"] > 0.8


@pytest.mark.slow
def test_both_forms_of_a_loss_learn_the_same() -> None:
    """By name and as (model, batch): bit-equal weights under one plan."""
    plan = Plan(device="cpu", micro_batch=16, loader="inline")
    jobs = [
        blobs_job(
            model=Bag,
            data=Sentences(64),
            test=None,
            fields=stoker.Fields(collate=padded),
            loss=loss,
            metrics=(),
            evaluation=stoker.Evaluation(select="last"),
        )
        for loss in ("cross_entropy", of_the_right_class)
    ]
    assert_equal_weights(*(stoker.train(job, plan=plan) for job in jobs))


def test_a_module_is_trained_as_a_copy_twice_to_the_same_weights() -> None:
    """The module that was given stays as it is, and the second run learns what the first did."""
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    job = blobs_job(model=model)
    first, second = (stoker.train(job, plan=PLAN) for _ in range(2))
    assert_equal_tensors(model.state_dict(), before)
    assert second.name == f"{first.name}-2"
    assert_equal_weights(first, second)
    assert not torch.equal(first.weights()["0.weight"], before["0.weight"])


def test_evaluating_does_not_influence_training() -> None:
    """With `valid`, evaluated after every update or every epoch, and without it: the last weights are bit-equal."""
    valid = blobs(20, seed=2)
    jobs = [
        blobs_job(valid=valid, evaluation=stoker.Evaluation(every=stoker.updates(1), select="last")),
        blobs_job(valid=valid, evaluation=stoker.Evaluation(select="last")),
        blobs_job(valid=None, evaluation=stoker.Evaluation(select="last")),
    ]
    runs = [stoker.train(job, plan=PLAN) for job in jobs]
    assert_equal_weights(runs[0], runs[2])
    assert_equal_weights(runs[1], runs[2])


class Items(torch.utils.data.Dataset):
    """The points of `blobs`, fetched one by one."""

    def __init__(self, inputs: torch.Tensor, target: torch.Tensor) -> None:
        self.inputs, self.target = inputs, target

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.target[index]


class NoisyItems(Items):
    """Points that are never the same twice: each draws from Python's and NumPy's generators."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index] * random.random() + np.random.rand(), self.target[index]  # noqa: NPY002 - likewise


class Noisy(nn.Linear):
    """A layer that draws from all three global generators while it is trained."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            noise = random.random() + np.random.rand()  # noqa: NPY002 - what users write
            inputs = inputs * (1 + 0.1 * noise) + 0.1 * torch.rand_like(inputs)
        return super().forward(inputs)


@pytest.mark.slow
def test_evaluating_does_not_influence_what_a_model_draws() -> None:
    """Though the items of `valid` draw at random too: Python's, NumPy's and PyTorch's generators are given back."""
    plan = dataclasses.replace(PLAN, loader="inline")
    runs = [
        stoker.train(
            blobs_job(
                model=lambda: Noisy(6, 2),
                data=NoisyItems(*blobs(80)),
                test=None,
                evaluation=stoker.Evaluation(select="last", every=stoker.updates(1)),
                valid=valid,
            ),
            plan=plan,
        )
        for valid in (None, NoisyItems(*blobs(20, seed=2)))
    ]
    assert_equal_weights(*runs)


def test_checkpoints_do_not_influence_training() -> None:
    """One after every update, or none before the end: bit-equal weights."""
    often, seldom = Heard(), Heard()
    runs = [
        stoker.train(blobs_job(), plan=PLAN, new=True, checkpoint_every=stoker.seconds(seconds), sink=heard)
        for seconds, heard in ((1e-6, often), (1e6, seldom))
    ]
    assert len(often.of("checkpointed")) == 15 > len(seldom.of("checkpointed"))
    assert_equal_weights(*runs)
    decision = runs[0].directory.read_decision()
    assert decision is not None
    assert decision.chosen.plan.checkpoint_every_s == 1e-6


def test_where_batches_come_from_does_not_change_what_is_learned() -> None:
    """Gathered from memory, fetched item by item, or fetched by two workers: bit-equal weights."""
    inline = dataclasses.replace(PLAN, loader="inline")
    workers = dataclasses.replace(PLAN, loader="workers", num_workers=2)
    memory = stoker.train(blobs_job(), plan=PLAN)
    items = blobs_job(data=Items(*blobs(100)), valid=stoker.holdout(0.2), test=Items(*blobs(30, seed=1)))
    assert_equal_weights(memory, stoker.train(items, plan=inline))
    assert_equal_weights(memory, stoker.train(items, plan=workers, new=True))


def test_a_holdout_is_a_share_of_the_data_and_no_part_of_what_is_trained_on() -> None:
    """80 of 100 samples make an epoch; another seed holds other samples out."""
    heard = Heard()
    run = stoker.train(blobs_job(), plan=PLAN, sink=heard)
    data = heard.of("started")[0]["data"]
    assert (data["train"], data["valid"], data["test"]) == (80, 20, 30)
    assert heard.of("started")[0]["total_samples"] == 240
    other = stoker.train(blobs_job(valid=stoker.holdout(0.2, seed=1)), plan=PLAN)
    assert other.directory.read_spec().digest() != run.directory.read_spec().digest()
    assert not torch.equal(other.weights()["0.weight"], run.weights()["0.weight"])


def test_a_sink_that_fails_fails_the_run_and_not_its_checkpoints() -> None:
    """What was saved is intact, and the same call goes on."""

    def sink(event: Event) -> None:
        if event.kind == "evaluated" and event.fields["samples"] == 160:
            raise ValueError("the screen is gone")

    with pytest.raises(RunFailed, match="the screen is gone"):
        stoker.train(blobs_job(), plan=PLAN, sink=sink)
    assert stoker.load("latest").status == "failed"
    run = stoker.train(blobs_job(), plan=PLAN)
    assert run.status == "finished"
    assert_equal_weights(run, stoker.train(blobs_job(), plan=PLAN, new=True))


def test_of_sites_too_the_best_weights_are_kept_and_measured() -> None:
    """Where sites share weights, the last shared ones are not what a run that chooses by `valid` ends with."""
    inputs, targets = blobs(30, seed=1)
    job = blobs_job(valid=(inputs, 1 - targets), metrics=[], sync=stoker.LocalSGD(every=stoker.updates(1)))
    heard = Heard()
    run = stoker.train(job, plan=PLAN, sink=heard)
    losses = [fields["metrics"]["loss"] for fields in heard.of("evaluated", split="valid")]
    assert losses[0] == min(losses) < losses[-1]
    assert run.metrics["valid/loss"] == pytest.approx(losses[0])
    found = F.cross_entropy(run.model()(inputs), 1 - targets).detach()
    assert float(found) == pytest.approx(losses[0])


@pytest.mark.slow
def test_sites_that_come_together_too_seldom_are_said_to() -> None:
    """15 updates with an exchange after every 5: the outer optimiser is chosen for that, logged, and kept."""
    heard = Heard()
    run = stoker.train(blobs_job(sync=stoker.DiLoCo(every=stoker.updates(5))), plan=PLAN, sink=heard)
    assert any("has 3 exchanges between sites" in fields["message"] for fields in heard.of("warned"))
    sync = run.directory.read_spec().settings["sync"]
    assert (sync["outer"]["lr"], sync["outer"]["momentum"]) == (1.0, 0.0)
    heard.clear()
    stoker.train(
        blobs_job(
            sync=stoker.DiLoCo(every=stoker.updates(1)), until=stoker.updates(120), optimizer=stoker.SGD(lr=0.001)
        ),
        plan=PLAN,
        sink=heard,
    )
    assert not heard.of("warned")


def test_the_rate_of_failures_may_be_stated() -> None:
    """It is kept in the plan, from which the time between checkpoints follows; what is no time is refused."""
    run = stoker.train(blobs_job(), plan=PLAN, device_mtbf_h=50.0, sink=lambda _: None)
    decision = run.directory.read_decision()
    assert decision is not None
    assert decision.chosen.plan.device_mtbf_h == 50.0
    planned = stoker.plan(blobs_job(), device_mtbf_h=50.0).chosen
    assert planned.plan.device_mtbf_h == 50.0
    assert planned.plan.checkpoint_every_s == planned.forecast.checkpoint_every_s == 30.0
    with pytest.raises(BadJob, match="device_mtbf_h must be a positive number of hours, got 0"):
        stoker.train(blobs_job(), device_mtbf_h=0.0)


def test_an_interruption_after_the_end_leaves_a_finished_run() -> None:
    """As during the last upload: with the exit code of an interruption, the same command would begin another run."""
    heard = Heard()

    def interrupt(event: Event) -> None:
        heard(event)
        if event.kind == "finished":
            raise KeyboardInterrupt

    run = stoker.train(blobs_job(), plan=PLAN, sink=interrupt, run_dir="run")
    assert (run.status, run.exit_code) == ("finished", 0)
    assert any("after run was finished" in each["message"] for each in heard.of("warned"))


def test_an_interruption_before_the_end_is_one() -> None:
    """The run is not finished: the caller is interrupted."""

    def interrupt(event: Event) -> None:
        if event.kind == "evaluated":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stoker.train(blobs_job(), plan=PLAN, sink=interrupt, run_dir="run")
