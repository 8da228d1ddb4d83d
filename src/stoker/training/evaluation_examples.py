"""Examples of held-out sets for the report: samples with the largest losses, the first samples, a confusion matrix.

What: for outputs that are class scores, and outputs shaped like their targets, the loss of each sample (cross-entropy,
mean squared error). Targets of other forms give the first samples only. Use when: once, at the end of a run.
Costs: a loss per sample, and a copy of a few of them. A failure here is a warning: it costs the run nothing.
Pictures are PNG files, written by the standard library alone. Source: W3C, "Portable Network Graphics (PNG)
Specification (Third Edition)", sections 5 (chunks) and 11.2 (IHDR, IDAT).
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from stoker.errors import first_line
from stoker.jobs.fields import Fields
from stoker.loading.fields import Content, tensors_of
from stoker.loading.lengths import IGNORED_TARGET
from stoker.loading.order import Indices
from stoker.records.codec import from_json, to_json
from stoker.records.run import Example, ExampleSet, ExampleSets
from stoker.stepping.world import World
from stoker.store import RunDirectory
from stoker.store.run_files import EXAMPLES
from stoker.training.rank_messages import gather_from_ranks

NUM_EXAMPLES = 12
MOST_CLASSES = 64
"""A confusion matrix of more classes is not drawn: it would not be readable."""

_MOST_VALUES = 16
_LARGEST_SIDE = 96
"""Largest side of a picture [pixels]; larger ones are thinned out."""


@dataclass
class ExampleWatcher:
    """Collects examples of one split in this process; see `stoker.training.evaluation.evaluate`.

    `name_of` gives a sample's name by its index; labels of `ignored` are not counted. `problem` is what went wrong;
    nothing is collected after that.
    """

    split: str
    fields: Fields
    classes: tuple[str, ...] = ()
    ignored: int = IGNORED_TARGET
    name_of: Callable[[int], str] = lambda _index: ""
    problem: str | None = None
    num_samples: int = 0
    _worst: list[Example] = field(default_factory=list)
    _first: list[Example] = field(default_factory=list)
    _confusion: torch.Tensor | None = None
    _pictures: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    _range: tuple[torch.Tensor, torch.Tensor] | None = None

    def see(self, output: Any, target: Any, content: Content, indices: Indices) -> None:
        """As `EvaluationWatcher.see`."""
        if self.problem is not None:
            return
        try:
            self._see(output, target, content, indices.tolist())
        except Exception as error:  # noqa: BLE001 - a picture must not cost a run its result
            self.problem = f"{type(error).__name__}: {error}"

    def miss(self, problem: Exception) -> None:
        """As `EvaluationWatcher.miss`."""
        self.problem = (
            f"the model cannot be called as named losses do: {type(problem).__name__}: {first_line(problem)}. "
            "stoker.Fields(inputs=…) names what goes into it"
        )

    @property
    def values(self) -> Scale | None:
        """Lowest and highest value of all pictures seen here; None without pictures."""
        return None if self._range is None else (float(self._range[0]), float(self._range[1]))

    def collected(self, world: World, scale: Scale | None) -> ExampleSet | None:
        """Examples of all processes, in each of them, with pictures on `scale`; None if there are none."""

        def drawn(example: Example) -> Example:
            pictures = {} if scale is None else self._pictures.get(example.index, {})
            pngs = {
                name: base64.b64encode(png_of(image, scale)).decode("ascii")
                for name, image in pictures.items()
                if scale is not None
            }
            return replace(example, **pngs)  # type: ignore[arg-type]  # names of its pictures

        counts = None if self._confusion is None else self._confusion.tolist()
        worst, first = ([drawn(example) for example in examples] for examples in (self._worst, self._first))
        mine = (world.data_rank, self.num_samples, to_json(worst), to_json(first), counts)
        # Of processes that share a part of the batch one has seen it, or all have.
        by_part = {part[0]: part for part in gather_from_ranks(world, mine) if part[1]}
        if not by_part:
            return None
        parts = [by_part[rank] for rank in sorted(by_part)]
        worst, first = ([from_json(item, Example) for part in parts for item in part[kind]] for kind in (2, 3))
        worst = sorted(worst, key=lambda example: (-(example.loss or 0.0), example.index))
        first = sorted(first, key=lambda example: example.index)
        matrices = [part[4] for part in parts if part[4] is not None]
        confusion = tuple(
            tuple(sum(cells) for cells in zip(*rows, strict=True)) for rows in zip(*matrices, strict=True)
        )
        return ExampleSet(
            split=self.split,
            num_samples=sum(part[1] for part in parts),
            worst=tuple(worst[:NUM_EXAMPLES]),
            first=tuple(first[:NUM_EXAMPLES]),
            confusion=confusion if matrices else None,
            classes=self.classes,
            scale=scale,
        )

    def _see(self, output: Any, target: Any, content: Content, indices: list[int]) -> None:
        self.num_samples += len(indices)
        losses = losses_by_sample(output, target, self.ignored)
        if losses is not None and are_classes(output, target):
            self._count(output, target)
        tensors: list[torch.Tensor] = []
        self.fields.map_inputs(content, lambda entry: tensors.extend(tensors_of(entry)))
        inputs = tensors[0] if tensors else None
        if inputs is not None and inputs.shape[:1] == (len(indices),) and _is_picture(inputs[0]):
            self._widen_range(inputs)
        missing = NUM_EXAMPLES - len(self._first)
        self._first += [
            self._example(row, indices, inputs, output, target, losses) for row in range(min(missing, len(indices)))
        ]
        if losses is not None:
            least = self._worst[-1].loss if len(self._worst) == NUM_EXAMPLES else None
            top = losses.topk(min(NUM_EXAMPLES, len(losses)))
            for loss, row in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                if least is None or loss > least:
                    self._worst.append(self._example(row, indices, inputs, output, target, losses))
            self._worst.sort(key=lambda example: (-(example.loss or 0.0), example.index))
            del self._worst[NUM_EXAMPLES:]
        kept = {example.index for example in (*self._worst, *self._first)}
        self._pictures = {index: picture for index, picture in self._pictures.items() if index in kept}

    def _widen_range(self, inputs: torch.Tensor) -> None:
        """Take pictures [B, C, H, W] into the range of values."""
        finite = inputs[inputs.isfinite()].float()
        if not finite.numel():
            return
        low, high = finite.aminmax()
        if self._range is not None:
            low, high = torch.minimum(low, self._range[0]), torch.maximum(high, self._range[1])
        self._range = (low, high)

    def _count(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """Add scores [B, classes] and labels [B] to the confusion matrix."""
        classes = output.shape[1]
        if classes > MOST_CLASSES:
            return
        valid = target != self.ignored
        pairs = target[valid] * classes + output.argmax(1)[valid]
        counts = torch.bincount(pairs, minlength=classes**2).view(classes, classes).cpu()
        self._confusion = counts if self._confusion is None else self._confusion + counts

    def _example(
        self,
        row: int,
        indices: Sequence[int],
        inputs: torch.Tensor | None,
        output: Any,
        target: Any,
        losses: torch.Tensor | None,
    ) -> Example:
        sample = None if inputs is None or inputs.shape[:1] != (len(indices),) else inputs[row].detach()
        is_picture = sample is not None and _is_picture(sample)
        made: dict[str, torch.Tensor] = {}
        if sample is not None and is_picture:
            made = _pictures_like(sample, output_picture=output, target_picture=target, row=row, batch=len(indices))
            drawn = {name: image for name, image in made.items() if name != "target_picture" or not image.equal(sample)}
            pictures = {"picture": sample, **drawn}
            self._pictures[indices[row]] = {name: thinned(image, _LARGEST_SIDE) for name, image in pictures.items()}
        return Example(
            index=indices[row],
            target="" if "target_picture" in made else self._target_text(target, row),
            output="" if "output_picture" in made else self._output_text(output, target, row),
            loss=None if losses is None else float(losses[row]),
            values=() if sample is None or is_picture else tuple(map(float, sample.flatten()[:_MOST_VALUES].tolist())),
            name=self.name_of(indices[row]),
        )

    def _target_text(self, target: Any, row: int) -> str:
        if not isinstance(target, torch.Tensor) or not target.dim():
            return ""
        label = target[row]
        return self._class(int(label)) if label.numel() == 1 and not label.is_floating_point() else _numbers(label)

    def _output_text(self, output: Any, target: Any, row: int) -> str:
        if not isinstance(output, torch.Tensor) or not output.dim():
            return ""
        if not are_classes(output, target):
            return _numbers(output[row])
        share, best = output[row].softmax(0).max(0)
        return f"{self._class(int(best))} ({100 * float(share):.0f} %)"

    def _class(self, number: int) -> str:
        return self.classes[number] if 0 <= number < len(self.classes) else str(number)


def collect_examples(watchers: Sequence[ExampleWatcher], world: World) -> tuple[ExampleSet, ...]:
    """Examples of several sets from all processes, with all pictures on one scale; every process calls this.

    On scales of their own, pictures that differ in brightness alone would look the same.
    """
    gathered = gather_from_ranks(world, [watcher.values for watcher in watchers])
    ranges = [limits for of_rank in gathered for limits in of_rank if limits]
    scale = (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None
    sets = [watcher.collected(world, scale) for watcher in watchers]
    return tuple(examples for examples in sets if examples is not None)


def are_classes(output: Any, target: Any) -> bool:
    """Whether outputs are scores of classes [B, classes] and targets labels [B]."""
    is_both = isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)
    return (
        is_both
        and output.dim() == 2
        and output.shape[1] > 1
        and target.shape == output.shape[:1]
        and output.is_floating_point()
        and not target.is_floating_point()
    )


def losses_by_sample(output: Any, target: Any, ignored: int = IGNORED_TARGET) -> torch.Tensor | None:
    """The loss of each sample [B], 0 of labels `ignored`; None where output and target are of other forms.

    Raises:
        ValueError: labels have no score, as of embeddings, or where a loss leaves some out. On a GPU the loss would end
            the process.
    """
    if are_classes(output, target):
        counted, classes = target[target != ignored], output.shape[1]
        low, high = map(int, counted.aminmax()) if counted.numel() else (0, 0)
        if low < 0 or high >= classes:
            raise ValueError(f"labels go from {low} to {high}, but outputs have {classes} scores")
        return F.cross_entropy(output.float(), target, reduction="none", ignore_index=ignored)
    is_both = isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)
    if not (is_both and output.shape == target.shape and output.dim() and output.is_floating_point()):
        return None
    squares: torch.Tensor = (output.float() - target.float()).square()
    return squares.flatten(1).mean(1) if squares.dim() > 1 else squares


def _pictures_like(sample: torch.Tensor, *, row: int, batch: int, **made: Any) -> dict[str, torch.Tensor]:
    """Outputs and targets [B, …] that are pictures of the sample's shape [C, H, W], flattened ones included.

    Of several outputs, such as a reconstruction with its mean and variance, the first is taken.
    """
    pictures: dict[str, torch.Tensor] = {}
    for name, value in made.items():
        first = value[0] if isinstance(value, tuple | list) and value else value
        if not isinstance(first, torch.Tensor) or not first.is_floating_point() or first.shape[:1] != (batch,):
            continue
        if first[row].numel() == sample.numel():
            pictures[name] = first[row].detach().reshape(sample.shape)
    return pictures


def _is_picture(sample: torch.Tensor) -> bool:
    """Whether a sample is an image [1 or 3, H, W] of more than a few pixels."""
    return sample.dim() == 3 and sample.shape[0] in (1, 3) and min(sample.shape[1:]) >= 4


def _numbers(tensor: torch.Tensor) -> str:
    """The first few values of a tensor."""
    flat = tensor.detach().float().flatten()
    text = ", ".join(f"{value:.4g}" for value in flat[:4].tolist())
    return f"{text}, … ({flat.numel():,})" if flat.numel() > 4 else text


_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _RGB = 0, 2

Scale = tuple[float, float]
"""The values of black and white."""


def thinned(image: torch.Tensor, largest_side: int) -> torch.Tensor:
    """Every n-th pixel of an image [C, H, W], so that no side is longer; a float32 copy on the CPU."""
    stride = max(1, -(-max(image.shape[1:]) // largest_side))
    return image[:, ::stride, ::stride].detach().to("cpu", torch.float32, copy=True)


def png_of(image: torch.Tensor, scale: Scale) -> bytes:
    """A PNG file of an image [1 or 3, H, W]; values beyond the scale and NaN are clamped to it."""
    low, high = scale
    share = ((image.float() - low) / max(high - low, 1e-12)).nan_to_num(0.0).clamp(0, 1)
    rows_HWC = (share * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    height, width, channels = rows_HWC.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _RGB if channels == 3 else _GREY, 0, 0, 0)
    unfiltered = b"".join(b"\0" + row.tobytes() for row in rows_HWC)
    data = zlib.compress(unfiltered, 9)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def write_examples(directory: RunDirectory, sets: tuple[ExampleSet, ...]) -> None:
    """Write examples into a run's directory; no file without examples.

    Raises:
        RunFailed: they cannot be written.
    """
    if sets:
        directory.write(EXAMPLES, ExampleSets(sets=sets))
