"""Whether contenders did the same work, by their first losses."""

from __future__ import annotations

from bench.train.agreement import disagreements


def test_who_starts_from_other_weights_is_found() -> None:
    """Another first loss is another model or batch."""
    losses = {"plain": [2.0, 1.9, 1.8], "same": [2.00001, 1.90001, 9.0], "other": [2.1, 1.9, 1.8]}
    assert set(disagreements(losses, "plain", {"plain", "same", "other"})) == {"other"}


def test_who_makes_another_update_is_found() -> None:
    """The first loss is the same, the second shows the optimiser."""
    losses = {"plain": [2.0, 1.9], "other": [2.0, 1.89]}
    assert set(disagreements(losses, "plain", {"plain", "other"})) == {"other"}


def test_the_same_update_in_another_form_may_differ_a_little() -> None:
    """Keras's epsilon stands elsewhere, which shows after an update; its first loss is everybody's."""
    losses = {"plain": [2.0, 1.9], "keras": [2.0, 1.9001], "wrong": [2.0, 1.89], "elsewhere": [2.0001, 1.9]}
    fp32 = set(losses)
    assert set(disagreements(losses, "plain", fp32, fp32)) == {"wrong", "elsewhere"}


def test_bf16_may_lose_thousandths() -> None:
    """What autocast rounds is no other work; what it cannot round away is."""
    losses = {"plain": [2.0, 1.9], "bf16": [2.004, 1.91], "wrong": [2.1, 1.9]}
    assert set(disagreements(losses, "plain", {"plain"})) == {"wrong"}


def test_a_loss_that_is_no_number_is_a_disagreement() -> None:
    """NaN is no small difference."""
    assert "broken" in disagreements({"plain": [2.0, 1.9], "broken": [2.0, float("nan")]}, "plain", {"plain"})
