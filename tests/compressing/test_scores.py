"""Metrics as one score a row."""

import numpy as np
import pytest

from stoker.compressing.scores import NAMES, Metric, named
from stoker.errors import BadJob

LOGITS = np.array([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 0.0, 4.0], [9.0, 0.0, 0.0]])
CLASSES = np.array([0, 1, 1, 0])


def test_accuracy_is_a_hit_a_row_for_numbers_and_for_shares() -> None:
    """Classes may be given as numbers or as one share each."""
    wanted = [1, 1, 0, 1]
    assert named("accuracy").scores({"y": LOGITS}, CLASSES, 4).tolist() == wanted
    assert named("accuracy").scores({"y": LOGITS}, np.eye(3)[CLASSES], 4).tolist() == wanted


@pytest.mark.parametrize("name", ["accuracy", "top5_accuracy", "cross_entropy"])
def test_a_row_of_pixels_scores_their_mean_without_those_that_are_left_out(name: str) -> None:
    """As in training: classes in dimension 1, labels [N, H, W], of which -100 counts for nothing."""
    generator = np.random.default_rng(0)
    outputs, labels = generator.normal(size=(3, 8, 2, 4)), generator.integers(0, 8, (3, 2, 4))
    labels[0, 0], labels[1, 1, 3] = -100, -100
    metric = named(name)
    expected = [
        metric.scores({"y": row[:, own >= 0].T}, own[own >= 0], int((own >= 0).sum())).mean()
        for row, own in zip(outputs, labels, strict=True)
    ]
    assert metric.scores({"y": outputs}, labels, 3) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["accuracy", "top5_accuracy", "cross_entropy"])
def test_a_single_logit_has_no_classes(name: str) -> None:
    """The largest of one is always the first: every candidate would keep such an accuracy."""
    with pytest.raises(BadJob, match=r"scores of each class \[N, classes\], got \[4, 1\]; .*binary_accuracy"):
        named(name).scores({"y": LOGITS[:, :1]}, CLASSES, 4)


def test_errors_are_turned_round() -> None:
    """Scores of what should be low are negative, and the metric itself is reported as it is."""
    metric = named("mse")
    scores = metric.scores({"y": np.array([[1.0], [3.0]])}, np.array([1.0, 1.0]), 2)
    assert scores.tolist() == [0.0, -4.0]
    assert metric.value(scores) == 2.0


def test_cross_entropy_is_that_of_the_softmax() -> None:
    """The row's own negative log of its class's share."""
    shares = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
    scores = named("cross_entropy").scores({"y": LOGITS}, CLASSES, 4)
    assert scores == pytest.approx(np.log(shares[np.arange(4), CLASSES]))


@pytest.mark.parametrize("name", sorted({*NAMES} - {"agreement"}))
def test_every_metric_prefers_the_truth(name: str) -> None:
    """Right outputs score higher than wrong ones."""
    is_number = name in {"mse", "l1", "binary_accuracy"}
    targets = np.array([1.0, 0.0]) if is_number else np.array([0, 6])
    right = (targets[:, None] * 2 - 1) if is_number else np.eye(8)[targets] * 9
    wrong = -right
    if name == "token_accuracy":
        targets, right, wrong = targets[:, None], right[:, None], wrong[:, None]
    metric = named(name)
    assert metric.scores({"y": right}, targets, 2).mean() > metric.scores({"y": wrong}, targets, 2).mean()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda outputs, targets: outputs.no_such, "raised AttributeError"),
        (lambda outputs, targets: 0.5, r"shape \[\] for 4 rows"),
        (lambda outputs, targets: outputs, r"shape \[4, 3\] for 4 rows"),
        (lambda outputs, targets: np.array([0, np.nan, 0, 0]), "nan for row 1"),
        (lambda outputs, targets: ["a"] * 4, "raised ValueError"),
    ],
)
def test_a_metric_that_cannot_be_used_is_refused(function, says: str) -> None:
    """What went wrong is reported, with the metric's name."""
    with pytest.raises(BadJob, match=f"the metric mine .*{says}"):
        Metric("mine", function).scores({"y": LOGITS}, CLASSES, 4)


def test_a_share_is_of_one_for_scores_and_of_the_value_for_errors() -> None:
    """Half a percent of accuracy is half a point; of an error, half a percent of what it is."""
    assert named("accuracy").allowed("0.5%", 0.92) == pytest.approx(0.005)
    assert named("mse").allowed("0.5%", 40.0) == pytest.approx(0.2)
    assert named("mse").allowed("0.5", 40.0) == 0.5


@pytest.mark.parametrize("words", ["", "much", "-1%", "0", "nan", "inf%"])
def test_a_drop_that_is_no_positive_number_is_refused(words: str) -> None:
    """The option is named with an example."""
    with pytest.raises(BadJob, match="wanted a positive number"):
        named("accuracy").allowed(words, 0.9)


def test_an_unknown_metric_names_the_nearest() -> None:
    """A slip of the pen is answered with what was likely meant."""
    with pytest.raises(BadJob, match="'accuracy'"):
        named("acuracy")


def test_agreement_is_by_what_an_output_holds() -> None:
    """Class scores by the largest, whole numbers by equality, others by their distance; the worst output counts."""
    shares = np.array([[0.2, 0.8], [0.6, 0.4]], np.float32)
    embedding = np.array([[3.0, 4.0], [4.0, 3.0]], np.float32)  # a root mean square of 3.5355
    number = np.array([1, 2])
    metric = named("agreement")
    targets = {"p": shares, "e": embedding, "n": number}
    assert metric.scores(targets, targets, 2).tolist() == [1.0, 1.0]
    assert metric.scores({**targets, "p": shares[:, ::-1]}, targets, 2).tolist() == [0.0, 0.0]
    assert metric.scores({**targets, "n": np.array([1, 3])}, targets, 2).tolist() == [1.0, 0.0]
    moved = embedding + np.array([[0.35355, 0.35355], [0.0, 0.0]], np.float32)
    assert metric.scores({**targets, "e": moved}, targets, 2) == pytest.approx([0.9, 1.0], abs=1e-4)
    assert metric.scores({"p": np.array([[0.3, 0.7], [0.55, 0.45]])}, {"p": shares}, 2).tolist() == [1.0, 1.0]
    assert metric.scores({"e": np.full((2, 2), np.nan)}, {"e": embedding}, 2).tolist() == [0.0, 0.0]
    labelled = named("agreement", {"e"})
    assert labelled.scores({"e": 5 * embedding}, {"e": embedding}, 2).tolist() == [1.0, 1.0]


def test_a_drop_larger_than_any_score_is_refused() -> None:
    """5 instead of 5% of accuracy."""
    with pytest.raises(BadJob, match="accuracy is at most 1"):
        named("accuracy").allowed("5", 0.9)
