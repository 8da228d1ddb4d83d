"""What parts of samples over several processes cost: messages and memory by a trace, and which layouts there are."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from stoker.layouts.base import DividedUpdate
from stoker.layouts.context import AXIS, attentions, is_worthwhile
from stoker.layouts.local_state import held_parts, local_bytes
from stoker.layouts.rules import JobTraits, layout_problem
from stoker.loading.datasets import datasets_of
from stoker.planning.model.search_space import layouts_of
from stoker.profiling.job_profile import model_parts
from stoker.profiling.tracing.update import trace_update
from stoker.records import Coupling, Layout, Trace
from stoker.records.profile import ModelParts
from stoker.stepping.model import meta_model
from tests.profiling.tracing.jobs import BATCH, SEPARABLE, settings
from tests.stepping.layouts.conformance import few_bits_job
from tests.stepping.models import TOKENS

TWO = Layout(context=2)
WIDTH, KV_WIDTH = 64, 32


@functools.cache
def parts() -> ModelParts:
    """Parameters of two layers with twice as many queries as keys."""
    return model_parts(meta_model(few_bits_job()))


@functools.cache
def traced(checkpointed: int = 0, micro_batch: int = BATCH) -> Trace:
    """An update in one process."""
    job = few_bits_job()
    wanted = settings(checkpointed_blocks=checkpointed, micro_batch=micro_batch)
    return trace_update(job, datasets_of(job), SEPARABLE, wanted)


def update_of(layout: Layout, checkpointed: int = 0) -> dict[str, int]:
    """Bytes of an update's messages along the axis, by collective."""
    trace = traced(checkpointed, 16)
    update = DividedUpdate(
        layout=layout, parts=parts(), held=held_parts(parts(), layout, 0), passes=1, trace=lambda: trace
    )
    return {one.collective: one.num_bytes for one in AXIS.traffic(update) if one.axis == "context"}


@pytest.mark.parametrize(("checkpointed", "again"), [(0, 0), (2, 2)])
def test_each_attention_has_keys_and_values_of_all_tokens(checkpointed: int, again: int) -> None:
    """Of two layers, forward and backward; recomputed layers gather again."""
    rows = BATCH * TOKENS * 4
    one = 2 * KV_WIDTH * rows, WIDTH * rows
    forward, recomputed, backward = attentions(traced(checkpointed))
    if forward[0][0] == 2 * WIDTH * rows:  # a CPU repeats keys for the queries that share them
        one = 2 * WIDTH * rows, WIDTH * rows
    assert forward == (one,) * 2
    assert recomputed == (one,) * again
    assert backward == (one,) * 2


def test_queries_are_exchanged_in_causal_attention_alone() -> None:
    """Attention to all tokens is computed by each process for its own queries."""
    trace = traced()
    operations = tuple(
        dataclasses.replace(one, attributes=tuple((k, False if k == "is_causal" else v) for k, v in one.attributes))
        for one in trace.operations
    )
    forward, _, backward = attentions(dataclasses.replace(trace, operations=operations))
    assert [queries for _, queries in (*forward, *backward)] == [0] * 4
    assert [keys for keys, _ in forward] == [keys for keys, _ in attentions(trace)[0]]


def test_a_part_of_the_tokens_has_its_part_of_the_work_and_the_activations() -> None:
    """Half of the arithmetic; activations are half, and keys and values of all tokens in each of two layers."""
    whole, part = traced(), AXIS.trace_of(traced(), parts(), TWO, 0)
    for phase in ("forward", "backward"):
        flops = [
            sum(trace.operations[one.operation].flops for one in trace.occurrences if one.phase == phase)
            for trace in (whole, part)
        ]
        assert flops[1] == pytest.approx(flops[0] / 2, rel=1e-3)
    forward, _, _ = attentions(whole)
    kept = [one for one in part.storages[len(whole.storages) :] if one.category == "activation"]
    # Without the process's own half, which is in the trace; with a second copy of its half of the results.
    assert sum(one.num_bytes for one in kept) == sum(size / 2 + queries / 2 for size, queries in forward)
    assert all(one.died is not None and one.died > one.born for one in kept)
    activations = [
        sum(
            one.num_bytes
            for one in trace.storages[: len(whole.storages)]
            if one.category == "activation" and one.born >= 0
        )
        for trace in (whole, part)
    ]
    assert activations[1] == pytest.approx(activations[0] / 2, rel=0.05)
    assert max(map(abs, part.events)) == len(part.storages)


def test_recomputed_layers_keep_keys_and_values_of_one_layer_at_a_time() -> None:
    """Those of the first pass are let go of at once."""
    whole = traced(2)
    part = AXIS.trace_of(whole, parts(), TWO, 0)
    kept = [one for one in part.storages[len(whole.storages) :] if one.category == "activation"]
    assert len(kept) == 4
    assert sum(one.died == one.born for one in kept) == 2
    live = sorted((one.born, one.died or 0) for one in kept if one.died != one.born)
    assert live[0][1] < live[1][0]


@pytest.mark.parametrize("layout", [TWO, Layout(context=2, shards=2), Layout(context=4, shards=2)])
def test_the_state_is_sharded_over_all_processes(layout: Layout) -> None:
    """Each has an equal part of every matrix."""
    for one in parts().parameters:
        if one.shape[0] % layout.world_size == 0:
            assert local_bytes(one, layout, 0) == one.num_bytes // layout.world_size


def test_layouts_of_context_have_shards_or_none() -> None:
    """Within a machine; other axes, coupled samples and losses within the model are refused with the reason."""
    found = {layout for layout in layouts_of(8) if layout.context > 1}
    legal = {layout for layout in found if layout_problem(layout, JobTraits()) is None}
    assert {Layout(context=8), Layout(context=4, shards=2), Layout(context=8, reshard=False)} <= legal
    assert all(layout.world_size == layout.shards * layout.context for layout in legal)
    coupled = Coupling(kind="batch_norm", group=8, causes=("a batch norm",), evidence="")
    for layout, traits, says in (
        (dataclasses.replace(TWO, replicas=2), JobTraits(), "with shards alone"),
        (Layout(context=16), JobTraits(), "more than the 8 devices of a node"),
        (TWO, JobTraits(coupling=coupled, batch=8), "coupled by a batch norm"),
        (TWO, JobTraits(has_own_loss=True), "within the model"),
        (TWO, JobTraits(own_measures=("mine",)), "mine may do with tokens what it likes"),
        (TWO, JobTraits(stateful_metrics=("f1",)), "metric f1 compares whole samples"),
        (TWO, JobTraits(skips_blocks=True), "stochastic_depth"),
        (TWO, JobTraits(matrix_optimizer="Muon"), "Muon needs whole matrices"),
    ):
        assert says in (layout_problem(layout, traits) or "")


def test_samples_are_divided_among_shards_alone() -> None:
    """Processes that divide a sample's tokens take the same samples, so that there may be fewer than processes."""
    layout = Layout(shards=2, context=4)
    assert (layout.data_size, layout.sample_parts, layout.num_copies) == (8, 2, 1)
    assert [layout.sample_part(rank) for rank in range(8)] == [0] * 4 + [1] * 4
    assert layout_problem(layout, JobTraits(batch=2, coupling=SEPARABLE)) is None
    assert "at most 1 can" in (layout_problem(layout, JobTraits(batch=1, coupling=SEPARABLE)) or "")
    assert layout.in_words() == "2 shards × 4-way context"
    kept = Layout(context=2, reshard=False), Layout(shards=2, context=2, reshard=False)
    assert [one.in_words() for one in kept] == ["2-way context kept gathered", "2 shards kept gathered × 2-way context"]


@pytest.mark.parametrize(
    ("layout", "count", "after"),
    [
        (TWO, 4, Layout(context=2, shards=2)),
        (Layout(context=2, shards=2), 2, TWO),
        (Layout(context=2, shards=2), 3, None),
    ],
)
def test_another_number_of_processes_divides_samples_into_as_many_parts(
    layout: Layout, count: int, after: Layout | None
) -> None:
    """More processes are shards; a number that parts do not divide cannot go on."""
    assert layout.resized(count) == after


def test_short_samples_are_not_divided_where_others_fit() -> None:
    """Long ones are, and those of batches that have fewer than there are devices."""
    assert is_worthwhile(131_072, 64, 8)
    assert is_worthwhile(4096, 4, 8)
    assert not is_worthwhile(4096, 8, 8)
