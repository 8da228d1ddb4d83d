import dataclasses
import itertools
import resource
from collections import Counter

import pytest
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import SGD, Job, Loss
from stoker.jobs.objective import Objective
from stoker.loading.datasets import datasets_of
from stoker.loading.transforms import RandomFlip, RandomShift
from stoker.planning.model.update_time import counted
from stoker.profiling.tracing.update import UpdateTracer, trace_update, trace_updates
from stoker.records import Trace, dumps, loads
from stoker.units import updates
from stoker.zoo import GPT
from tests.profiling.tracing.jobs import (
    BATCH,
    CLASSES,
    JOBS,
    SEPARABLE,
    make_job,
    peak_of,
    real_sizes,
    settings,
    sizes_of,
    traced,
)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("mlp", {}),
        ("mlp", {"optimizer_implementation": "fused", "parts": 2}),
        ("gpt", {}),
        pytest.param("gpt", {"precision": "bf16", "parts": 2}, marks=pytest.mark.slow),
        ("gpt", {"checkpointed_blocks": 3, "optimizer_implementation": "fused"}),
        pytest.param("gpt", {"checkpointed_blocks": 2, "precision": "bf16"}, marks=pytest.mark.slow),
        ("gpt", {"checkpointed_blocks": 3, "checkpointing": "selective"}),
        ("gpt", {"checkpointed_blocks": 3, "checkpointing": "selective", "precision": "bf16", "parts": 2}),
        ("encoder", {}),
        ("vit", {"optimizer_implementation": "foreach"}),
        ("moe", {}),
        ("gru", {}),
    ],
)
def test_peak_equals_the_allocators_to_the_byte(name, changed, monkeypatch):
    """Without convolutions, the traced peak is the one that the CPU's allocator really reaches in the same update.

    But for the 8 + 4 bytes of a Python number that a kernel turns into a tensor while it runs, if the peak is then, and
    for the state of the random generator that is kept for each checkpointed block.
    """
    if changed.get("precision") == "bf16":  # whose kernels copy matrices where a CPU has units for them
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    difference = peak_of(real_sizes(name, settings(**changed))) - peak_of(sizes_of(traced(name, **changed)))
    states, rest = divmod(difference, torch.get_rng_state().numel())
    assert rest in (0, 12, 16)
    assert states <= changed.get("checkpointed_blocks", 0)


@pytest.mark.parametrize("name", ["cnn", "unet", "gpt", "encoder", "lstm"])
def test_whatever_is_traced_is_really_allocated(name):
    """Every traced allocation and release is one of the allocator's; beyond them it has only what kernels hide."""
    missing = Counter(sizes_of(traced(name)))
    missing.subtract(real_sizes(name, settings()))
    assert {size: count for size, count in missing.items() if count > 0} == {}


def test_two_parts_accumulate_into_gradients_that_are_there():
    """The second micro-batch adds into the gradients of the first, which live on from one to the other."""
    one, two = traced("gpt"), traced("gpt", parts=2)
    assert {occurrence.part for occurrence in two.occurrences} == {0, 1}
    gradients = [[s for s in trace.storages if s.category == "gradient"] for trace in (one, two)]
    assert len(gradients[0]) == len(gradients[1])
    assert two.flops == 2 * one.flops


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_categories_of_what_lives_before_the_update(target):
    """Parameters, optimiser state, averages and buffers are distinguished, each once, with their bytes."""
    trace = traced("cnn", target)
    model = JOBS["cnn"]().model()
    parameters = sum(p.numel() * 4 for p in model.parameters())
    bytes_of = Counter()
    for storage in trace.storages:
        if storage.born < 0:
            bytes_of[storage.category] += storage.num_bytes
    num_steps = 4 * len(list(model.parameters())) if target == "cpu" else 0  # on a GPU counts of steps stay on the host
    num_buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert bytes_of["parameter"] == parameters
    assert bytes_of["optimizer state"] == 2 * parameters + num_steps
    assert bytes_of["average"] == parameters + num_buffers
    assert num_buffers <= bytes_of["buffer"] <= num_buffers + 16  # and kept scalars
    assert sum(s.num_bytes for s in trace.storages if s.category == "gradient") == parameters


def test_what_a_loss_or_a_list_of_the_model_holds_is_in_the_peak():
    """Copies outside of the model's parameters, as of a momentum encoder, were there before the trace and are real."""
    teacher = nn.Linear(64, 8)

    def distilled(model, batch):
        with torch.no_grad():
            for theirs, ours in zip(teacher.parameters(), model[0].parameters(), strict=True):
                theirs.lerp_(ours, 0.1)
            wanted = teacher(batch[0])
        return Loss((model(batch[0]) - wanted).square().sum(), len(batch[0]))

    def job(loss):
        data = torch.randn(16, 64), torch.randn(16, 8)
        return Job(
            model=lambda: nn.Sequential(nn.Linear(64, 8)),
            data=data,
            loss=loss,
            optimizer=SGD(lr=0.1),
            batch=16,
            until=updates(2),
        )

    before = [weight.clone() for weight in teacher.parameters()]
    kept = [
        sum(
            s.num_bytes
            for s in trace_update(of, datasets_of(of), SEPARABLE, settings("cpu", micro_batch=16)).storages
            if s.born < 0
        )
        for of in (job(distilled), job("mse"))
    ]
    assert kept[0] - kept[1] == sum(weight.nbytes for weight in teacher.parameters())
    assert all(torch.equal(weight, was) for weight, was in zip(teacher.parameters(), before, strict=True))


def test_gradients_die_and_activations_outlive_the_forward_pass():
    """Nothing made in an update outlives it but what belongs to the optimiser; activations reach the backward pass."""
    trace = traced("mlp", "cuda")
    backward = next(i for i, one in enumerate(trace.occurrences) if one.phase == "backward")
    for storage in trace.storages:
        if storage.category == "activation":
            assert storage.born < backward <= storage.died
        if storage.category == "gradient":
            assert storage.died is not None
            assert trace.occurrences[storage.born].phase == "backward"
    assert {s.category for s in trace.storages if s.died is None} <= {"parameter", "optimizer state", "buffer", "input"}


def test_events_are_births_and_deaths_in_order():
    """Every storage is born once, dies at most once and after that, and those from before the update come first."""
    trace = traced("gpt", "cuda", parts=2)
    before = [storage for storage in trace.storages if storage.born < 0]
    assert trace.events[: len(before)] == tuple(range(1, len(before) + 1))
    assert sorted(event for event in trace.events if event > 0) == list(range(1, len(trace.storages) + 1))
    dead = [-event for event in trace.events if event < 0]
    assert sorted(dead) == [i + 1 for i, storage in enumerate(trace.storages) if storage.died is not None]
    assert all(trace.events.index(number) < trace.events.index(-number) for number in dead)
    times = [trace.storages[e - 1].born if e > 0 else trace.storages[-e - 1].died for e in trace.events]
    assert all(one <= other for one, other in itertools.pairwise(times))


@pytest.mark.parametrize("checkpointing", [{}, {"checkpointed_blocks": 3, "checkpointing": "selective"}])
def test_backward_operations_belong_to_the_module_and_line_of_their_forward_operation(checkpointing):
    """A backward pass runs no module, but what it does is reported as that of the module it is the backward pass of.

    Lines are the model's, too, where Stoker's checkpointing stands between it and PyTorch.
    """
    trace = traced("gpt", "cuda", precision="bf16", **checkpointing)
    attention = {
        (trace.modules[one.module], trace.sources[one.source], one.phase)
        for one in trace.occurrences
        if "flash_attention" in trace.operations[one.operation].name
    }
    line = next(source for _, source, _ in attention)
    assert line.startswith("stoker/zoo/gpt.py:")
    assert attention == {
        (f"blocks.{block}.attention", line, phase) for block in range(3) for phase in ("forward", "backward")
    }


@pytest.mark.slow
def test_recomputation_is_backward_and_runs_the_same_kernel():
    """A checkpointed block's second forward pass is part of the backward pass, with the same attention kernel.

    Which selective checkpointing leaves out.
    """
    plain, checkpointed, selective = (
        traced("gpt", "cuda", precision="bf16", **changed)
        for changed in ({}, {"checkpointed_blocks": 3}, {"checkpointed_blocks": 3, "checkpointing": "selective"})
    )
    names = [
        Counter(
            (trace.operations[one.operation].name, one.phase)
            for one in trace.occurrences
            if "attention" in trace.operations[one.operation].name
        )
        for trace in (plain, checkpointed, selective)
    ]
    assert names[0]["_scaled_dot_product_flash_attention", "forward"] == 3
    assert names[1] == names[0] + Counter({("_scaled_dot_product_flash_attention", "backward"): 3})
    assert names[2] == names[0]
    activations = [sum(s.num_bytes for s in t.storages if s.category == "activation") for t in (plain, checkpointed)]
    assert activations[1] < activations[0] / 2


@pytest.mark.parametrize(
    ("implementation", "operation"),
    [("default", "_foreach_lerp_"), ("foreach", "_foreach_lerp_"), ("fused", "_fused_adamw_")],
)
def test_optimiser_is_the_one_that_a_gpu_runs(implementation, operation):
    """Fake parameters do not fall back to the for-loop over parameters."""
    trace = traced("mlp", "cuda", optimizer_implementation=implementation)
    names = [trace.operations[one.operation].name for one in trace.occurrences if one.phase == "optimizer"]
    assert names.count(operation) == 1
    assert "addcdiv_" not in names


def test_autocast_casts_weights_on_the_pretended_device():
    """In bf16 the products are of bf16 and the loss and the weights stay fp32."""
    trace = traced("mlp", "cuda", precision="bf16")
    products = [one for one in trace.operations if one.name in ("addmm", "mm")]
    assert {shape.dtype for one in products for shape in one.inputs} == {"bf16"}
    losses = [one for one in trace.operations if one.name == "nll_loss_forward"]
    assert [one.inputs[0].dtype for one in losses] == ["fp32"]


def test_tf32_is_traced_as_fp32():
    """tf32 changes the speed of products and nothing else."""
    one, other = traced("mlp", "cuda", precision="fp32"), traced("mlp", "cuda", precision="tf32")
    assert one.operations == other.operations
    assert one.storages == other.storages
    assert other.settings.precision == "tf32"


def test_batch_grows_storages_and_nothing_else():
    """With twice the micro-batch the same operations run, and activations take twice the bytes."""
    small, large = (traced("mlp", "cuda", micro_batch=size) for size in (BATCH, 2 * BATCH))
    assert [small.operations[o.operation].name for o in small.occurrences] == [
        large.operations[o.operation].name for o in large.occurrences
    ]
    assert small.events == large.events


def test_model_too_large_for_any_machine_is_traced_in_little_memory():
    """Weights of 32 GB, built by a function, never take memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    job = make_job(
        lambda: nn.Sequential(nn.Linear(48, 40_000), *(nn.Linear(40_000, 40_000) for _ in range(5))),
        JOBS["mlp"]().data,
        optimizer=SGD(lr=0.1),
    )
    trace = trace_update(job, datasets_of(job), SEPARABLE, settings("cuda"))
    assert sum(s.num_bytes for s in trace.storages if s.category == "parameter") > 32e9
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 600e6


def test_module_given_is_left_alone():
    """A job that holds a real module is traced on fakes of it; the module keeps its weights and its device."""
    module = JOBS["mlp"]().model()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    job = make_job(module, JOBS["mlp"]().data)
    trace = trace_update(job, datasets_of(job), SEPARABLE, settings("cuda"))
    assert trace.flops == traced("mlp", "cuda").flops
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert type(next(module.parameters())) is nn.Parameter


class _Schedule(nn.Module):
    """Widths that are computed with tensors while the model is built, as rates of stochastic depth are."""

    def __init__(self) -> None:
        super().__init__()
        widths = [int(width) for width in torch.linspace(48, 96, 4).tolist()]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_values_that_a_model_looks_at_while_it_is_built_are_real():
    """`torch.linspace(…).tolist()` in a constructor gives the real numbers, not answers for losses."""
    job = make_job(_Schedule, JOBS["mlp"]().data)
    trace = trace_update(job, datasets_of(job), SEPARABLE, settings("cuda"))
    sizes = [s.num_bytes for s in trace.storages if s.category == "parameter"]
    assert sorted(sizes) == sorted(4 * n for a, b in itertools.pairwise((48, 64, 80, 96)) for n in (a * b, b))


def test_record_survives_json():
    """A trace written and read again is the same."""
    trace = traced("cnn", "cuda")
    assert loads(dumps(trace), Trace) == trace


def test_settings_that_change_what_is_learned_are_refused():
    """A micro-batch that breaks a group of batch statistics is no plan, traced or not."""
    job = JOBS["cnn"]()
    group = type(SEPARABLE)(kind="whole_group", group=4, causes=("BatchNorm",), evidence="known")
    with pytest.raises(BadJob, match="exactly one group"):
        trace_update(job, datasets_of(job), group, settings("cuda"))


class _Items(torch.utils.data.Dataset):
    """Items fetched one by one, as dicts."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return {"image": torch.ones(3, 32, 32), "label": index % 3}


def _by_model(model, batch):
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    return Loss(loss, batch[1].numel())


def two_convolutions() -> nn.Module:
    """Of images [B, 3, 32, 32]."""
    first, second = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "changed",
    [
        {"loss": nn.CrossEntropyLoss(weight=torch.ones(10), reduction="none")},
        {"loss": Objective(_by_model, penalty=lambda model: sum(p.square().sum() for p in model.parameters()))},
        {"data": _Items()},
        {"augment": (RandomFlip(), RandomShift(2)), "optimizer": SGD(lr=0.1, momentum=0.9), "average": 0.9},
        {"optimizer": lambda parameters: torch.optim.LBFGS(parameters, max_iter=2)},
        {"model": two_convolutions()},
    ],
    ids=["loss with weights", "loss of the model", "items", "augmented", "closure", "module"],
)
def test_jobs_of_every_form_are_traced(changed, target):
    """Whatever form the loss, the data, the optimiser and the model have: on the target, in channels-last too."""
    job = make_job(**{"model": two_convolutions, "data": JOBS["cnn"]().data, **changed})
    is_closure = callable(job.optimizer)  # L-BFGS takes no gradients in channels-last, fake or real
    layout = "contiguous" if is_closure else "channels_last"
    trace = trace_update(job, datasets_of(job), SEPARABLE, settings(target, memory_format=layout))
    assert {one.phase for one in trace.occurrences} == {"forward", "backward", "optimizer"}
    assert not trace.is_fallback
    convolutions = [one for one in trace.operations if one.name == "convolution"]
    assert all(one.attribute("channels_last") is not is_closure for one in convolutions[1:])
    assert any(storage.category == "input" for storage in trace.storages)


def test_batch_statistics_of_groups_are_traced_group_by_group():
    """A micro-batch of two groups of BatchNorm normalises each on its own, as the step does."""
    job = JOBS["cnn"]()
    coupling = type(SEPARABLE)(kind="batch_norm", group=BATCH // 2, causes=("BatchNorm",), evidence="known")
    counts = []
    for known in (SEPARABLE, coupling):
        trace = trace_update(job, datasets_of(job), known, settings("cuda"))
        names = [trace.operations[one.operation].name for one in trace.occurrences]
        counts.append(names.count("native_batch_norm"))
    assert counts[1] == 2 * counts[0] > 0


@pytest.mark.slow
def test_micro_batches_are_counted_right_under_a_loss_in_chunks():
    """A chunk's own backward pass does not begin the next micro-batch: n of them take n times the FLOPs of one."""
    tokens = torch.zeros(16, 32, dtype=torch.int64)
    job = make_job(lambda: GPT(2, 32, 2, 32, 512), (tokens, tokens), loss="token_cross_entropy")

    def flops(parts, micro_batches, chunks):
        given = dataclasses.replace(settings("cuda", micro_batch=2), parts=parts, loss_chunks=chunks)
        work = counted(trace_update(job, datasets_of(job), SEPARABLE, given), micro_batches)
        sums = {"forward": 0.0, "backward": 0.0}
        for operation, phase, _, count in work.counts:
            if phase in sums:
                sums[phase] += work.trace.operations[operation].flops * count
        return sums

    for chunks in (1, 8):
        one = flops(1, 1, chunks)
        assert flops(2, 4, chunks) == {phase: 4 * value for phase, value in one.items()}, chunks


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("mlp", {}),
        ("mlp", {"parts": 2, "optimizer_implementation": "fused"}),
        pytest.param("gpt", {"parts": 2, "precision": "bf16", "checkpointed_blocks": 3}, marks=pytest.mark.slow),
        ("gpt", {"parts": 2, "checkpointed_blocks": 3, "checkpointing": "selective", "loss_chunks": 4}),
        ("gpt", {"parts": 2, "precision": "bf16", "gathered_in": "bf16"}),
        pytest.param("encoder", {"parts": 2, "precision": "bf16"}, marks=pytest.mark.slow),
        ("lstm", {"parts": 2}),
    ],
)
def test_updates_of_several_sizes_are_traced_at_once_as_each_alone(name: str, changed: dict[str, object]) -> None:
    """Storages, their order, operations and lines are equal, though the model and its state are made once."""
    job = JOBS[name]()
    every = [settings("cuda", micro_batch=size, **changed) for size in (2, 4)]
    tracer, without = UpdateTracer(job, datasets_of(job), SEPARABLE, every), dataclasses.replace
    alone = [trace_update(job, datasets_of(job), SEPARABLE, each) for each in every]
    assert [without(trace, took_s=0.0) for trace in tracer.traces(every)] == [
        without(trace, took_s=0.0) for trace in alone
    ]


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("mlp", {"optimizer_implementation": "fused"}),
        ("gpt", {"precision": "bf16", "checkpointed_blocks": 3}),
        ("gpt", {"checkpointed_blocks": 3, "checkpointing": "selective", "loss_chunks": 4}),
        ("gpt", {"precision": "bf16", "gathered_in": "bf16"}),
        ("encoder", {"precision": "bf16"}),
    ],
)
def test_a_model_that_was_traced_is_traced_in_other_sizes_as_one_that_is_made_for_them(
    name: str, changed: dict[str, object]
) -> None:
    """Also in smaller and larger ones than before, after the fake device was left."""
    job = JOBS[name]()
    first, *later = (settings("cuda", micro_batch=size, parts=2, **changed) for size in (2, 1, 4))
    tracer = UpdateTracer(job, datasets_of(job), SEPARABLE, [first])
    tracer.traces([first])
    assert tracer.goes_on
    for each in later:
        (trace,), alone = tracer.traces([each]), trace_update(job, datasets_of(job), SEPARABLE, each)
        assert dataclasses.replace(trace, took_s=0.0) == dataclasses.replace(alone, took_s=0.0)
    assert tracer.goes_on


class LastMask(nn.Linear):
    """Keeps a mask for the number of samples that it was last given."""

    mask: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.mask is None or len(self.mask) != len(inputs):
            self.mask = torch.ones(len(inputs), 1, device=inputs.device)
        return super().forward(inputs) * self.mask


@pytest.mark.parametrize("parts", [1, 2])
def test_what_an_update_of_a_size_makes_once_is_there_in_its_trace(parts: int) -> None:
    """Also in the trace of a further size, for which the state of the first is kept."""
    job = make_job(lambda: LastMask(48, CLASSES), JOBS["mlp"]().data)
    every = [settings("cuda", micro_batch=size, parts=parts) for size in (2, 4)]
    for trace, each in zip(trace_updates(job, datasets_of(job), SEPARABLE, every), every, strict=True):
        alone = trace_update(job, datasets_of(job), SEPARABLE, each)
        assert (trace.operations, trace.occurrences) == (alone.operations, alone.occurrences)
        assert Counter(trace.storages) == Counter(alone.storages)
        assert "ones" not in {operation.name for operation in trace.operations}


def test_a_model_that_keeps_something_for_a_size_is_made_again_for_others() -> None:
    """Its trace would have what it keeps for the sizes before, or miss what it makes for the new one."""
    job = make_job(lambda: LastMask(48, CLASSES), JOBS["mlp"]().data)
    every = [settings("cuda", micro_batch=size, parts=2) for size in (2, 4)]
    tracer = UpdateTracer(job, datasets_of(job), SEPARABLE, every)
    tracer.traces(every[:1])
    assert tracer.goes_on
    tracer.traces(every[1:])
    assert not tracer.goes_on
