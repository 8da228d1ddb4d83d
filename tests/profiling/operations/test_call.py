from __future__ import annotations

import torch

from stoker.profiling.benchmark_calls import Call, OperandPool, prepare_call

_ATEN = torch.ops.aten


def test_operands_are_cut_ever_further_on() -> None:
    """Two operands of half the pool do not overlap: the second is not in the cache because of the first."""
    pool = OperandPool("cpu", 4096)
    first, second = pool.random(256), pool.random(256)
    assert first.data_ptr() != second.data_ptr()
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_layouts_are_as_asked_for() -> None:
    """Transposed, channels-last, and of a narrow dtype."""
    pool = OperandPool("cpu", 2**16)
    assert pool.random(3, 5, transposed=True).stride() == (1, 3)
    images = pool.random(2, 8, 4, 4, channels_last=True)
    assert images.shape == (2, 8, 4, 4)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert pool.random(7, dtype=torch.bfloat16).dtype is torch.bfloat16
    assert int(pool.indices(50, below=3).max()) == 2


def test_what_does_not_fit_gets_memory_of_its_own() -> None:
    """A tensor larger than the pool is there all the same."""
    assert OperandPool("cpu", 64).random(1000).shape == (1000,)


def test_what_calls_write_to_is_not_what_others_read() -> None:
    """Zeros written by one call never become the operands of another."""
    pool = OperandPool("cpu", 4096)
    before = pool.random(512).clone()
    caller, _, _ = prepare_call(Call(_ATEN.zero_.default, lambda pool: ((pool.scratch(512),), {})), pool)
    for _ in range(10):
        caller()
    assert torch.equal(pool.random(512).sort().values, before.sort().values)


def test_a_call_takes_turns_among_operands() -> None:
    """Four sets at most, one after the other, and fewer where the pool holds fewer."""
    pool = OperandPool("cpu", 4096)
    seen: list[int] = []

    def arguments(pool: OperandPool):
        return (pool.random(64),), {}

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.data_ptr())
        return x

    caller, _, _ = prepare_call(Call(note, arguments), pool)  # type: ignore[arg-type]
    for _ in range(8):
        caller()
    assert len(set(seen)) == 4
    assert seen[1:5] == seen[5:9]
    small, _, _ = prepare_call(Call(note, lambda pool: ((pool.random(1024),), {})), pool)  # type: ignore[arg-type]
    assert len(small.sets) == 1


def test_results_are_kept_only_during_a_turn() -> None:
    """Afterwards their memory is free again."""
    pool = OperandPool("cpu", 4096)
    caller, _, _ = prepare_call(Call(_ATEN.relu.default, lambda pool: ((pool.random(16),), {})), pool)
    with caller.at_ease():
        caller()
        assert len(caller._kept) == caller.most_kept
    assert len(caller._kept) == 0
