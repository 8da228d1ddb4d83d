"""Which tensors the stages of a pipeline pass on: found by following a pass on tensors without values.

What: parts of a model (its blocks, and the modules outside of blocks) are in one stage each; the code between them runs
in every stage. A tensor that a part of an earlier stage returns is passed on to the last stage that reads it: the
activations of the block before, a mask or integer positions made from embeddings, a skip connection, the output of an
encoder that each block of a decoder reads. What is computed from the samples alone is not: every stage computes it.
Use when: a model is cut into stages. Costs: one pass in Python without arithmetic for each new shape of inputs; for
every pass, where code looks at numbers in its inputs and might take another way for others.
Does not combine with: parts of a later stage that are called before an earlier one, weights that are read in another
stage than their own, tensors that a block keeps as an attribute for code outside of it, numbers in Python that a part
computes with weights and returns. They are refused by name.
Parameters and buffers are on the meta device here, and inputs are real, so that code which looks at the inputs alone
takes its own way. Where code looks at what weights have computed, it gets 0, false, or of `all` true.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from stoker.errors import BadJob, first_line
from stoker.jobs.fields import like
from stoker.loading.fields import tensors_of
from stoker.stepping.activation_checkpointing import Checkpointed
from stoker.stepping.model import on_meta
from stoker.stepping.random_draws import GeneratorStates

Key = tuple[str, int, int]
"""A tensor that a part returns: the part's name, the number of its call in the pass, the place in its output."""


@dataclass(frozen=True)
class PartCall:
    """A call of a part in a pass, number `number` of that part's.

    Stage `home` executes it. `output` has the structure of its result, with tensors on the meta device; the one at a
    place in `same` is the input at that place of the call's tensors. `readers` is the last stage that reads the tensor
    at a place, for those that later stages read; those at places in `rewritten` are changed in place afterwards.
    """

    name: str
    number: int
    home: int
    output: Any
    same: Mapping[int, int]
    readers: dict[int, int] = field(default_factory=dict)
    rewritten: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class StageFlow:
    """The calls of a pass by name and number, and the tensors that each stage but the last passes on, in order.

    With `reads_inputs` the pass looked at numbers in its inputs: another one of such inputs may take another way.
    """

    calls: Mapping[tuple[str, int], PartCall]
    passed: tuple[tuple[Key, ...], ...]
    reads_inputs: bool = False

    def num_bytes(self, stage: int) -> int:
        """Size of what a stage passes on [bytes]."""
        return sum(map(self.num_bytes_of, self.passed[stage]))

    def num_bytes_of(self, key: Key) -> int:
        """Size of a tensor that a part returns [bytes]; 0 if there is none."""
        name, number, place = key
        tensors = tensors_of(self.calls[name, number].output) if (name, number) in self.calls else []
        return tensors[place].numel() * tensors[place].element_size() if place < len(tensors) else 0


def outline_of(model: nn.Module) -> nn.Module:
    """A copy of a model on the meta device, without activation checkpointing."""
    wrapped = [
        (module, forward)
        for module in model.modules()
        if isinstance(forward := vars(module).get("forward"), Checkpointed)
    ]
    for module, forward in wrapped:
        module.forward = forward.forward
    try:
        return on_meta(model)
    finally:
        for module, forward in wrapped:
            module.forward = forward


def parts_of(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The parts of a model, by name: its blocks, and the outermost modules that neither are nor contain any."""
    numbers = {id(block) for block in blocks}
    parts: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        is_around = isinstance(module, nn.ModuleList | nn.ModuleDict) or any(id(m) in numbers for m in module.modules())
        if id(module) in numbers or not is_around:
            parts[name] = module
            return
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    return parts


def with_tensors(content: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """As `stoker.loading.fields.map_tensors`, with dicts of a class of their own kept as such.

    Tensors come in the order of `tensors_of`: their places in it are what stages agree on.
    """
    if isinstance(content, torch.Tensor):
        return change(content)
    if isinstance(content, Mapping):
        changed = {key: with_tensors(item, change) for key, item in content.items()}
        if type(content) is dict or not isinstance(content, MutableMapping):
            return changed
        result = copy.copy(content)
        for key, item in changed.items():
            result[key] = item
        return result
    if isinstance(content, tuple | list):
        return like(content, [with_tensors(item, change) for item in content])
    return content


@dataclass(frozen=True)
class _Made:
    """A source of numbers: a tensor that a part returns."""

    key: Key


@dataclass(frozen=True)
class _Weight:
    """A source of numbers: a parameter, by its names in the model's state. Only the stages of those have it."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class _Inner:
    """A source of numbers that only one stage has: a tensor that a part makes and does not return."""

    part: str
    number: int


_Sources = frozenset[_Made | _Weight | _Inner]
_NONE: _Sources = frozenset()
_CallKey = tuple[str, int]


@dataclass
class _OpenCall:
    """A part that is being executed.

    `read` are the sources that it has read, `changed` the storages it has changed; with `has_numbers` some of what
    weights compute has become numbers in Python.
    """

    name: str
    number: int
    has_weights: bool
    given: list[torch.Tensor]
    read: set[_Made | _Weight | _Inner] = field(default_factory=set)
    changed: set[StorageWeakRef] = field(default_factory=set)
    has_numbers: bool = False

    @property
    def key(self) -> _CallKey:
        return self.name, self.number


@dataclass(frozen=True)
class _Open:
    """A part is called."""

    call: _CallKey


@dataclass(frozen=True)
class _Read:
    """A call, or what follows all calls (None), reads what has these sources."""

    call: _CallKey | None
    sources: _Sources


_Event = _Open | _Read | str
"""What happens in a pass, as far as it matters where the model is cut; a text says why it cannot be cut at all."""


@dataclass
class FollowedPass:
    """A pass of a model on tensors without values, from which the flow follows wherever the model is cut.

    `blocks` are the names of the model's blocks, `weights` the first entry in the model's state of each part with
    weights. `calls` have the stage 0. `error` has ended the pass, for a reason that may follow from an event.
    """

    model: str
    blocks: Sequence[str]
    weights: Mapping[str, str]
    calls: dict[_CallKey, PartCall] = field(default_factory=dict)
    events: list[_Event] = field(default_factory=list)
    error: Exception | None = None
    reads_inputs: bool = False

    def flow(self, first_blocks: Sequence[int], homes: Mapping[str, int]) -> StageFlow:
        """What stages pass on.

        Args:
            first_blocks: the number of the first block of each stage.
            homes: the stage of each entry of the model's state.

        Raises:
            BadJob: the model cannot be cut so, or not be followed.
        """
        cut = _CutPass(self, first_blocks, homes)
        problem = cut.problem
        if problem is None and self.error is not None:
            problem = (
                f"its pass cannot be followed on tensors without values, {type(self.error).__name__}: "
                f"{first_line(self.error)}"
            )
        if problem is None:
            problem = next(
                (
                    f"{self.blocks[first]} is not called in every pass"
                    for first in first_blocks
                    if self.blocks[first] not in cut.called
                ),
                None,
            )
        if problem is not None:
            raise BadJob(
                f"{self.model} cannot be cut into {len(first_blocks)} stages: {problem}",
                remedy="Call the blocks one after the other, each once in every pass; return what other modules use; "
                "register modules in the order they are called in; or use another layout, such as shards.",
            ) from self.error
        passed = tuple(cut.passed(stage) for stage in range(len(first_blocks) - 1))
        return StageFlow(cut.calls, passed, self.reads_inputs)


class _CutPass:
    """A followed pass of a model that is cut into stages: its calls in their stages, and the first `problem`."""

    def __init__(self, followed: FollowedPass, first_blocks: Sequence[int], homes: Mapping[str, int]) -> None:
        self.calls: dict[_CallKey, PartCall] = {}
        self.called: set[str] = set()
        self.problem: str | None = None
        self._followed, self._first, self._homes = followed, first_blocks, homes
        self._numbers = {name: number for number, name in enumerate(followed.blocks)}
        self._homes_of_calls: dict[_CallKey, int] = {}
        self._stage = 0
        for event in followed.events:
            if isinstance(event, _Open):
                self._open(event.call)
            elif isinstance(event, _Read):
                self._read(len(first_blocks) - 1 if event.call is None else self._homes_of_calls[event.call], event)
            else:
                self._refuse(event)
            if self.problem is not None:
                break

    def passed(self, stage: int) -> tuple[Key, ...]:
        """What a stage passes on."""
        return tuple(
            (call.name, call.number, place)
            for call in self.calls.values()
            if call.home <= stage
            for place, last in sorted(call.readers.items())
            if last > stage
        )

    def _refuse(self, why: str) -> None:
        self.problem = self.problem or why

    def _open(self, key: _CallKey) -> None:
        name, followed = key[0], self._followed
        if name in self._numbers:
            self._enter_block(name)
        home = self._stage
        if name in followed.weights:
            home = self._homes[followed.weights[name]]
        elif name in self._numbers:
            home = self._stage_of(name)
        if home < self._stage:
            self._refuse(
                f"{name} is registered with stage {home + 1}, and called in stage {self._stage + 1}: register it "
                "after the blocks that come before it"
            )
        self._homes_of_calls[key] = home
        if (call := followed.calls.get(key)) is not None:
            self.calls[key] = dataclasses.replace(call, home=home, readers={})

    def _stage_of(self, block: str) -> int:
        return sum(first <= self._numbers[block] for first in self._first) - 1

    def _enter_block(self, name: str) -> None:
        """Go on to the next stage with its first block; refuse blocks in another order."""
        names, number, home = self._followed.blocks, self._numbers[name], self._stage_of(name)
        begins = names[self._first[home]]
        if name == begins and name in self.called:
            self._refuse(f"{name} is called twice in a pass")
        earlier = next((self._first[s] for s in range(home) if names[self._first[s]] not in self.called), None)
        if home < self._stage:
            self._refuse_order(self._first[self._stage], before=number)
        elif earlier is not None:
            self._refuse_order(number, before=earlier)
        elif name != begins and begins not in self.called:
            self._refuse_order(number, before=self._first[home])
        self.called.add(name)
        self._stage = max(self._stage, home)

    def _refuse_order(self, number: int, *, before: int) -> None:
        names = self._followed.blocks
        self._refuse(
            f"{names[number]} is called before {names[before]}, in another order than registered, or one of them is "
            "skipped or called again"
        )

    def _read(self, home: int, event: _Read) -> None:
        """Note that a stage reads what has these sources."""
        lacking: list[tuple[str, list[int]]] = []
        for source in event.sources:
            if isinstance(source, _Weight):
                words, stages = f"the weight {source.names[0]}", {self._homes[name] for name in source.names}
            elif isinstance(source, _Inner):
                words = f"a tensor that {source.part} makes and does not return"
                stages = {self._homes_of_calls[source.part, source.number]}
            else:
                continue
            if home not in stages:
                lacking.append((words, sorted(stages)))
        if lacking:
            words, where = min(lacking)  # the same in all processes
            self._refuse(f"stage {home + 1} needs {words}, which stage {' and '.join(str(s + 1) for s in where)} has")
        late: list[Key] = []
        for source in event.sources:
            if isinstance(source, _Made):
                name, number, place = source.key
                made = self._homes_of_calls[name, number]
                if made > home:
                    late.append(source.key)
                elif made < home:
                    readers = self.calls[name, number].readers
                    readers[place] = max(home, readers.get(place, 0))
        if late:
            name, number, _ = min(late)
            made = self._homes_of_calls[name, number]
            self._refuse(f"stage {home + 1} needs what {name} of stage {made + 1} returns")


class StageFollower:
    """Follows passes of a model that may be cut into stages.

    Args:
        outline: the model on the meta device, see `outline_of`.
        blocks: the names of its blocks.
    """

    def __init__(self, outline: nn.Module, blocks: Sequence[str]) -> None:
        self._outline, self._blocks = outline, blocks
        self._modules = dict(outline.named_modules())
        self._parts = parts_of(outline, [outline.get_submodule(name) for name in blocks])
        entries = set(outline.state_dict())
        self._weights: dict[str, str] = {}
        for name, part in self._parts.items():
            of_state = (full for own, _ in part.named_parameters() if (full := f"{name}.{own}") in entries)
            if (first := next(of_state, None)) is not None:
                self._weights[name] = first
            part.register_forward_pre_hook(self._open(name), with_kwargs=True)
            part.register_forward_hook(self._close)
            part.forward = self._tolerant(part)
        held: dict[StorageWeakRef, list[str]] = {}
        for name, parameter in outline.named_parameters(remove_duplicate=False):
            if name in entries:  # a tied weight is in the stage of each of its names
                held.setdefault(_storage_of(parameter), []).append(name)
        self._of_weights: dict[StorageWeakRef, _Sources] = {
            storage: frozenset({_Weight(tuple(names))}) for storage, names in held.items()
        }

    def follow(self, call: Callable[[nn.Module], Any], model: nn.Module | None = None) -> FollowedPass:
        """Follow a pass.

        Args:
            call: calls the outline with real inputs.
            model: whose modules are in training or evaluation mode as in that pass; None: in the outline's own.
        """
        if model is not None:
            modes = {name: module.training for name, module in model.named_modules()}
            for name, module in self._modules.items():
                module.training = modes.get(name, module.training)
        weight = next((self._outline if model is None else model).parameters(), None)
        device = torch.device("cpu") if weight is None else weight.device
        generators = GeneratorStates(device)
        self._begin()
        try:
            with torch.no_grad(), _Recorder(self), _Conversions(self):
                output = call(self._outline)
            for tensor in tensors_of(output):
                self._read(None, self._sources_of([tensor]))
        except Exception as error:  # noqa: BLE001 - whatever a model raises on tensors without values
            self._pass.error = error
        finally:
            generators.restore()
        return self._pass

    def _begin(self) -> None:
        """Forget the last pass."""
        self._pass = FollowedPass(type(self._outline).__name__, self._blocks, self._weights)
        self._counts: Counter[str] = Counter()
        self._sources: dict[StorageWeakRef, _Sources] = dict(self._of_weights)
        self._returned: dict[StorageWeakRef, set[Key]] = {}
        self._sums: set[StorageWeakRef] = set()  # results of `all`
        self._inside: _OpenCall | None = None

    def _open(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        has_weights = name in self._weights or name in self._blocks

        def begin(_part: nn.Module, args: Any, kwargs: Any) -> None:
            if self._inside is not None:  # a part that is called by another one
                return
            self._inside = _OpenCall(name, self._counts[name], has_weights, tensors_of((args, kwargs)))
            self._counts[name] += 1
            self._pass.events.append(_Open(self._inside.key))

        return begin

    def _close(self, part: nn.Module, _args: Any, output: Any) -> None:
        """Note a part's output."""
        opened = self._inside
        if opened is None or self._parts[opened.name] is not part:
            return
        self._inside = None
        if opened.has_numbers and any(isinstance(leaf, int | float | complex) for leaf in tree_leaves(output)):
            self._pass.events.append(
                f"{opened.name} returns a number that it computes with weights, and that is no tensor"
            )
        if not (opened.has_weights or opened.read):
            return  # of the samples alone
        given = {id(tensor): place for place, tensor in reversed(list(enumerate(opened.given)))}
        storages = {_storage_of(tensor) for tensor in opened.given}
        same: dict[int, int] = {}
        of_this_call: set[StorageWeakRef] = set()
        for place, tensor in enumerate(tensors_of(output)):
            storage = _storage_of(tensor)
            if id(tensor) in given and storage not in opened.changed:
                same[place] = given[id(tensor)]
            else:
                made = _Made((opened.name, opened.number, place))
                shared = self._sources.get(storage, _NONE) if storage in storages else _NONE
                self._sources[storage] = shared | {made}
                if storage not in of_this_call:
                    self._returned[storage] = set()
                self._returned[storage].add(made.key)
                of_this_call.add(storage)
                storages.add(storage)  # of several places in an output that are one tensor each is passed on
        meta = with_tensors(output, lambda tensor: torch.empty_like(tensor, device="meta"))
        self._pass.calls[opened.key] = PartCall(opened.name, opened.number, 0, meta, same)

    def _tolerant(self, part: nn.Module) -> Callable[..., Any]:
        """A part's forward pass, whose result is like its first tensor if it cannot be had without values."""
        forward = part.forward

        def tolerant(*args: Any, **kwargs: Any) -> Any:
            opened = self._inside
            if opened is None or self._parts[opened.name] is not part or not opened.has_weights:
                return forward(*args, **kwargs)
            try:
                return forward(*args, **kwargs)
            except Exception:  # sizes that depend on values, as those of experts' rows
                floating = [tensor for tensor in opened.given if tensor.is_meta and tensor.is_floating_point()]
                if not floating:
                    raise
                self._read(opened, self._sources_of(opened.given))
                return torch.empty_like(floating[0])

        return tolerant

    def _sources_of(self, tensors: Sequence[torch.Tensor]) -> _Sources:
        known = (self._sources.get(_storage_of(tensor), _NONE) for tensor in tensors)
        return _NONE.union(*known)

    def _read(self, reader: _OpenCall | None, sources: _Sources) -> None:
        """Note that a call, or what follows all calls, reads what has these sources."""
        if reader is not None:
            sources -= reader.read
            reader.read |= sources
        if sources:
            self._pass.events.append(_Read(None if reader is None else reader.key, sources))

    def ran(
        self, func: Any, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> None:
        """Note an operation: the tensors that it was given, its results, and those of its inputs that it changed."""
        sources = self._sources_of(given)
        opened = self._inside
        if opened is not None:
            self._read(opened, sources)
            if opened.has_weights:
                sources = frozenset({_Inner(*opened.key)})
            opened.changed |= {_storage_of(tensor) for tensor in written}
        known = {_storage_of(tensor) for tensor in given}
        for tensor in written:
            storage = _storage_of(tensor)
            self._sources[storage] = self._sources.get(storage, _NONE) | sources
            for name, number, place in self._returned.get(storage, ()):
                self._pass.calls[name, number].rewritten.add(place)
        for tensor in results:
            storage = _storage_of(tensor)
            if storage not in known:  # a view has its base's
                self._sources[storage] = sources
        if _name_of(func) == "all":
            self._sums |= {_storage_of(tensor) for tensor in results}

    def value_of(self, tensor: torch.Tensor) -> Any:
        """A number in place of one that weights would compute."""
        if self._inside is not None:
            self._inside.has_numbers = True
            self._read(self._inside, self._sources_of([tensor]))
        if tensor.dtype == torch.bool:
            return _storage_of(tensor) in self._sums
        return 0.0 if tensor.is_floating_point() else 1

    def reads_inputs(self) -> None:
        """Note that numbers of inputs decide on the pass."""
        self._pass.reads_inputs = True


class _Recorder(TorchDispatchMode):
    """Runs operations, on the meta device wherever one of their tensors is there, and records them in a follower."""

    def __init__(self, follower: StageFollower) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._follower = follower

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        written = [
            tensor
            for parameter, argument in _named(func, args, kwargs)
            if parameter.alias_info is not None and parameter.alias_info.is_write
            for tensor in tensors_of(argument)
        ]
        is_meta = any(tensor.is_meta for tensor in given)
        if _depends_on_numbers(func, given) and not all(tensor.is_meta for tensor in given):
            self._follower.reads_inputs()
        if is_meta:
            if _name_of(func) in ("_local_scalar_dense", "equal"):
                return self._follower.value_of(given[0])
            args, kwargs = tree_map_only(torch.Tensor, _on_meta, (_by_positions(func, args), kwargs))
        result = func(*args, **kwargs)
        results = tensors_of(result)
        self._follower.ran(func, given, results, written)
        if len(written) == 1 and isinstance(result, torch.Tensor) and not written[0].is_meta:
            return written[0]  # a real tensor that is changed by what weights compute
        return result


class _Conversions(TorchFunctionMode):
    """Notes in a follower where numbers of inputs are read without an operation."""

    def __init__(self, follower: StageFollower) -> None:
        super().__init__()
        self._follower = follower

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one function."""
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__):
            self._follower.reads_inputs()
        return func(*args, **(kwargs or {}))


def _by_positions(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an operation, with real masks that index replaced by the positions that they select."""
    if _name_of(func) not in ("index", "index_put", "index_put_"):
        return args
    indices: list[torch.Tensor | None] = []
    for index in args[1]:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8) and not index.is_meta
        indices += index.nonzero().unbind(1) if is_mask else [index]
    return args[0], indices, *args[2:]


def _depends_on_numbers(func: Any, given: Sequence[torch.Tensor]) -> bool:
    """Whether the numbers in what an operation is given decide on Python's way, or on the size of the result."""
    if _name_of(func) == "index":  # by positions the size of the result is that of the index
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in given[1:])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*getattr(func, "tags", ())})


def _storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    """The memory of a tensor and of all its views, by which they are known."""
    return StorageWeakRef(tensor.untyped_storage())


def _name_of(func: Any) -> str:
    """The name of an operation of PyTorch."""
    name: str = getattr(getattr(func, "overloadpacket", func), "__name__", "")
    return name


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The parameters of an operation that are given, with their arguments; none of one that has no schema."""
    schema = getattr(func, "_schema", None)
    for place, parameter in enumerate(schema.arguments if schema is not None else ()):
        if place < len(args):
            yield parameter, args[place]
        elif parameter.name in kwargs:
            yield parameter, kwargs[parameter.name]


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
