"""Traces of one process of a layout: whose operations and storages they are, and what is left of them."""

from __future__ import annotations

import dataclasses
import math

import pytest

from stoker.layouts import shards, stages, tensor
from stoker.layouts.local_state import local_bytes
from stoker.layouts.replicas import with_buckets
from stoker.layouts.stages import boundary_bytes, of_blocks
from stoker.layouts.tensor import tensor_sums
from stoker.layouts.trace_division import PRODUCTS
from stoker.planning.model.memory import live_peak, timeline_of
from stoker.profiling.job_profile import model_parts
from stoker.records import Layout, Trace, TraceSettings
from stoker.stepping.layouts import divided_parts
from stoker.zoo import GPT
from tests.planning.spreading import PARTS, messages, trace
from tests.profiling.tracing.jobs import TOKENS, VOCAB, traced

WHOLE = PARTS.trained_bytes


def kept(found: Trace, category: str) -> int:
    """Bytes of all storages of a category."""
    return sum(one.num_bytes for one in found.storages if one.category == category)


def peak(found: Trace) -> int:
    """The most that lives at once [bytes]."""
    return live_peak(timeline_of(found), lambda size: size)[0]


def flops(found: Trace, phase: str) -> int:
    """Of a phase."""
    return sum(found.operations[one.operation].flops for one in found.occurrences if one.phase == phase)


def test_gradients_in_buckets_are_there_all_the_time() -> None:
    """At the end of the forward pass, where none were yet; at the end of the update as many as before."""
    plain, bucketed = trace(), with_buckets(trace())
    assert kept(bucketed, "gradient") == WHOLE
    before = sum(timeline_of(bucketed).sizes[index] for index in timeline_of(bucketed).persisting)
    assert before == WHOLE + sum(timeline_of(plain).sizes[index] for index in timeline_of(plain).persisting)
    assert peak(plain) < peak(bucketed) <= peak(plain) + WHOLE
    assert sorted(abs(event) for event in bucketed.events if event > 0) == sorted(range(1, len(bucketed.storages) + 1))


def test_shards_keep_their_part_and_move_that() -> None:
    """Activations are as before; parameters, gradients and moments are halves, padded; the optimiser does half."""
    found = shards.AXIS.trace_of(trace(), PARTS, Layout(shards=2), 0)
    assert kept(found, "activation") == kept(trace(), "activation")
    assert kept(found, "parameter") == kept(found, "gradient") == WHOLE // 2 + 16
    step = found.operations[found.occurrences[-1].operation]
    assert step.bytes_read == 4 * WHOLE // 2
    assert [one.shape for one in step.inputs][-1] == (3, 8)


def test_gradients_are_whole_while_parameters_stay_gathered() -> None:
    """Of several passes, unless each of them lets go."""
    several = trace(TraceSettings(target="cpu", capability="", micro_batch=4, parts=2))
    assert kept(shards.AXIS.trace_of(several, PARTS, Layout(shards=2, reshard=False), 0), "gradient") == WHOLE
    assert kept(shards.AXIS.trace_of(several, PARTS, Layout(shards=2), 0), "gradient") < WHOLE


def test_a_tensor_group_divides_the_products_of_its_layers() -> None:
    """Forward and backward FLOPs of the blocks are halved, those of table and head are not."""
    plain, found = trace(), tensor.AXIS.trace_of(trace(), PARTS, Layout(tensor=2), 0)
    outside = 2 * 4 * (10 * 8 + 5 * 8)
    for phase, times in (("forward", 1), ("backward", 2)):
        assert flops(found, phase) == times * outside + (flops(plain, phase) - times * outside) // 2
    by_name = {found.modules[one.module]: found.operations[one.operation] for one in found.occurrences[:6]}
    assert [one.shape for one in by_name["blocks.0.up"].outputs] == [(4, 8)]
    assert [one.shape for one in by_name["blocks.0.down"].inputs] == [(4, 8), (8, 8)]
    assert [one.shape for one in by_name["blocks.0.down"].outputs] == [(4, 8)]
    # Of what lives until the backward pass only the outputs of layers divided by columns shrink: two of [4, 16].
    assert kept(plain, "activation") - kept(found, "activation") == 2 * 4 * 4 * 8


def test_a_tensor_group_sums_outputs_forward_and_inputs_gradients_backward() -> None:
    """One of each for a block: [4, 8] both."""
    assert tensor_sums(trace(), PARTS) == ((128, 128), (128, 128))


@pytest.mark.slow
def test_a_checkpointed_block_sums_again_what_it_computes_again() -> None:
    """Of both sums of a block, attention's outputs come twice: recomputation ends before the last product."""
    model = GPT(3, 32, 4, TOKENS, VOCAB)
    parts = divided_parts(model_parts(model), model, Layout(tensor=2))
    plain, saving = (traced("gpt", "cuda", precision="bf16", checkpointed_blocks=blocks) for blocks in (0, 3))
    once, twice = (tensor_sums(one, parts) for one in (plain, saving))
    assert len(twice[0]) == len(once[0]) + len(parts.blocks)
    assert once[1] == twice[1]
    divided = tensor.AXIS.trace_of(saving, parts, Layout(tensor=2), 0)
    again = [
        (saving.operations[before.operation], divided.operations[after.operation])
        for before, after in zip(saving.occurrences, divided.occurrences, strict=True)
        if before.phase == "backward"
        and saving.modules[before.module].endswith("attention.out")
        and (before.module, before.operation) in tensor._forward_operations(saving)
        and saving.operations[before.operation].name in PRODUCTS
    ]
    assert len(again) == len(parts.blocks)
    assert all(after.outputs == before.outputs and after.flops == before.flops // 2 for before, after in again)


def test_stages_share_the_operations_and_their_memory() -> None:
    """Each occurrence is on one stage; births and deaths are still in order."""
    plain = trace()
    both = [of_blocks(plain, PARTS, (1,), stage, 2) for stage in (0, 1)]
    names = [{one.modules[o.module] for o in one.occurrences if o.phase != "optimizer"} for one in both]
    assert names == [{"table", "blocks.0.up", "blocks.0.down"}, {"blocks.1.up", "blocks.1.down", "head"}]
    assert sum(flops(one, "forward") for one in both) == flops(plain, "forward")
    assert sum(kept(one, "activation") for one in both) == kept(plain, "activation")
    for one in both:
        for storage in one.storages:
            assert storage.born <= (storage.died if storage.died is not None else len(one.occurrences))
            assert storage.born < len(one.occurrences)
        assert sorted(map(abs, one.events)) == sorted(
            [*range(1, len(one.storages) + 1), *(i + 1 for i, s in enumerate(one.storages) if s.died is not None)]
        )
    step = [one.operations[one.occurrences[-1].operation].bytes_read for one in both]
    assert math.isclose(sum(step), 4 * WHOLE, rel_tol=0.01)


def test_a_stage_hands_on_what_the_next_ones_first_layer_reads() -> None:
    """Four rows of eight."""
    assert boundary_bytes(trace(), PARTS) == 4 * 4 * 8


def test_a_divided_stage_holds_and_computes_its_part_of_its_blocks() -> None:
    """Of two stages with tensor groups of two: half of one block's matrices and products, and of its messages."""
    layout = Layout(stages=2, tensor=2)
    sums, handed_on = messages(layout, passes=4)[::-1]
    assert sums.sizes == (128, 128)  # of two blocks that is two of each
    assert sums.times == 4 + 1  # the turn in which a stage waits has messages too
    assert handed_on.sizes == (4 * 4 * 8,)
    in_parts = messages(dataclasses.replace(layout, sequence=True), passes=4)
    assert next(one for one in in_parts if one.axis == "stages").sizes == (4 * 4 * 4,)
    first, last = (stages.AXIS.held(PARTS, layout, rank) for rank in (1, 3))
    matrices = 4 * 2 * 16 * 8
    held = [sum(local_bytes(one, layout) for one in each.parameters) for each in (first, last)]
    assert held == [4 * 10 * 8 + matrices // 2, 4 * 5 * 8 + matrices // 2]
    of_stage = stages.AXIS.trace_of(trace(), PARTS, layout, 3)
    divided = tensor.AXIS.trace_of(of_stage, last, layout, 3)
    head = 2 * 4 * 5 * 8
    assert flops(divided, "forward") - head == (flops(of_stage, "forward") - head) // 2
