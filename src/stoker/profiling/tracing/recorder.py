"""The dispatch mode that records every operation of a traced update, and the birth and death of every storage."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.errors import BadJob
from stoker.profiling.tracing.fake_device import (
    answer_for_device,
    calling_instruction,
    is_in_backward,
    next_sequence_number,
    references,
    references_of_engine,
    sequence_number_of_node,
    storage_key,
)
from stoker.profiling.tracing.fakes import FakeAnswers
from stoker.profiling.tracing.operations import (
    SourceLines,
    is_mutation,
    operation_of,
    signature_of,
    tensors_in,
    written_arguments,
)
from stoker.profiling.tracing.recomputation import LOSS, Call, region_of
from stoker.profiling.tracing.routing import Routing
from stoker.profiling.tracing.storages import Life, Recording, Storages, TensorUse
from stoker.profiling.tracing.target_kernels import completed, stand_in
from stoker.records import Occurrence, Operation, Phase
from stoker.stepping.without_compiler import without_compiler

aten = torch.ops.aten


_SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
_OF_ONE_DTYPE = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution"})


def _require_one_dtype(func: Any, args: tuple[Any, ...]) -> None:
    """Raise RuntimeError for a product or attention of several dtypes, which kernels refuse and fake tensors do not."""
    name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
    is_attention = name.startswith("_scaled_dot_product") and not name.endswith("_backward")
    if not (is_attention or name in _OF_ONE_DTYPE):
        return
    operands = [arg for arg in args[:3] if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
    if len({operand.dtype for operand in operands}) > 1:
        dtypes = ", ".join(str(operand.dtype).removeprefix("torch.") for operand in operands)
        raise RuntimeError(f"expected the operands of {name} to have the same dtype, but got {dtypes}")


class Recorder(TorchDispatchMode):
    """Within its block, follows storages on `device`; from `begin` on, records operations and events too.

    It must be the innermost mode, to see operations as a device executes them, and the `answers` to questions about
    values that are not computed.
    """

    def __init__(self, device: torch.device, answers: FakeAnswers, lines: SourceLines) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.answers, self.lines = device, answers, lines
        self.storages = Storages(device)
        self.routing = Routing()
        self.modules: list[str] = [""]
        self._place_of_name: dict[str, int] = {"": 0}
        self._module_places: dict[int, int] = {}
        self._stack: list[int] = []
        self._forward_nodes: dict[int, tuple[int, int, str]] = {}
        self.regions: tuple[str, ...] = ("",)
        """Dotted names of the modules that a compiled plan compiles; '' is the model."""
        self._region_of_module: dict[int, str] = {}
        self._known: dict[Any, int] = {}
        self._by_record: dict[str, int] = {}
        self._owners: list[tuple[nn.Parameter, str]] = []
        self._additions, self._neighbours, self._casts = Additions(), Neighbours(), Casts()
        self._last_region = LOSS
        self._was_in_backward = False
        self._depth_of_backward = 0
        self.last_failure: tuple[str, str] | None = None

    def begin(self) -> Recording:
        """Record from here on; storages alive now were born before."""
        recording = Recording()
        for memory in (self._known, self._by_record, self._forward_nodes):
            memory.clear()
        self._stack.clear()
        self._neighbours, self._casts, self._last_region = Neighbours(), Casts(), LOSS
        self.storages.begin(recording)
        return recording

    def end(self) -> None:
        """Stop recording; storages alive now outlive the update."""
        self._leave_backward()
        self.storages.end()

    def failure(self) -> tuple[str, str] | None:
        """The operation that last raised, and its line; None if none did."""
        return self.last_failure

    def name_modules(self, model: nn.Module, prefix: str = "") -> None:
        """Record operations of the modules of `model` under their dotted names, after `prefix`."""
        for name, module in model.named_modules():
            full = f"{prefix}.{name}" if prefix and name else prefix or name
            if full not in self._place_of_name:
                self._place_of_name[full] = len(self.modules)
                self.modules.append(full)
            self._module_places[id(module)] = self._place_of_name[full]
            self._owners += [(parameter, full) for parameter in module.parameters(recurse=False)]

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Within the block, follow the running module and storages resized by hand."""

        def enter(module: nn.Module, _inputs: Any) -> None:
            self._stack.append(self._module_places.get(id(module), self._stack[-1] if self._stack else 0))

        def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            if self._stack:
                self._stack.pop()

        before = nn.modules.module.register_module_forward_pre_hook(enter)
        after = nn.modules.module.register_module_forward_hook(leave, always_call=True)
        try:
            with self.storages.following_resizes():
                yield
        finally:
            before.remove()
            after.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation on fake tensors."""
        answer = answer_for_device(func, args)
        if answer is not None:
            return answer
        kwargs = kwargs or {}
        if self.device.type == "cuda" and "device" in kwargs and torch.device(kwargs["device"]).type == "meta":
            kwargs = {**kwargs, "device": self.device}
        executed = self._additions.as_executed(func, args)
        is_in_place, func = executed is not func, executed
        out = self._run(func, args, kwargs)
        inputs, outputs = tensors_in((args, kwargs.values())), tensors_in([out])
        if any(output.layout in _SPARSE for output in outputs):
            raise self._sparse_problem(func)
        self._additions.note(func, out)
        self.routing.note(func, args, kwargs, inputs, outputs, is_in_module=bool(self._stack) or is_in_backward())
        if func.namespace != "prim":
            self._note(func, args, kwargs, out, inputs, outputs)
        return aten.alias(out) if is_in_place else out

    def _sparse_problem(self, func: Any) -> BadJob:
        """The error of a sparse result, which has no storage whose life could be followed."""
        line = self.lines.name_here()
        return BadJob(
            f"{func}{f' at {line}' if line else ''} makes a sparse tensor, as a sparse gradient is, which cannot be "
            "traced, and plans for several processes, and for devices elsewhere, are made from traces",
            remedy="Make it dense: sparse=False of nn.Embedding and nn.EmbeddingBag. Or plan and train in one process "
            "here, where plans are tried instead.",
        )

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        instead = stand_in(func)
        try:
            _require_one_dtype(func, args)
            return instead(*args, **kwargs) if instead is not None else completed(func, args, func(*args, **kwargs))
        except DataDependentOutputException:
            name = func.overloadpacket.__name__
            if name == "_local_scalar_dense" and (known := self.routing.scalar(args[0])) is not None:
                return known
            line = self.lines.name_here()
            life = self.storages.life_of(args[0]) if args else None
            return self.answers.value(func, args, line, is_all=life is not None and life.is_all)
        except DynamicOutputShapeException:
            known = self.routing.sized(func, args, kwargs)
            if known is not None:
                return known
            return self.answers.result(func, args, kwargs, self.lines.name_here())
        except Exception as error:
            if func.overloadpacket.__name__.startswith("_to_sparse"):
                raise self._sparse_problem(func) from error
            self.last_failure = str(func), self.lines.name_here()
            raise

    def _note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        fresh = [output for output in outputs if self.storages.is_new(output)]
        recording = self.storages.recording
        if recording is None:
            # Inputs too: what was there before the trace, such as a teacher that a loss holds.
            lives = [self.storages.follow(tensor) for tensor in (*inputs, *fresh)]
            for life in lives[len(inputs) :]:
                self._mark_all(func, life)
            return
        if not fresh and not is_mutation(func):
            return
        operation = self._operation(recording, func, args, kwargs, out, inputs)
        self._neighbours.note(recording.operations[operation], (*inputs, *outputs))
        read = self.storages.numbers(inputs)
        in_backward = is_in_backward()
        if in_backward and not self._was_in_backward:
            self._was_in_backward = True
            self._depth_of_backward = len(self._stack)
            recording.backward_starts.append(len(recording.occurrences))
        elif not in_backward and self._was_in_backward:
            self._leave_backward()
        module, source, node, region, is_gradient = self._place(in_backward=in_backward)
        takes_list = bool(args) and isinstance(args[0], list | tuple)
        if module:
            owners = [self.modules[module]] * len(outputs)
        else:
            owners = self.storages.owners_of_results(args, len(outputs))
            if not takes_list:
                module = self._place_of_name.get(owners[0] if owners else self.storages.owner_of_first(args), 0)
        phase: Phase = "backward" if in_backward else "forward"
        recording.occurrences.append(Occurrence(operation=operation, phase=phase, part=0, module=module, source=source))
        for tensor, owner in zip(outputs, owners, strict=True):
            if any(tensor is new for new in fresh):
                life = self.storages.follow(tensor)
                self._mark_all(func, life)
                if life is not None:
                    life.owner = owner
        written = outputs or written_arguments(func, args, kwargs)
        if self.device.type == "cuda":
            name, writes = func.overloadpacket.__name__, self.storages.numbers(written)
            recording.calls.append(Call(name, read, writes, region, is_gradient))
        recording.uses.append(
            TensorUse(
                inputs=tuple(map(self.storages.owner, inputs)),
                outputs=tuple(map(self.storages.owner, written)),
                identities=tuple(map(id, inputs)),
            )
        )
        recording.nodes.append(node)

    def _mark_all(self, func: Any, life: Life | None) -> None:
        if life is not None:
            life.is_all = func.overloadpacket.__name__ == "all"

    def _operation(
        self,
        recording: Recording,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        inputs: list[torch.Tensor],
    ) -> int:
        num_outside, is_again = 0, False
        if self.device.type == "cuda":  # on a CPU, chains are joined without counting bytes
            num_outside = self._neighbours.num_outside(func, inputs)
            is_again = self._is_cast_again(func, args, kwargs, out)
        signature = signature_of(func, args, kwargs)
        key = None if signature is None else (num_outside, is_again, *signature)
        place = None if key is None else self._known.get(key)
        if place is None:
            record = operation_of(func, args, kwargs, out, num_outside=num_outside, is_again=is_again)
            content = repr(record)  # attributes may hold lists, which have no hash
            place = self._by_record.get(content)
            if place is None:
                place = self._by_record[content] = len(recording.operations)
                recording.operations.append(record)
            if key is not None:
                self._known[key] = place
        return place

    def _is_cast_again(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
        if is_mutation(func):
            for tensor in written_arguments(func, args, kwargs):
                self._casts.forget(self.storages.life_of(tensor))
        if func.overloadpacket.__name__ != "_to_copy":
            return False
        return self._casts.is_again(args[0], out, self.storages.life_of(args[0]), in_backward=is_in_backward())

    def _place(self, *, in_backward: bool) -> tuple[int, int, int, str, bool]:
        """Module, line, node and region of the running operation, and whether it belongs to a gradient.

        In a backward pass they are those of its forward operation.
        """
        depth = len(self._stack) - (self._depth_of_backward if in_backward else 0)
        if not in_backward or depth > 0:
            module, source = self._stack[-1] if self._stack else 0, self.lines.here()
            node = next_sequence_number() - 1
            region = self._region()
            self._forward_nodes.setdefault(node, (module, source, region))
            return module, source, node, region, False
        node = sequence_number_of_node()
        # The gradient of a view, which is not recorded, is of the region that the engine is in.
        module, source, self._last_region = self._forward_nodes.get(node) or (0, self.lines.here(), self._last_region)
        return module, source, node, self._last_region, True

    def _region(self) -> str:
        if not self._stack:
            return LOSS
        place = self._stack[-1]
        if place not in self._region_of_module:
            self._region_of_module[place] = region_of(self.modules[place], self.regions)
        return self._region_of_module[place]

    def _leave_backward(self) -> None:
        self._was_in_backward = False
        for parameter, owner in self._owners:
            if parameter.grad is not None:
                self.storages.hold(parameter.grad, "gradient", owner)


without_compiler(Recorder.__torch_dispatch__)


class Neighbours:
    """Storages that operations since the last product or convolution have read or made.

    A compiler writes such operations into one kernel, which reads from memory what is not among them. Shapes alone do
    not say which of two inputs of one shape that is.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def num_outside(self, func: Any, inputs: Sequence[torch.Tensor]) -> int:
        """Number of inputs that are not among them, of those with the shape and dtype of another input."""
        if len(inputs) < 2 or func.overloadpacket.__name__.startswith(("_fused_", "_foreach_")):  # of the optimiser
            return 0
        kinds = Counter((tensor.shape, tensor.dtype) for tensor in inputs)
        like = (tensor for tensor in inputs if kinds[tensor.shape, tensor.dtype] > 1)
        return len({storage_key(tensor.untyped_storage()) for tensor in like} - self._seen)

    def note(self, operation: Operation, tensors: Iterable[torch.Tensor]) -> None:
        """Remember what an operation reads and makes; a product ends a kernel."""
        if operation.flops:
            self._seen.clear()
            return
        self._seen.update(storage_key(tensor.untyped_storage()) for tensor in tensors)


class Casts:
    """Copies of tensors in another dtype that a pass has made.

    Under autocast each layer makes its own copy of an input that several layers have; compiled code makes one.
    """

    def __init__(self) -> None:
        self._made: dict[int, set[tuple[object, ...]]] = {}
        self._in_backward = False

    def is_again(self, given: torch.Tensor, made: torch.Tensor, life: Life | None, *, in_backward: bool) -> bool:
        """Whether the pass has made this copy of a tensor before; `life` is that of its storage."""
        if in_backward is not self._in_backward:
            self._made.clear()
            self._in_backward = in_backward
        if life is None or given.dtype == made.dtype:
            return False
        copied = given.storage_offset(), given.shape, given.stride(), made.dtype
        # A recording keeps all lives, so that none has the identity of an earlier one.
        known = self._made.setdefault(id(life), set())
        is_known = copied in known
        known.add(copied)
        return is_known

    def forget(self, life: Life | None) -> None:
        """Forget the copies of a storage that is written to."""
        self._made.pop(id(life), None)


_PRODUCTS = (aten.mm.default, aten.bmm.default)


class Additions:
    """Additions that PyTorch makes in place on real tensors, and out of place on fake ones, as on any subclass.

    They affect the memory at a peak: a gradient that reaches a tensor on a second path is added to the first, and the
    bias of a linear layer with a non-contiguous input is added to the product.
    Source: torch/csrc/autograd/input_buffer.cpp (`can_accumulate_inplace`) and aten/src/ATen/native/Linear.cpp
    (`linear`) of PyTorch 2.13.
    """

    def __init__(self) -> None:
        self._product: tuple[tuple[int, int] | None, int] = None, 0

    def note(self, func: Any, out: Any) -> None:
        """Remember a matrix product: the instruction that called it, and its storage."""
        if func in _PRODUCTS:
            self._product = calling_instruction(), storage_key(out.untyped_storage())

    def as_executed(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The operation on real tensors in place of `func`."""
        if func is not aten.add.Tensor:
            return func
        is_second_gradient = (  # the engine adds a gradient to one with no other references
            is_in_backward()
            and not torch.is_grad_enabled()
            and calling_instruction() is None
            and references(args[0]) == references_of_engine()
            and args[0].shape == args[1].shape
        )
        instruction, product = self._product
        is_bias = (  # the instruction that adds is the one that multiplied
            instruction is not None
            and isinstance(args[1], torch.Tensor)
            and args[1].dim() == 1
            and storage_key(args[0].untyped_storage()) == product
            and calling_instruction() == instruction
        )
        return aten.add_.Tensor if is_second_gradient or is_bias else func
