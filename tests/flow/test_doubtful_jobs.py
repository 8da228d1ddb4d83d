"""Jobs that train, and not as they seem to: which weights move, which are kept, and what the run says about it."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.flow.command import Outcome, job_file, plan_file, stoker_here

NAN_IN_VALID = "settings.update(valid=(inputs.masked_fill(inputs == inputs[3, 2], float('nan')), target), metrics=[])"
WITHOUT_DIRECTION = "settings.update(metrics=[lambda output, target: (output.argmax(1) == target).float()])"
UNUSABLE = """
class Broken:
    lower_is_better = False
    def update(self, output, target):
        raise ValueError("boom")
    def compute(self):
        return 0.0
    def reset(self):
        pass
settings.update(metrics=[Broken()])
"""


RISING_AND_FALLING = """
class Falling:
    lower_is_better = False
    values = [3, 2, 1, 1, 1, 1]
    def update(self, output, target):
        pass
    def compute(self):
        return self.values.pop(0)
    def reset(self):
        pass
    def __deepcopy__(self, memo):
        return self
settings.update(metrics=[Falling()])
"""


def trained(changes: str, *options: str) -> Outcome:
    """The job with these changes, trained."""
    job_file(changes)
    return stoker_here("train", "blobs.py", "--plan", plan_file(), "--json", *options)


def warnings_of(outcome: Outcome) -> list[str]:
    """What a run warned of."""
    return [event["message"] for event in outcome.of("warned")]


def test_a_loss_on_valid_that_is_never_a_number_keeps_the_last_weights_and_says_so() -> None:
    """The first evaluation's, of a model that has hardly learned, would be kept otherwise."""
    outcome = trained(NAN_IN_VALID, "--run-dir", "best")
    assert [event["best"] for event in outcome.of("evaluated") if event["split"] == "valid"][-1]
    assert sum("loss on valid is not a number" in message for message in warnings_of(outcome)) == 1
    trained(f"{NAN_IN_VALID}; settings.update(evaluation=stoker.Evaluation(select='last'))", "--run-dir", "last")
    best, last = (load_file(next(Path(name).rglob("model.safetensors"))) for name in ("best", "last"))
    assert all(best[name].equal(last[name]) for name in last)


@pytest.mark.parametrize(
    ("more", "is_said"),
    [
        ("", True),
        ("; settings.update(evaluation=stoker.Evaluation(select='loss'))", False),
        ("; settings.update(valid=None)", False),
    ],
)
def test_a_metric_whose_direction_is_not_known_does_not_choose_weights_in_silence(more: str, *, is_said: bool) -> None:
    """The loss does; a user who gave the metric first may think that it does."""
    said = warnings_of(trained(WITHOUT_DIRECTION + more))
    assert any("not known whether more is better of <lambda>" in message for message in said) is is_said


def test_a_metric_with_a_state_that_says_its_direction_chooses_the_weights() -> None:
    """By `lower_is_better`, as a function does, without torchmetrics' `higher_is_better`."""
    outcome = trained(RISING_AND_FALLING)
    evaluated = [event for event in outcome.of("evaluated") if event["split"] == "valid"]
    assert [event["best"] for event in evaluated] == [True, False, False]
    assert not [message for message in warnings_of(outcome) if "not known" in message]


def test_a_metric_with_a_state_that_fails_does_so_before_the_first_update() -> None:
    """Not after the first epoch."""
    outcome = trained(UNUSABLE)
    assert outcome.code == 2
    assert "evaluating valid=…: metric Broken raised ValueError: boom" in outcome.err
    assert not outcome.of("progress")


@pytest.mark.parametrize(("chosen", "is_said"), [("list(p)[:2]", True), ("p", False)])
def test_parameters_that_the_optimiser_was_not_given_are_named(chosen: str, *, is_said: bool) -> None:
    """They have gradients and never move, which no loss shows."""
    said = warnings_of(trained(f"settings.update(optimizer=lambda p: torch.optim.SGD({chosen}, lr=0.1))"))
    assert any("does not have 2.weight and 1 more" in message for message in said) is is_said
