import torch

from stoker.profiling.tracing.session import trace_step
from tests.profiling.tracing.jobs import peak_of, settings, sizes_of


def _trace(step, *tensors):
    return trace_step(lambda batch: step(*batch), tensors, settings("cuda"))


def test_storages_die_when_the_last_reference_goes():
    """Births and deaths follow Python's references and views, in the order of real execution."""

    def step(a):
        b = a + 1
        view = b[:2]
        del b
        c = view * 2
        del view
        return c.sum()

    trace = _trace(step, torch.ones(4, 8))
    assert sizes_of(trace)[:4] == [128, 64, -128, 4]
    assert peak_of(sizes_of(trace)) == 192


def test_storage_that_is_resized_dies_and_is_born_again():
    """Sharded parameters are freed and brought back by resizing their storage."""

    def step(a):
        b = a + 1
        b.untyped_storage().resize_(0)
        c = a * 2
        b.untyped_storage().resize_(b.numel() * 4)
        return c

    assert sizes_of(_trace(step, torch.ones(4, 8)))[:4] == [128, -128, 128, 128]


def test_cache_that_is_kept_between_updates_is_a_buffer():
    """What a step makes once and keeps was born before the second update."""
    kept = {}

    def step(a):
        if "cache" not in kept:
            kept["cache"] = a + 1
        return a * kept["cache"]

    trace = _trace(step, torch.ones(4, 8))
    assert [(s.category, s.died) for s in trace.storages if s.born < 0] == [("input", None), ("buffer", None)]
    assert kept == {}
