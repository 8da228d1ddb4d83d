"""The order of allocations over several updates."""

from __future__ import annotations

from stoker.planning.model.memory import timeline_of
from stoker.planning.model.workspaces import cublas_workspace_bytes
from tests.planning.memory.traces import NOTHING, operation, shaped, storage, trace_of


def test_an_update_ends_as_it_began() -> None:
    """What the update leaves over is freed after it, what it used up comes again; so updates can follow each other."""
    parameter, batch = storage(100, -1, None, "parameter"), storage(10, -1, 1, "input")
    loss, hidden = storage(4, 0, None), storage(50, 0, 1)
    timeline = timeline_of(trace_of([parameter, batch, loss, hidden]))
    assert timeline.before == (0, 1)
    assert timeline.later == (3, 4, -2, -4, -3, 2)
    assert timeline.first == timeline.later
    assert timeline.persisting == (0, 1)
    assert timeline.occurrences == (0, 0, 1, 1, 2, 2)


def test_the_optimisers_state_is_made_in_the_first_update() -> None:
    """It lives before a traced update, but a run makes it where its first optimiser phase begins."""
    parameter, state = storage(100, -1, None, "parameter"), storage(200, -1, None, "optimizer state")
    activation, step = storage(50, 0, 1), storage(20, 2, 2, "temporary")
    timeline = timeline_of(trace_of([parameter, state, activation, step], phases=["forward", "backward", "optimizer"]))
    assert timeline.before == (0,)
    assert timeline.first == (3, -3, 2, 4, -4)
    assert timeline.later == (3, -3, 4, -4)
    assert timeline.persisting == (0, 1)


def test_hidden_memory_lives_between_the_births_and_deaths_of_its_operation() -> None:
    """A convolution's copies are held together with its output, and with the input that is freed then."""
    shapes = [shaped(8, 64, 32, 32), shaped(128, 64, 3, 3)]
    convolution = operation("convolution", shapes, [shaped(8, 128, 32, 32)], stride=[1, 1])
    trace = trace_of([storage(10, -1, 0, "input"), storage(20, 0, 1)], operations=[convolution, NOTHING], target="cpu")
    timeline = timeline_of(trace)
    assert timeline.sizes == (10, 20, 4_194_304)
    assert timeline.later[:4] == (2, 3, -3, -1)


def test_temporaries_of_an_operation_follow_each_other() -> None:
    """The one of the input's gradient is freed before that of the weight's is made."""
    grad, x, weight = shaped(8, 128, 32, 32), shaped(8, 64, 32, 32), shaped(128, 64, 3, 3)
    back = operation("convolution_backward", [grad, x, weight], [x, weight], output_mask=[True, True])
    timeline = timeline_of(trace_of([storage(10, 0, 1)], operations=[back, NOTHING]))
    assert timeline.sizes == (10, 6_586_368, 6_881_280)
    assert timeline.later == (1, 2, -2, 3, -3, -1)


def test_cublas_takes_its_workspace_at_the_first_product_for_good() -> None:
    """Before the product's own output; once more in the backward pass, which is autograd's thread. None on a CPU."""
    product = operation("mm", [shaped(4, 4), shaped(4, 4)], [shaped(4, 4)])
    made = {"operations": [NOTHING, product, product], "storages": [storage(64, 0, 2), storage(64, 1, 2)]}
    timeline = timeline_of(trace_of(**made, capability="9.0"))
    assert timeline.sizes[2:] == (cublas_workspace_bytes("9.0"),)
    assert timeline.first == (1, 3, 2, -1, -2)
    assert timeline.later == (1, 2, -1, -2)
    assert timeline.persisting == (2,)
    assert timeline_of(trace_of(**made, target="cpu")).sizes == (64, 64)
    back = timeline_of(trace_of(**made, capability="9.0", phases=["forward", "forward", "backward"]))
    assert back.sizes[2:] == 2 * (cublas_workspace_bytes("9.0"),)


def test_the_whole_batch_counts_where_more_micro_batches_are_cut_from_it_than_were_traced() -> None:
    """Of eight micro-batches two are traced: the batch there before the update is four times as large, nothing else."""
    trace = trace_of([storage(200, -1, None, "input"), storage(100, 0, 0, "input"), storage(50, 0, 0)], parts=2)
    assert timeline_of(trace, micro_batches=8).sizes == (800, 100, 50)
    assert timeline_of(trace).sizes == (200, 100, 50)
