from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.records import Coupling

BATCHES = st.integers(1, 700)


def coupling(kind: str, group: int | None) -> Coupling:
    """A coupling through something."""
    return Coupling(kind=kind, group=group, causes=() if group is None else ("5 BatchNorm2d",), evidence="probed")


@st.composite
def couplings(draw: st.DrawFn) -> tuple[Coupling, int]:
    """A coupling and a batch that holds at least one of its groups."""
    batch = draw(BATCHES)
    kind = draw(st.sampled_from(["separable", "batch_norm", "whole_group"]))
    return coupling(kind, None if kind == "separable" else draw(st.integers(1, batch))), batch


@given(couplings())
def test_every_listed_micro_batch_is_legal(pair: tuple[Coupling, int]) -> None:
    """The planner chooses from this list alone, so nothing on it may change what is learned."""
    found, batch = pair
    sizes = found.legal_micro_batches(batch)
    assert sizes
    assert list(sizes) == sorted(set(sizes), reverse=True)
    assert [found.problem_with(size, batch) for size in sizes] == [None] * len(sizes)


@given(couplings(), st.integers(-1, 720))
def test_a_legal_micro_batch_never_cuts_a_group(pair: tuple[Coupling, int], size: int) -> None:
    """Cutting a batch into legal micro-batches leaves every group of samples whole, the ragged last one too."""
    found, batch = pair
    if found.problem_with(size, batch) is not None:
        return
    assert 1 <= size <= batch
    if found.group is None:
        return
    borders = set(range(0, batch, size))
    assert borders <= set(range(0, batch, found.group))
    if found.kind == "whole_group":
        assert size == found.group


@given(BATCHES)
def test_separable_samples_allow_any_micro_batch(batch: int) -> None:
    """1 to the batch; halvings of it are what is tried."""
    free = coupling("separable", None)
    assert all(free.problem_with(size, batch) is None for size in range(1, batch + 1))
    assert free.legal_micro_batches(batch)[0] == batch
    assert free.legal_micro_batches(batch)[-1] == 1


@given(couplings())
def test_the_whole_batch_and_one_group_are_on_offer(pair: tuple[Coupling, int]) -> None:
    """The smallest legal size is listed, so that DoesNotFit is said only when nothing fits."""
    found, batch = pair
    sizes = found.legal_micro_batches(batch)
    assert sizes[-1] == (found.group or 1)
    assert sizes[0] == (batch if found.kind != "whole_group" else found.group)


def test_a_group_that_does_not_divide_the_batch() -> None:
    """Of 100 samples in groups of 30, micro-batches are 100, 90, 60 or 30: the last group has 10."""
    found = coupling("batch_norm", 30)
    legal = [size for size in range(1, 101) if found.problem_with(size, 100) is None]
    assert legal == [30, 60, 90, 100]
    assert found.legal_micro_batches(100) == (100, 30)
    assert coupling("batch_norm", 60).legal_micro_batches(500) == (500, 240, 120, 60)


def test_a_group_larger_than_the_batch_leaves_nothing() -> None:
    """No size is offered that would then be refused."""
    assert coupling("whole_group", 64).legal_micro_batches(32) == ()


def test_the_reason_has_the_numbers() -> None:
    """What is refused says which sizes would do."""
    reason = coupling("batch_norm", 64).problem_with(100, 512)
    assert reason == "samples are coupled in groups of 64: a micro-batch is a whole number of groups, not 100 samples"
    assert "exactly one group" in str(coupling("whole_group", 64).problem_with(128, 512))
    assert coupling("separable", None).problem_with(600, 512) == "a micro-batch has 1 to 512 samples, not 600"


@pytest.mark.parametrize(("kind", "group"), [("separable", 4), ("batch_norm", None), ("whole_group", 0)])
def test_kind_and_group_must_go_together(kind: str, group: int | None) -> None:
    """Coupled samples without a group, or a group without coupling, are our own bug."""
    with pytest.raises(ValueError, match=f"group={group}"):
        coupling(kind, group)
