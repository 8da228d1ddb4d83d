"""What compiled code keeps for the backward pass: one rule of the partitioner each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stoker.loading.datasets import datasets_of
from stoker.planning.model.compiled_graphs import compiled_storages
from stoker.profiling.tracing.recomputation import LOSS, UNCOMPILED, Call, kept_shares, region_of
from stoker.profiling.tracing.update import trace_update
from stoker.zoo import GPT, Llama
from tests.profiling.tracing.jobs import SEPARABLE, make_job, settings, traced

SIZE = 1000


class Written:
    """Calls written down in order; storages are named, and numbered as they are first named."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._numbers: dict[str, int] = {}
        self._sizes: dict[int, int] = {}

    def number(self, name: str) -> int:
        """The number of a storage."""
        return self._numbers.setdefault(name, len(self._numbers))

    def run(self, operation: str, reads: str, writes: str, region: str = "block", **sizes: int) -> None:
        """Add an operation of the forward pass; `sizes` other than `SIZE` [bytes]."""
        self._add(operation, reads, writes, region, is_gradient=False)
        self._sizes |= {self.number(name): size for name, size in sizes.items()}

    def gradient(self, operation: str, reads: str, region: str = "block") -> None:
        """Add an operation of the backward pass, which makes something new."""
        self._add(operation, reads, f"gradient{len(self.calls)}", region, is_gradient=True)

    def _add(self, operation: str, reads: str, writes: str, region: str, *, is_gradient: bool) -> None:
        read, written = (tuple(map(self.number, names.split())) for names in (reads, writes))
        self.calls.append(Call(operation, read, written, region, is_gradient))

    def shares(self, *names: str, outliving: str = "") -> list[float]:
        """The shares of storages; those named in `outliving` are left behind by an uncompiled forward pass."""
        weights = {number for name, number in self._numbers.items() if name.startswith("weight")}
        sizes = [0 if n in weights else self._sizes.get(n, SIZE) for n in range(len(self._numbers))]
        result = kept_shares(self.calls, sizes, set(map(self.number, outliving.split())) | weights)
        return [result[self.number(name)] for name in names]


def test_steps_of_a_written_out_function_are_computed_again() -> None:
    """Power and tangent come from the product's result, which is kept as it is no more work to read than they are."""
    graph = Written()
    graph.run("mm", "x weight", "up")
    graph.run("pow", "up", "cubed")
    graph.run("tanh", "cubed", "bent")
    graph.run("mul", "up bent", "act")
    graph.run("mm", "act weight2", "down")
    graph.gradient("mm", "grad act")
    graph.gradient("mul", "grad bent")
    graph.gradient("mul", "grad up")
    graph.gradient("tanh_backward", "grad bent")
    graph.gradient("mul", "grad cubed")
    assert graph.shares("up", "cubed", "bent", "act", outliving="x") == [1, 0, 0, 1]


def test_what_a_product_of_the_backward_pass_reads_is_kept() -> None:
    """A gated activation is cheap to compute again, but has to be in memory for the weight's gradient."""
    for reader, expected in (("mm", 1.0), ("mul", 0.0)):
        graph = Written()
        graph.run("mm", "x weight", "gate")
        graph.run("silu", "gate", "bent")
        graph.gradient(reader, "grad bent")
        graph.gradient("silu_backward", "grad gate")
        assert graph.shares("gate", "bent", outliving="x") == [1, expected]


def test_casts_of_weights_are_kept() -> None:
    """A weight is there anyway, but the product of the backward pass reads its copy in half precision."""
    graph = Written()
    graph.run("_to_copy", "weight", "cast")
    graph.run("mm", "x cast", "y")
    graph.gradient("mm", "grad cast")
    assert graph.shares("cast", outliving="x") == [1]


def test_a_copy_in_full_precision_takes_the_room_of_the_original() -> None:
    """What the forward pass let go of is kept in its place, in half the bytes."""
    graph = Written()
    graph.run("convolution", "x weight", "half", half=SIZE // 2)
    graph.run("_to_copy", "half", "full")
    graph.run("native_group_norm", "full weight2", "normed")
    graph.gradient("native_group_norm_backward", "grad full")
    assert graph.shares("full", outliving="x") == [0.5]
    assert graph.shares("full", outliving="x half") == [0]


def test_random_numbers_are_kept_and_what_they_mask_is_not() -> None:
    """Of dropout the mask, of a byte an element."""
    graph = Written()
    graph.run("mm", "x weight", "y")
    graph.run("native_dropout", "y", "dropped mask", mask=SIZE // 4)
    graph.run("gelu", "dropped", "act")
    graph.gradient("gelu_backward", "grad dropped")
    graph.gradient("native_dropout_backward", "grad mask")
    assert graph.shares("mask", outliving="x y") == [1]


def test_sums_over_rows_are_kept() -> None:
    """A mean is less than a quarter of what it is the mean of, so it is not computed again."""
    for size, expected in ((SIZE // 8, 1.0), (SIZE // 2, 0.0)):
        graph = Written()
        graph.run("mm", "x weight", "y")
        graph.run("mean", "y", "middle", middle=size)
        graph.gradient("mul", "grad middle")
        graph.gradient("mul", "grad y")
        assert graph.shares("y", "middle", outliving="x") == [1, expected]


def test_what_follows_a_product_is_not_computed_again_from_before_it() -> None:
    """The residual sum behind a product would not be in one kernel with the norm before it, so it is kept."""
    graph = Written()
    graph.run("relu", "x", "first")
    graph.run("mul", "first", "scaled")
    graph.run("mm", "scaled weight", "branch", branch=SIZE // 2)
    graph.run("add", "first branch", "total")
    graph.run("tanh", "total", "out")
    graph.gradient("mul", "grad total")
    graph.gradient("mm", "grad scaled")
    assert graph.shares("total", outliving="x") == [1]


def test_what_is_in_memory_anyway_costs_half_of_what_is_not() -> None:
    """A result that stays in registers would have to be written, unless another region reads it."""
    for reader, expected in (("block", 0.0), ("another block", 1.0)):
        graph = Written()
        graph.run("mm", "x weight", "y")
        graph.run("tanh", "y", "bent")
        graph.run("mul", "bent", "out", reader)
        graph.gradient("mul", "grad bent")
        assert graph.shares("bent", outliving="x y") == [expected]


def test_what_is_far_from_the_backward_pass_costs_more() -> None:
    """Of a product's result and what comes of it, a tenth larger, three operations later, the latter is kept."""
    graph = Written()
    graph.run("mm", "x weight", "y", y=9 * SIZE // 10)
    graph.run("tanh", "y", "first")
    graph.run("tanh", "first", "second")
    graph.run("tanh", "second", "third")
    graph.run("mm", "third weight2", "z")
    graph.gradient("mul", "grad third")
    assert graph.shares("third", outliving="x y z") == [1]


def test_contents_written_in_place_are_contents_of_their_own() -> None:
    """A norm's result that an activation overwrites, and a convolution reads: one storage, kept once."""
    graph = Written()
    graph.run("convolution", "x weight", "y")
    graph.run("cudnn_batch_norm", "y weight2", "normed")
    graph.run("relu_", "normed", "normed")
    graph.run("convolution", "normed weight3", "z")
    graph.gradient("convolution_backward", "grad normed")
    graph.gradient("threshold_backward", "grad normed")
    graph.gradient("cudnn_batch_norm_backward", "grad y")
    assert graph.shares("y", "normed", outliving="x") == [1, 1]


def test_a_pool_keeps_a_byte_for_each_maximum() -> None:
    """Offsets within a window in place of places in the image, which the backward pass does not read."""
    graph = Written()
    graph.run("convolution", "x weight", "y")
    graph.run("relu", "y", "act")
    graph.run("max_pool2d_with_indices", "act", "pooled places", places=2 * SIZE)
    graph.gradient("max_pool2d_with_indices_backward", "grad act places")
    graph.gradient("mul", "grad y")
    assert graph.shares("y", "act", "places", outliving="x pooled") == [1, 0, 1 / 8]


def test_uncompiled_code_keeps_what_it_reads_and_a_region_what_it_is_given() -> None:
    """A head between the blocks and the loss is not compiled; the loss keeps logits, not their logarithms."""
    graph = Written()
    graph.run("mul", "x", "scaled", UNCOMPILED)
    graph.run("tanh", "scaled", "bent", UNCOMPILED)
    graph.run("mm", "bent weight", "logits", UNCOMPILED)
    graph.run("_log_softmax", "logits", "logarithms", LOSS, logarithms=2 * SIZE)
    graph.gradient("_log_softmax_backward_data", "grad logarithms", LOSS)
    graph.gradient("tanh_backward", "grad bent", UNCOMPILED)
    graph.gradient("mul", "grad scaled", UNCOMPILED)
    assert graph.shares("scaled", "bent", "logarithms", outliving="x logits") == [1, 1, 0]
    assert graph.shares("logarithms", outliving="x") == [0.5]  # logits that nobody holds


def test_regions_are_modules_with_what_is_inside() -> None:
    """Blocks are compiled one by one, or the model as a whole."""
    assert region_of("blocks.1.mlp", ["blocks.0", "blocks.1", "blocks.10"]) == "blocks.1"
    assert region_of("blocks.10", ["blocks.1", "blocks.10"]) == "blocks.10"
    assert region_of("head", ["blocks.1"]) == UNCOMPILED
    assert region_of("head", [""]) == ""


def test_storages_of_a_gpus_trace_have_their_shares_and_those_of_a_cpus_are_whole() -> None:
    """Of a GPT's blocks all that products read is kept; in place of the loss's logarithms the logits in bf16 are."""
    assert all(one.compiled_share == 1 for one in traced("gpt").storages)
    trace = traced("gpt", "cuda", precision="bf16")
    kept = {
        (trace.operations[trace.occurrences[one.born].operation].name, one.compiled_share)
        for one in trace.storages
        if one.category == "activation"
    }
    assert ("_log_softmax", 0.5) in kept
    assert {("addmm", 1.0), ("_to_copy", 1.0)} <= kept  # weights in bf16 among the latter


def test_what_is_kept_in_the_stead_of_others_takes_the_room_of_something_as_large() -> None:
    """Its share is that of other numbers of samples then: a mask that all samples share stays as it is."""
    graph = Written()
    graph.run("bmm", "x weight", "scores")
    graph.run("eq", "weight2", "mask", mask=SIZE // 100)
    graph.run("masked_fill", "scores mask", "masked")
    graph.run("_softmax", "masked", "shares")
    graph.run("_to_copy", "shares", "half", half=SIZE // 2)
    graph.run("bmm", "half weight3", "y")
    graph.gradient("bmm", "grad half")
    graph.gradient("_softmax_backward_data", "grad shares")
    graph.gradient("masked_fill", "grad mask")
    assert graph.shares("half", "shares", "mask", outliving="x") == [1, 1, 0]


class _Partitioned(Exception):
    """Raised as soon as the partitioner has spoken: nothing is compiled."""


def saved_by_inductor(block: nn.Module, *inputs: torch.Tensor) -> int:
    """Bytes that inductor saves of a block under autocast for its backward pass, without what it is given."""
    compile_fx: Any = pytest.importorskip("torch._inductor.compile_fx")  # takes seconds
    found: list[int] = []
    partition = compile_fx.min_cut_rematerialization_partition

    def partition_and_stop(*args: Any, num_fwd_outputs: int, **named: Any) -> Any:
        forward, _ = partition(*args, num_fwd_outputs=num_fwd_outputs, **named)
        (output,) = (node for node in forward.graph.nodes if node.op == "output")
        saved = [node for node in output.args[0][num_fwd_outputs:] if node.op != "placeholder"]
        tensors = [node.meta["val"] for node in saved if isinstance(node.meta["val"], torch.Tensor)]
        found.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        raise _Partitioned

    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(compile_fx, "min_cut_rematerialization_partition", partition_and_stop)
        with pytest.raises(Exception, match="_Partitioned"):
            torch.compile(block, dynamic=False, fullgraph=True)(*inputs)
    return found[0]


CONTEXT, WIDTH = 128, 128


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_as_much_is_kept_as_by_pytorchs_own_partitioner(kind: str) -> None:
    """Of the second of three blocks, in bf16; within 1 %, for sums of products of attention differ by device."""
    sizes = {"layers": 3, "width": WIDTH, "heads": 4, "context": CONTEXT, "vocab": 64}

    def made() -> nn.Module:
        return GPT(**sizes) if kind == "gpt" else Llama(**sizes, kv_heads=2, hidden=3 * WIDTH)

    model, tokens = made(), torch.zeros(4, CONTEXT, dtype=torch.int64)
    job = make_job(made, (tokens, tokens), loss="token_cross_entropy")
    trace = trace_update(job, datasets_of(job), SEPARABLE, settings("cuda", precision="bf16", micro_batch=4))
    kept = sum(
        one.num_bytes
        for one in compiled_storages(trace).storages
        if one.category == "activation"
        and trace.modules[trace.occurrences[one.born].module].startswith("blocks.1")
        and trace.occurrences[one.born].phase == "forward"
    )
    given: list[Any] = []
    with model.blocks[1].register_forward_pre_hook(lambda _, args: given.extend(args)), torch.no_grad():
        model(tokens)
    hidden, *others = given
    saved = saved_by_inductor(model.blocks[1], hidden.requires_grad_(), *others)
    result = hidden.numel() * hidden.element_size()  # kept as what the third block is given
    assert kept == pytest.approx(saved + result, rel=0.01)
