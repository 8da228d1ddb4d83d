"""Metrics that keep a state: values of the whole set whatever the batch, in one process and as if in several."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from stoker.errors import BadJob
from stoker.jobs.metrics import probabilities
from stoker.loading.dataset_adapters import as_samples
from stoker.records import Layout
from stoker.stepping.world import World
from stoker.training import evaluation
from stoker.training.evaluation import StatefulMetrics, evaluate, numbers_in, share_states
from tests.optional import optional
from tests.training.builders import blobs, step_of, tiny_job

torchmetrics, of_classes = optional("torchmetrics"), optional("torchmetrics.classification")

INPUTS, TARGETS = blobs(37)


def of_model(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A loss that hands the model two inputs, of which the batch's first is one."""
    first, second, labels = batch
    return torch.nn.functional.cross_entropy(model(first + second), labels, reduction="none")


@pytest.mark.parametrize("metrics", [{"kept": None}, ["accuracy"]], ids=["with a state", "named"])
def test_a_metric_without_an_output_is_told_by_its_name(metrics) -> None:
    """A batch of the same samples says so: before training, where a plan is tried on each held-out set."""
    name = next(iter(metrics))
    metrics = {"kept": of_classes.MulticlassAccuracy(2)} if name == "kept" else metrics
    data = (INPUTS, INPUTS, TARGETS)
    step = step_of(tiny_job(data=data, loss=of_model, metrics=metrics, fields=stoker.Fields(inputs=[0, 1])))
    words = rf"metric {name} is given the model's output, and .* raised TypeError: .*\n.*Fields\(inputs=\[0, 1\]\)"
    with step.evaluation() as measure, pytest.raises(BadJob, match=words):
        measure(data, 37)
    step = step_of(tiny_job(data=data, loss=of_model, metrics=metrics, fields=stoker.Fields(inputs=0)))
    assert name in evaluate(step, as_samples(data, what="valid"), 10)


def three_metrics() -> dict[str, object]:
    """A mean over classes, a value for each of them, and one that keeps all outputs."""
    return {
        "f1": of_classes.MulticlassF1Score(2),
        "recall": of_classes.MulticlassRecall(2, average=None),
        "auroc": probabilities(of_classes.MulticlassAUROC(2)),
    }


def of_the_whole(step, *, made: dict[str, object]) -> dict[str, float]:
    """The same metrics, given everything at once."""
    with step.evaluation():
        output = step.model(INPUTS)
    found: dict[str, float] = {}
    for name, metric in made.items():
        metric.update(output.softmax(1), TARGETS)
        found |= numbers_in(metric.compute(), name)
    return found


@settings(max_examples=12)
@given(size=st.integers(1, 40))
def test_results_are_those_of_one_pass_whatever_the_batch(size: int) -> None:
    """Of a score, a vector and a curve; results of a vector are named by class. The job's own objects stay unused."""
    given_ones = three_metrics()
    step = step_of(tiny_job(metrics=given_ones))
    expected = of_the_whole(step, made=three_metrics())
    found = evaluate(step, as_samples((INPUTS, TARGETS), what="valid"), size)
    assert set(found) == {"loss", "f1", "recall[0]", "recall[1]", "auroc"}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6), name
    assert given_ones["f1"].update_count == 0
    assert step.model.training


def test_probabilities_are_of_scores_by_class_and_of_single_logits() -> None:
    """A metric under a name given before goes by that of the dict."""
    seen: list[torch.Tensor] = []

    class Watching(Counter):
        def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
            super().update(output, target)
            seen.append(output)

    job = tiny_job(metrics={"seen": probabilities(Watching(), "other")})
    metrics = StatefulMetrics(job, torch.device("cpu"))
    metrics.update(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    metrics.update(torch.tensor([[0.0]]), torch.tensor([1]))
    assert [one.tolist() for one in seen] == [[[0.5, 0.5]], [[0.5]]]
    assert metrics.computed(World()) == {"seen": 2.0}


@pytest.mark.parametrize(
    ("changed", "target"),
    [
        ({"loss": "binary_cross_entropy"}, torch.tensor([[1.0, 1.0]])),
        ({"loss": torch.nn.BCEWithLogitsLoss(reduction="none")}, torch.tensor([[1.0, 1.0]])),
        ({"loss": "mse"}, torch.tensor([[1, 1]])),
        ({"loss": "mse", "labels": 2}, torch.tensor([[1.0, 1.0]])),
    ],
)
def test_labels_have_probabilities_each_by_itself(changed: dict[str, Any], target: torch.Tensor) -> None:
    """Where the loss, the target or the metric shows it; both of two labels can be likely, as of a softmax only one."""
    seen: list[torch.Tensor] = []

    class Watching(Counter):
        num_labels = changed.get("labels")

        def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
            super().update(output, target)
            seen.append(output)

    job = tiny_job(metrics={"seen": probabilities(Watching())}, loss=changed["loss"])
    metrics = StatefulMetrics(job, torch.device("cpu"))
    metrics.update(torch.tensor([[3.0, 3.0]]), target)
    assert seen[0].min() > 0.9


def test_shares_of_classes_are_of_a_softmax() -> None:
    """Targets of the output's shape that are no labels: the classes of a cross-entropy compete."""
    seen: list[torch.Tensor] = []

    class Watching(Counter):
        def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
            super().update(output, target)
            seen.append(output)

    metrics = StatefulMetrics(tiny_job(metrics={"seen": probabilities(Watching())}), torch.device("cpu"))
    metrics.update(torch.tensor([[3.0, 3.0]]), torch.tensor([[0.3, 0.7]]))
    assert seen[0].tolist() == [[0.5, 0.5]]


@settings(max_examples=12)
@given(cut=st.integers(0, 37))
def test_states_of_several_processes_become_those_of_one(cut: int) -> None:
    """Sums, and what is kept of every sample; also where one process has seen nothing."""
    job = tiny_job(metrics=three_metrics())
    step = step_of(job)
    expected = of_the_whole(step, made=three_metrics())
    with step.evaluation():
        output = step.model(INPUTS)
    world = World(Layout(replicas=2), 0)
    ranks = [StatefulMetrics(job, torch.device("cpu")) for _ in range(2)]
    for one, part in zip(ranks, (slice(0, cut), slice(cut, None)), strict=True):
        if len(TARGETS[part]):
            one.update(output[part], TARGETS[part])
    found: dict[str, float] = {}
    for name, mine in ranks[0]._metrics.items():
        theirs = ranks[1]._metrics[name]
        _share(mine, theirs, name, world)
        found |= numbers_in(mine.compute(), name)
    assert found == pytest.approx(expected, rel=1e-6)


def _share(mine, theirs, name: str, world: World) -> None:
    """As if the other process had answered."""
    answers: list[list[object]] = [[], []]

    def patched(*others: object) -> pytest.MonkeyPatch:
        patch = pytest.MonkeyPatch()
        for kind, function in enumerate(("gather_json", "gather_bytes")):

            def gather(said: object, *_: object, kind: int = kind, **_limits: int) -> list[object]:
                answers[kind].append(said)
                return [json.loads(json.dumps(one)) if kind == 0 else one for one in (said, *others[kind : kind + 1])]

            patch.setattr(evaluation, function, gather)
        return patch

    patch = patched()
    share_states(copy_of(theirs), name, world)
    patch.undo()
    skeleton, parcel = answers[0][0], answers[1][0]
    patch = patched([1, *skeleton[1:]], parcel)
    share_states(mine, name, world)
    patch.undo()


def copy_of(metric):
    """So that the first answer leaves the metric as it is."""
    import copy

    return copy.deepcopy(metric)


def test_a_matrix_is_no_result() -> None:
    """The report shows one without being asked."""
    step = step_of(tiny_job(metrics={"matrix": of_classes.MulticlassConfusionMatrix(2)}))
    with pytest.raises(BadJob, match=r"metric matrix computed \[2, 2\]; results are numbers") as caught:
        evaluate(step, as_samples((INPUTS, TARGETS), what="valid"), 10)
    assert "confusion matrix" in (caught.value.remedy or "")


def test_a_metric_that_cannot_take_a_batch_is_named() -> None:
    """With what it said."""
    step = step_of(tiny_job(metrics={"f1": of_classes.BinaryF1Score()}))
    with pytest.raises(BadJob, match="metric f1 raised"):
        evaluate(step, as_samples((INPUTS, TARGETS), what="valid"), 10)


@pytest.mark.parametrize(("loss", "is_said"), [("cross_entropy", True), ("mse", False)])
def test_a_metric_that_takes_no_padding_is_told_what_it_is(loss: str, is_said: bool) -> None:
    """The number that the loss leaves out is no class to a metric, unless it is given as its own."""
    targets = torch.tensor([1, -100])
    job = tiny_job(metrics={"f1": of_classes.MulticlassF1Score(2)}, loss=loss)
    with pytest.raises(BadJob, match="metric f1 raised") as caught:
        StatefulMetrics(job, torch.device("cpu")).update(torch.zeros(2, 2), targets)
    assert ("-100 where there is none: leave that out" in (caught.value.remedy or "")) == is_said
    ignoring = tiny_job(metrics={"f1": of_classes.MulticlassF1Score(2, ignore_index=-100)}, loss=loss)
    StatefulMetrics(ignoring, torch.device("cpu")).update(torch.zeros(2, 2), targets)


def test_a_collection_names_its_results() -> None:
    """Each of its members is a result of its own."""
    both = torchmetrics.MetricCollection([of_classes.MulticlassF1Score(2), of_classes.MulticlassRecall(2)])
    step = step_of(tiny_job(metrics=[both]))
    found = evaluate(step, as_samples((INPUTS, TARGETS), what="valid"), 10)
    assert {"MulticlassF1Score", "MulticlassRecall"} < set(found)


class Counter:
    """A metric of one's own that does not say how states are reduced."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> float:
        """Of one batch alone."""
        return float(len(target))

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """Count samples."""
        self.seen += len(target)

    def compute(self) -> float:
        """How many were seen."""
        return float(self.seen)

    def reset(self) -> None:
        """Forget them."""
        self.seen = 0


def test_a_metric_of_ones_own_sees_every_sample_once() -> None:
    """In one process any object with these three methods will do; several cannot join it."""
    job = tiny_job(metrics={"seen": Counter()})
    assert evaluate(step_of(job), as_samples((INPUTS, TARGETS), what="valid"), 10)["seen"] == 37
    with pytest.raises(BadJob, match="metric seen does not say how its states"):
        share_states(Counter(), "seen", World(Layout(replicas=2), 0))


def test_a_metric_with_a_state_may_choose_the_best_checkpoint() -> None:
    """Where it is one number and says which way is better; a vector leaves it to the loss."""
    from stoker.training.session import _best_so_far

    def chosen(metric: object) -> tuple[str, bool]:
        best = _best_so_far(tiny_job(metrics={"mine": metric}), {})
        return best.name, best.lower_is_better

    assert chosen(of_classes.MulticlassF1Score(2)) == ("mine", False)
    assert chosen(torchmetrics.MeanSquaredError()) == ("mine", True)
    assert chosen(of_classes.MulticlassF1Score(2, average=None)) == ("loss", False)
    assert chosen(stoker.jobs.metrics.Named("x", Counter())) == ("loss", False)
