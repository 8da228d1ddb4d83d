"""What compiled code keeps for the backward pass, by the rules of PyTorch's partitioner.

What: `torch.compile` cuts the graph of a region's two passes where the fewest bytes cross. Results of products,
convolutions, attention and random numbers, and of reductions to less than a quarter, are not computed again; nor is
what such an operation of the backward pass reads, for it has to be in memory then. The rest is computed again from what
is kept, if that is smaller. So an uncompiled pass keeps more: masks and steps of a written-out function, copies in full
precision of what is kept in half.
Use when: a trace is made of a GPU. Costs: one minimum cut for each region, milliseconds for a block.
Left out: the ban of chains of more than 100 fusible operations, and memory budgets (1 by default). A norm, a softmax
or a loss, which the compiler decomposes, is one operation here, whose sums are not counted.
Source: torch/_functorch/partitioners.py (`solve_min_cut`, `get_default_op_list`) of PyTorch 2.11 and 2.13; E. Dinitz,
"Algorithm for Solution of a Problem of Maximum Flow in Networks with Power Estimation", 1970.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

UNCOMPILED = "uncompiled"
"""The region of operations that are not compiled."""
LOSS = "loss"
"""The region of what is outside of the model."""


class Call(NamedTuple):
    """What an occurrence reads and writes, as numbers of storages, and the compiled region that it belongs to.

    `is_gradient`: autograd's engine runs it; the recomputation of a checkpointed block within a backward pass does not
    count.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    region: str
    is_gradient: bool


def region_of(module: str, regions: Iterable[str]) -> str:
    """The compiled region that a module is in, by dotted names; '' is the model."""
    within = (one for one in regions if not one or module == one or module.startswith(one + "."))
    return next(within, UNCOMPILED)


def kept_shares(calls: Sequence[Call], sizes: Sequence[int], outliving: Container[int]) -> list[float]:
    """Of each storage, the share of its bytes that compiled code holds in its place.

    It is 0 for what is computed again in the backward pass. What is kept in the stead of others, and is let go of by an
    uncompiled forward pass, is counted as a share of one of those.

    Args:
        calls: an update's, in order.
        sizes: of the storages [bytes], 0 of those that are there anyway, such as parameters.
        outliving: storages that an uncompiled forward pass leaves behind.
    """
    graphs, made_in = _graphs_of(calls, sizes)
    read = {storage for call in calls if call.is_gradient for storage in call.reads if storage in made_in}
    read = {storage for storage in read if sizes[storage]}
    room, unplaced = dict.fromkeys(read, 0), list[tuple[str, _Value, int]]()
    for region, graph in graphs.items():
        for value, num_bytes in graph.kept(is_compiled=region != UNCOMPILED):
            storage = value.storage
            if storage not in read:
                if storage not in outliving:
                    unplaced.append((region, value, num_bytes))
            elif made_in[storage] == region:
                room[storage] += num_bytes
            else:
                room[storage] = max(room[storage], num_bytes)
    dropped = [storage for storage in sorted(read) if not room[storage]]
    for region, value, num_bytes in unplaced:
        later = [one for one in dropped if one > value.storage and made_in[one] == region]
        # One that is as large is as large for each number of samples.
        instead = next((one for one in later if sizes[one] >= num_bytes), max(later, key=sizes.__getitem__, default=-1))
        if instead >= 0:
            room[instead] += num_bytes
    return [room[storage] / size if storage in read else 1.0 for storage, size in enumerate(sizes)]


def _graphs_of(calls: Sequence[Call], sizes: Sequence[int]) -> tuple[dict[str, _Graph], dict[int, str]]:
    """Both passes of each region, and the region in which each storage was written last."""
    graphs: defaultdict[str, _Graph] = defaultdict(lambda: _Graph(sizes))
    made_in: dict[int, str] = {}
    for call in calls:
        for storage in call.reads:
            if made_in.get(storage, call.region) != call.region:
                graphs[made_in[storage]].give_out(storage)
        if call.is_gradient:
            graphs[call.region].add_gradient(call)
        else:
            graphs[call.region].add(call)
            made_in.update(dict.fromkeys(call.writes, call.region))
    return graphs, made_in


@dataclass(eq=False, slots=True)
class _Value:
    """Contents of a storage: what one call has written into it, or what a region is given (`call` is None)."""

    storage: int
    num_bytes: int
    call: _Node | None
    users: list[_Node] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    """Operations of the backward pass that read it."""
    is_given_out: bool = False
    is_banned: bool = False
    """Whether it is not to be computed again."""


@dataclass(eq=False, slots=True)
class _Node:
    """An operation of the forward pass; `order` is its place."""

    order: int
    name: str
    reads: list[_Value]
    made: list[_Value] = field(default_factory=list)

    def __lt__(self, other: _Node) -> bool:
        return self.order < other.order


class _Graph:
    """Both passes of a compiled region."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._nodes: list[_Node] = []
        self._values: list[_Value] = []
        self._latest: dict[int, _Value] = {}

    def add(self, call: Call) -> None:
        """Add an operation of the forward pass."""
        node = _Node(len(self._nodes), call.name, [self._value(storage) for storage in dict.fromkeys(call.reads)])
        self._nodes.append(node)
        for value in node.reads:
            value.users.append(node)
        node.made = [self._new(storage, node) for storage in dict.fromkeys(call.writes)]

    def add_gradient(self, call: Call) -> None:
        """Note what an operation of the backward pass reads of the forward pass."""
        for place, storage in enumerate(call.reads):
            is_image = call.name == f"{_MAX_POOL}_backward" and place == 1
            if storage in self._latest and not is_image:
                self._latest[storage].gradients.append(call.name)

    def give_out(self, storage: int) -> None:
        """Note that what a storage holds is read elsewhere."""
        if storage in self._latest:
            self._latest[storage].is_given_out = True

    def kept(self, *, is_compiled: bool) -> list[tuple[_Value, int]]:
        """The values that are kept for the backward pass, and their bytes: the least that determine all that it needs.

        Uncompiled it keeps what it reads.
        """
        needed = [(value, value.num_bytes) for value in self._values if value.gradients]
        if not is_compiled or not needed:
            return needed
        self._ban()
        distances = self._distances()
        flow = _Flow(2 + 2 * len(self._values))
        numbers = {value: 2 + 2 * index for index, value in enumerate(self._values)}
        for value, number in numbers.items():
            if value.is_banned:
                flow.add(_SOURCE, number, math.inf)
            if value.gradients:
                flow.add(number + 1, _SINK, math.inf)
            flow.add(number, number + 1, self._weight(value, distances[value]))
            for user in value.users:
                for made in user.made:
                    flow.add(number + 1, numbers[made], math.inf)
        known = flow.reachable_after_cut()
        cut = (value for value, number in numbers.items() if number in known and number + 1 not in known)
        return [(value, value.num_bytes // (_BYTES_OF_INDEX if _is_index(value) else 1)) for value in cut]

    def _value(self, storage: int) -> _Value:
        return self._latest[storage] if storage in self._latest else self._new(storage, None)

    def _new(self, storage: int, node: _Node | None) -> _Value:
        value = _Value(storage, self._sizes[storage], node, is_banned=node is None)
        self._values.append(value)
        self._latest[storage] = value
        return value

    def _ban(self) -> None:
        """Mark what is not computed again."""
        for node in self._nodes:
            given = sum(value.num_bytes for value in node.reads)
            for value in node.made:
                is_reduced = 4 * value.num_bytes < given
                is_needed_whole = any(not _is_fused(value, name) for name in value.gradients)
                value.is_banned = not is_recomputable(node.name) or is_reduced or is_needed_whole
        for value in self._values:
            self._ban_far_users(value)

    def _ban_far_users(self, value: _Value) -> None:
        """What reads a value behind an operation that fuses with nothing would not fuse with what reads it before."""
        if len(value.users) < 2:
            return
        last = value.users[-1].order
        first_unfused = self._first_unfused(value.users, last)
        for user in value.users:
            if user.order > first_unfused and _is_fused(value, user.name):
                for made in user.made:
                    made.is_banned = True

    def _first_unfused(self, users: Sequence[_Node], last: int) -> int:
        """Place of the first operation that does not fuse with what it reads, of those that lead on from `users`."""
        heap = [(user.order, user, True) for user in users]
        heapq.heapify(heap)
        seen: set[tuple[int, bool]] = set()
        while heap:
            order, node, is_fused = heapq.heappop(heap)
            if not is_fused:
                return order
            for value in node.made:
                for user in value.users:
                    key = user.order, _is_fused(value, user.name)
                    if user.order <= last and key not in seen:
                        seen.add(key)
                        heapq.heappush(heap, (user.order, user, key[1]))
        return last

    def _distances(self) -> dict[_Value, int]:
        """Operations from each value to the backward pass, at most 100."""
        far: dict[_Value, int] = {}
        for node in reversed(self._nodes):
            for value in node.made:
                far[value] = self._distance(value, far)
        return far | {value: self._distance(value, far) for value in self._values if value.call is None}

    def _distance(self, value: _Value, far: dict[_Value, int]) -> int:
        if value.gradients:
            return 1
        return min((far[made] + 1 for user in value.users for made in user.made), default=_FARTHEST)

    def _weight(self, value: _Value, distance: int) -> int:
        """The partitioner's price of keeping a value, for which it has a guess of the memory that it takes by then."""
        is_in_memory = (
            value.call is None or value.is_given_out or not all(_is_fused(value, user.name) for user in value.users)
        )
        is_in_memory = is_in_memory or not all(_is_fused(value, name) for name in value.gradients)
        price = int(value.num_bytes * 1.1 ** max(min(distance, _FARTHEST), 1))
        return price if is_in_memory else 2 * price


_FARTHEST = 100
_MAX_POOL, _BYTES_OF_INDEX = "max_pool2d_with_indices", 8
"""The compiler's own form of it keeps offsets within a window in a byte each, and its gradient reads nothing else."""


def _is_index(value: _Value) -> bool:
    """Whether a value says where the maxima of a pool were."""
    return value.call is not None and value.call.name == _MAX_POOL and value is value.call.made[-1]


def _is_fused(value: _Value, reader: str) -> bool:
    """Whether an operation may be in the kernel that makes a value; what a region is given no kernel makes."""
    if reader in ("cat", "stack"):
        return True
    return value.call is not None and _is_fusible(value.call.name) and _is_fusible(reader)


def is_recomputable(name: str) -> bool:
    """Whether the partitioner lets the results of an operation of ATen be computed again."""
    return _is_fusible(name) and name.rstrip("_") not in _RANDOM


_RANDOM = frozenset({"bernoulli", "native_dropout", "rand_like", "randn_like", "rand", "randn"})
_TAKEN_APART = frozenset(
    {
        "_log_softmax",
        "_log_softmax_backward_data",
        "_softmax",
        "_softmax_backward_data",
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        "cudnn_batch_norm",
        "cudnn_batch_norm_backward",
        "embedding",
        "native_batch_norm",
        "native_batch_norm_backward",
        "native_dropout",
        "native_dropout_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "native_layer_norm",
        "native_layer_norm_backward",
        "nll_loss_backward",
        "nll_loss_forward",
        "select_backward",
        "slice_backward",
        "upsample_nearest2d",
    }
)
"""Operations that inductor writes as several that may be computed again, or as nothing else."""
_NOT_POINTWISE = frozenset(
    {
        "_to_copy",
        "amax",
        "amin",
        "any",
        "arange",
        "argmax",
        "clone",
        "copy",
        "empty",
        "empty_like",
        "fill",
        "full",
        "full_like",
        "gather",
        "index",
        "max",
        "mean",
        "min",
        "new_zeros",
        "ones",
        "ones_like",
        "scalar_tensor",
        "std",
        "sum",
        "triu",
        "tril",
        "var",
        "var_mean",
        "zero",
        "zeros",
        "zeros_like",
    }
)
"""Operations on the partitioner's list that are not pointwise."""


@functools.cache
def _is_fusible(name: str) -> bool:
    base = name.rstrip("_")  # in-place operations are rewritten
    if base in _TAKEN_APART or base in _NOT_POINTWISE or base in _RANDOM:
        return True
    packet = getattr(torch.ops.aten, base, None)
    overloads = () if packet is None else (getattr(packet, overload) for overload in packet.overloads())
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


_SOURCE, _SINK = 0, 1


class _Flow:
    """A network of capacities between numbered places, and the largest flow through it."""

    def __init__(self, num_places: int) -> None:
        self._edges: list[list[int]] = [[] for _ in range(num_places)]
        self._to: list[int] = []
        self._left: list[float] = []

    def add(self, start: int, stop: int, capacity: float) -> None:
        """Add an edge; the one back has the next number."""
        for here, there, left in ((start, stop, capacity), (stop, start, 0.0)):
            self._edges[here].append(len(self._to))
            self._to.append(there)
            self._left.append(left)

    def reachable_after_cut(self) -> set[int]:
        """The places on the source's side of a minimum cut."""
        while True:
            levels = self._levels()
            if _SINK not in levels:
                return set(levels)
            upcoming = [0] * len(self._edges)
            while self._push_along_path(levels, upcoming):
                pass

    def _levels(self) -> dict[int, int]:
        levels, queue = {_SOURCE: 0}, deque([_SOURCE])
        while queue:
            here = queue.popleft()
            for edge in self._edges[here]:
                if self._left[edge] > 0 and self._to[edge] not in levels:
                    levels[self._to[edge]] = levels[here] + 1
                    queue.append(self._to[edge])
        return levels

    def _push_along_path(self, levels: dict[int, int], upcoming: list[int]) -> bool:
        """Fill one path from source to sink; False if there is none left along rising levels."""
        path: list[int] = []
        here = _SOURCE
        while here != _SINK:
            edges = self._edges[here]
            while upcoming[here] < len(edges):
                edge = edges[upcoming[here]]
                there = self._to[edge]
                if self._left[edge] > 0 and levels.get(there) == levels[here] + 1:
                    break
                upcoming[here] += 1
            if upcoming[here] < len(edges):
                path.append(edges[upcoming[here]])
                here = self._to[path[-1]]
            elif path:
                here = self._to[path.pop() ^ 1]
                upcoming[here] += 1
            else:
                return False
        amount = min(self._left[edge] for edge in path)
        assert amount < math.inf, "what cannot be computed again can be kept"
        for edge in path:
            self._left[edge] -= amount
            self._left[edge ^ 1] += amount
        return True
