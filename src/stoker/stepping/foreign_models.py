"""Models of other libraries as a Step needs them: made plain, their outputs and their own losses understood.

Plain modules of PyTorch are left as they are. Of Hugging Face models, also within another module, the cache of keys and
values, which is for generating, is switched off in `config`: in training it takes memory, and a block that is computed
twice would fill it twice (`generation_config` is not touched). Keras 3 on PyTorch: see `stoker.stepping.keras_models`.

A model may return a tensor, or an object with an attribute or entry `logits`, as those of Hugging Face do; named
losses and metrics, and PyTorch's own loss modules, get the logits. A user's own functions get the model's output.
`loss="own"` is for models that take their labels and return their mean loss: as `.loss` or the entry `loss`, or as the
one scalar in a tuple such as (logits, loss) or in a dict, or alone. It becomes a sum again by the number of labels that
it is a mean of, so that micro-batches add up; if that number is another one, the probe of coupling finds that parts do
not add up to the whole, and batches are not cut.
Source: `transformers/loss/loss_utils.py` of transformers 5.23: cross-entropies are means over labels that are not -100,
those of causal language models over all labels but each sample's first one; regressions are means over elements.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
from torch import nn

from stoker import stepping
from stoker.errors import BadJob
from stoker.jobs import Job, Loss
from stoker.jobs.fields import Fields
from stoker.loading.fields import Content


def adopt_model(model: Any) -> nn.Module:
    """`model`, changed in place or wrapped; what is no module as it is."""
    if is_keras(model) and isinstance(model, nn.Module):
        return stepping.keras_models.KerasModel(model)
    pretrained = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    module: nn.Module = model
    for part in module.modules() if isinstance(model, nn.Module) else ():
        config: Any = getattr(part, "config", None) if part is model or isinstance(part, pretrained) else None
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False
    return module


def merge_adapters(model: nn.Module) -> nn.Module:
    """`model` with low-rank adapters of peft merged into the weights they adapt, in place; others as they are."""
    merge = getattr(model, "merge_and_unload", None)
    return merge() if callable(merge) else model


def fresh_keras_names() -> contextlib.AbstractContextManager[None]:
    """Within the context a Keras model is made under the layer names that it has in every process."""
    if "keras" not in sys.modules or sys.modules["keras"].backend.backend() != "torch":
        return contextlib.nullcontext()
    return stepping.keras_models.fresh_names()


def is_keras(model: object) -> bool:
    """Whether it is a model or layer of Keras."""
    layer = getattr(sys.modules.get("keras"), "Layer", None)
    return layer is not None and isinstance(model, layer)


def is_foreign(model: object) -> bool:
    """Whether it is a Keras model that computes by another library than PyTorch."""
    return is_keras(model) and not isinstance(model, nn.Module)


_IGNORED = -100
_HALVES = (torch.bfloat16, torch.float16)
_SHIFTING = ("ForCausalLM", "CsmForConditionalGeneration")
_DECODING = "ForConditionalGeneration"
"""Shifts its labels where one stack of layers does all, as in models of images and text; not with an encoder."""


def scores(output: Any) -> Any:
    """The tensor in a model's output that named losses are computed from; the output itself if it has no logits."""
    if isinstance(output, torch.Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return logits if isinstance(logits, torch.Tensor) else output


def in_full_precision(output: Any) -> Any:
    """`output` of the same type, its tensors in half precision as float32."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype in _HALVES else output
    if isinstance(output, Mapping):
        widened = {key: in_full_precision(value) for key, value in output.items()}
        if type(output) is dict or all(widened[key] is value for key, value in output.items()):
            return widened if type(output) is dict else output
        changed: Any = copy.copy(output)  # an object of the library's, whose entries are attributes as well
        for key, value in widened.items():
            changed[key] = value
        return changed
    if type(output) in (tuple, list):
        return type(output)(map(in_full_precision, output))
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(in_full_precision, output))
    return output


def shifts_labels(model: Any) -> bool:
    """Whether a model compares each token with the next label, so that the input tokens are its labels."""
    kind = loss_kind(model)
    if kind == _DECODING:
        return not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return kind in _SHIFTING


def loss_kind(model: Any) -> str | None:
    """Hugging Face's name of a model's loss, such as `ForCausalLM`; None for other models."""
    if not hasattr(model, "config") or not hasattr(model, "loss_function"):
        return None
    named = getattr(model, "loss_type", None)
    return str(named) if named else "ForCausalLM"  # the default of such a model


def require_aligned(job: Job, model: Any, content: Content) -> None:
    """Refuse a comparison of each token with itself.

    Raises:
        BadJob: the loss is the token cross-entropy, and the labels are the tokens that go into a causal model.
    """
    if job.objective.loss != "token_cross_entropy" or not isinstance(content, Mapping) or not shifts_labels(model):
        return
    tokens, labels = content.get("input_ids"), job.fields.target_of(content)
    are_tokens = isinstance(tokens, torch.Tensor) and isinstance(labels, torch.Tensor) and tokens.shape == labels.shape
    if are_tokens and bool(((labels == tokens) | (labels == _IGNORED)).all()):
        raise BadJob(
            f"{type(model).__name__} is given its own input tokens as labels, and token_cross_entropy compares each "
            "token's logits with the label in its place",
            remedy='Use loss="own", by which the model shifts them, or give each token the next one as its label.',
        )


class OwnLoss:
    """The mean loss that a model returns, as a sum and a count.

    Args:
        fields: of the job; the model takes the entries of dict samples by name and those of others by position, with
            the target last.
    """

    def __init__(self, fields: Fields) -> None:
        self._fields = fields

    def call(self, model: Callable[..., Any], content: Content) -> Any:
        """The model's output for a batch with its labels.

        Raises:
            BadJob: the model is one of Hugging Face's, whose arguments have another order, and samples are no dicts.
        """
        chosen = self._fields.inputs
        if not isinstance(content, Mapping):
            if loss_kind(model) is not None:
                raise BadJob(
                    'loss="own" hands samples to such a model by name, labels included, and these are no dicts',
                    remedy='Give data as {"input_ids": …, "labels": …}, by the names of the model\'s arguments.',
                )
            if chosen is None:
                return model(*content) if isinstance(content, tuple | list) else model(content)
            return self._fields.call(lambda *inputs: model(*inputs, self._fields.target_of(content)), content)
        if chosen is None:
            return model(**content)
        names = [chosen] if isinstance(chosen, str | int) else list(chosen)
        names += [] if self._fields.target is None or self._fields.target in names else [self._fields.target]
        return model(**{str(name): content[name] for name in names})

    def of(self, model: Any, output: Any, content: Content) -> Loss | torch.Tensor:
        """The loss in an output; a bare scalar where there are no labels to count.

        Raises:
            BadJob: the model did not return one scalar that can be its loss.
        """
        mean = _own_mean(output)
        mean = mean.float() if mean.dtype in _HALVES else mean
        labels = self._fields.target_of(content)
        if not isinstance(labels, torch.Tensor):
            return mean
        count = num_labels(model, labels)
        # The mean of no label is nan, and nan times 0 too; a batch without labels teaches nothing.
        total = torch.where(torch.as_tensor(count, device=mean.device) > 0, mean, 0.0) * count
        return Loss(total, count)

    def aligned(self, model: Any, output: Any, target: Any) -> tuple[Any, Any]:
        """Logits and labels, shifted so that each is at the position that it is compared with."""
        logits = scores(output)
        if isinstance(output, tuple | list) and logits is output:
            logits = next((item for item in output if isinstance(item, torch.Tensor) and item.dim()), output)
        is_of_tokens = isinstance(logits, torch.Tensor) and logits.dim() == 3
        return (logits[:, :-1], target[:, 1:]) if is_of_tokens and shifts_labels(model) else (logits, target)


def _own_mean(output: Any) -> torch.Tensor:
    """The mean loss in a model's output.

    Raises:
        BadJob: there is none, or nothing says which of several scalars it is.
    """
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if _is_loss(named):
        return named
    items = output.values() if isinstance(output, Mapping) else output
    losses = [item for item in (items if isinstance(output, Mapping | tuple | list) else [output]) if _is_loss(item)]
    if len(losses) == 1:
        return losses[0]
    has = f"{len(losses)} scalars, none of them called `loss`" if losses else "no scalar"
    raise BadJob(
        f'loss="own" needs a model that returns its mean loss, and this one returned a {_described(output)}: {has}',
        remedy="Return one scalar, as `.loss`, under 'loss', or as in (logits, loss); if it needs labels for that, let "
        "the samples have the entry that it takes them from. Or give another loss.",
    )


def _is_loss(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and not value.dim() and value.is_floating_point()


def _described(output: Any) -> str:
    """The types in a model's output: `tuple (tensor [16, 2], NoneType)`."""
    if isinstance(output, Mapping):
        return f"{type(output).__name__} with the entries {', '.join(map(repr, output))}"
    if isinstance(output, tuple | list):
        parts = [f"tensor {list(o.shape)}" if isinstance(o, torch.Tensor) else type(o).__name__ for o in output]
        return f"{type(output).__name__} ({', '.join(parts)})"
    return f"tensor {list(output.shape)}" if isinstance(output, torch.Tensor) else type(output).__name__


def num_labels(model: Any, labels: torch.Tensor) -> torch.Tensor | int:
    """Number of labels that the mean loss of `model` is a mean of."""
    if labels.is_floating_point():
        return labels.numel()
    if labels.dim() > 1 and shifts_labels(model):
        labels = labels[..., 1:]
    return (labels != _IGNORED).sum()
