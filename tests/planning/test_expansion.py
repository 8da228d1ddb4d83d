from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import stoker
from stoker.loading.dataset_adapters import as_samples
from stoker.loading.datasets import Datasets
from stoker.planning.model.caching_allocator import rounded
from stoker.planning.model.memory import gradients_between, kept_by_blocks
from stoker.planning.model.run_forecast import Needs
from stoker.planning.model.trace_extrapolation import derived, expanded
from stoker.profiling.tracing.repetition import trace_with_repetition
from stoker.profiling.tracing.update import trace_update
from stoker.records import Coupling, Occurrence, Operation, Repetition, Segment, Storage, Trace, TraceSettings
from stoker.records.trace import NotPeriodic
from stoker.zoo import GPT, Llama

V, T = 17, 10
SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="")


def gpt(layers: int = 6) -> nn.Module:
    """A decoder with biases and learned positions."""
    return GPT(layers=layers, width=24, heads=3, context=T, vocab=V)


def llama(layers: int = 6) -> nn.Module:
    """A decoder with rotary positions, of which every block is given the angles."""
    return Llama(layers=layers, width=32, heads=4, kv_heads=2, hidden=48, vocab=V, context=T)


def job_with(model, **settings) -> stoker.Job:
    """A job over a few tokens."""
    tokens = torch.zeros(8, T, dtype=torch.int64)
    chosen = {"optimizer": stoker.AdamW(lr=1e-3), "clip_norm": 1.0} | settings
    return stoker.Job(
        model=model, data=(tokens, tokens), loss="token_cross_entropy", batch=4, until=stoker.epochs(1), **chosen
    )


def traces(job: stoker.Job, **settings) -> tuple[Trace, Trace]:
    """The job's update traced whole, and with repeated blocks traced once."""
    data = Datasets(train=as_samples(job.data, what="data"), held_out={}, test=None)
    chosen = TraceSettings(**({"target": "cpu", "capability": "", "micro_batch": 2} | settings))
    return trace_update(job, data, SEPARABLE, chosen), trace_with_repetition(job, data, SEPARABLE, chosen)


def comparable(trace: Trace) -> Trace:
    """Without what only a shortened trace says, nor the numbers that names happen to have."""
    occurrences = tuple(
        dataclasses.replace(
            one,
            operation=repr(trace.operations[one.operation]),
            module=trace.modules[one.module],
            source=trace.sources[one.source],
        )
        for one in trace.occurrences
    )
    storages = tuple(dataclasses.replace(storage, block=None) for storage in trace.storages)
    return dataclasses.replace(
        trace, occurrences=occurrences, storages=storages, operations=(), modules=(), sources=(), took_s=0.0
    )


CUDA = {"target": "cuda", "capability": "9.0"}
GROUPS = {"*norm*": {"weight_decay": 0.0}}
MOMENTUM = stoker.SGD(lr=1e-3, momentum=0.9)


@pytest.mark.parametrize(
    ("model", "job", "settings"),
    [
        pytest.param(gpt, {}, {}, id="gpt: an optimiser that goes from parameter to parameter"),
        pytest.param(
            gpt,
            {"optimizer": MOMENTUM},
            {"precision": "bf16", "checkpointed_blocks": 6, "parts": 2},
            id="gpt: accumulated bf16",
        ),
        pytest.param(gpt, {"average": 0.9}, {"optimizer_implementation": "fused"}, id="gpt: fused, averaged"),
        pytest.param(
            gpt,
            {"optimizer": stoker.AdamW(lr=1e-3, groups=GROUPS)},
            CUDA,
            id="gpt: lists in two groups",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            gpt,
            {"optimizer": MOMENTUM},
            CUDA,
            id="gpt: lists, SGD",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            llama,
            {},
            CUDA | {"precision": "bf16", "checkpointed_blocks": 6},
            id="llama: flash, checkpointed",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: gpt(12), {}, {"checkpointed_blocks": 6}, id="gpt: half of it checkpointed", marks=pytest.mark.slow
        ),
    ],
)
def test_an_expanded_trace_equals_the_one_of_the_whole_model(model, job, settings):
    """Operations, modules and lines in their order, and every birth and death of every storage."""
    whole, short = traces(job_with(model, **job), **settings)
    assert short.repetition is not None
    assert len(short.occurrences) < len(whole.occurrences)
    assert comparable(expanded(short)) == comparable(whole)
    assert expanded(short).flops == whole.flops


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, CUDA | {"precision": "bf16", "checkpointed_blocks": 6, "parts": 2}])
def test_another_micro_batch_is_the_same_derived_before_or_after(settings):
    """Once for all micro-batches the blocks left out are put in, and sizes derived from the whole model's."""
    small, large = (traces(job_with(gpt), micro_batch=size, **settings)[1] for size in (2, 3))
    before, after = expanded(derived(small, large, 7)), derived(expanded(small), expanded(large), 7)
    assert small.repetition is not None
    assert after == before


def test_a_trace_of_a_whole_model_stays_as_it_is():
    """Where nothing was left out there is nothing to put in."""
    whole, short = traces(job_with(lambda: gpt(layers=5), optimizer=MOMENTUM))
    assert short.repetition is None
    assert expanded(whole) is whole


@pytest.mark.slow
def test_blocks_that_differ_are_not_expanded():
    """A trace whose second and third block do not do the same is refused, not guessed at."""
    _, short = traces(job_with(gpt))
    segment = next(s for s in short.repetition.segments if s.block == 2)
    occurrences = list(short.occurrences)
    occurrences[segment.start] = dataclasses.replace(occurrences[segment.start], operation=0)
    with pytest.raises(NotPeriodic, match="blocks 1 and 2 differ"):
        expanded(dataclasses.replace(short, occurrences=tuple(occurrences)))


def tower(died: Sequence[int | None], occurrences: int) -> Trace:
    """Blocks, each of which makes 16 bytes, there and back, and what comes after; when each block's bytes are freed."""
    traced = len(died)
    there = [*range(traced), *reversed(range(traced))]
    work = Operation(name="relu", inputs=(), outputs=(), flops=0, bytes_read=0, bytes_written=0)
    deaths = sorted((at, block) for block, at in enumerate(died) if at is not None)
    return Trace(
        settings=TraceSettings(target="cpu", capability="", micro_batch=1),
        operations=(work,),
        occurrences=tuple(
            Occurrence(operation=0, phase="forward", part=0, module=0, source=0) for _ in range(occurrences)
        ),
        storages=tuple(
            Storage(num_bytes=16, category="temporary", born=block, died=at) for block, at in enumerate(died)
        ),
        events=(*range(1, traced + 1), *(-block - 1 for _, block in deaths)),
        modules=("",),
        sources=("",),
        repetition=Repetition(
            module="",
            num_blocks=traced + 2,
            traced=traced,
            copies=((traced // 2 - 1, 2),),
            segments=tuple(Segment(block=block, start=at, stop=at + 1) for at, block in enumerate(there)),
        ),
    )


def test_what_is_freed_after_all_blocks_is_freed_of_all():
    """The blocks put back have made as much, and it lives as long."""
    whole = expanded(tower([8, 8, 8, 8], occurrences=9))
    assert [(one.born, one.died) for one in whole.storages] == [(block, 12) for block in range(6)]
    assert whole.events == (1, 2, 3, 4, 5, 6, -1, -2, -3, -4, -5, -6)


def test_the_last_block_may_hand_on_to_the_first():
    """A sum begun by the last block but one and freed by the first is that block's, however many lie between."""
    whole = expanded(tower([11, 10, 9, 8, 11, 6], occurrences=12))
    assert [(one.born, one.died) for one in whole.storages] == [
        (0, 15),
        (1, 14),
        (2, 13),
        (3, 12),
        (4, 11),
        (5, 10),
        (6, 15),
        (7, 8),
    ]


def test_the_first_block_may_do_more_before_what_the_second_frees():
    """Each block frees what the one before it made, wherever among other things that was made in the first."""
    work = Operation(name="relu", inputs=(), outputs=(), flops=0, bytes_read=0, bytes_written=0)
    blocks = (0, 0, 1, 2, 3)
    made = [Storage(num_bytes=8, category="temporary", born=0, died=1, block=0)]
    made += [
        Storage(num_bytes=16, category="temporary", born=at, died=at + 1 if at < 4 else None, block=block)
        for at, block in enumerate(blocks)
        if at > 0
    ]
    short = Trace(
        settings=TraceSettings(target="cpu", capability="", micro_batch=1),
        operations=(work,),
        occurrences=tuple(Occurrence(operation=0, phase="forward", part=0, module=block, source=0) for block in blocks),
        storages=tuple(made),
        events=(1, 2, -1, 3, -2, 4, -3, 5, -4),
        modules=tuple(f"blocks.{number}" for number in range(4)),
        sources=("",),
        repetition=Repetition(
            module="blocks",
            num_blocks=6,
            traced=4,
            copies=((1, 2),),
            segments=tuple(Segment(block=b, start=b + 1 if b else 0, stop=b + 2) for b in range(4)),
        ),
    )
    whole = expanded(short)
    assert [whole.modules[one.module] for one in whole.occurrences] == [f"blocks.{b}" for b in (0, 0, 1, 2, 3, 4, 5)]
    assert whole.events == (1, 2, -1, 3, -2, 4, -3, 5, -4, 6, -5, 7, -6)
    assert [(one.born, one.died) for one in whole.storages[1:]] == [
        (at, at + 1 if at < 6 else None) for at in range(1, 7)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("model", [gpt, llama])
def test_what_blocks_keep_is_told_from_a_trace_that_checkpoints_them(model, precision, parts) -> None:
    """Never more than they keep until the backward pass, and most of it; of a model on a GPU.

    So is what they keep where all are checkpointed selectively.
    """
    job = job_with(model)
    data = Datasets(train=as_samples(job.data, what="data"), held_out={}, test=None)
    saving, plain, selective = (
        expanded(
            trace_with_repetition(
                job,
                data,
                SEPARABLE,
                TraceSettings(**CUDA, micro_batch=2, precision=precision, parts=parts, **changed),
            )
        )
        for changed in (
            {"checkpointed_blocks": 6},
            {},
            {"checkpointed_blocks": 6, "checkpointing": "selective"},
        )
    )
    kept = sum(
        rounded(one.num_bytes)
        for one in plain.storages
        if one.category == "activation" and one.block is not None and plain.occurrences[one.born].part == 0
    )
    assert 0.5 * kept < kept_by_blocks(saving) <= kept
    assert kept_by_blocks(plain) == 0
    gradients = sum(rounded(one.num_bytes) for one in plain.storages if one.category == "parameter")
    assert gradients_between(saving) == (gradients if parts == 2 else 0)
    needs = Needs({trace.settings: trace for trace in (saving, plain, selective)}.__getitem__)
    needs.live_bytes(saving.settings, parts)
    for trace, is_compiled in itertools.product((plain, selective), (False, True)):
        least = needs.least_live_bytes(trace.settings, parts, 6, is_compiled=is_compiled)
        live = needs.live_bytes(trace.settings, parts, is_compiled=is_compiled)
        assert 0.5 * live < least <= live
    assert 0 < kept_by_blocks(saving, "products") <= kept_by_blocks(saving, "fused") < kept_by_blocks(saving)
