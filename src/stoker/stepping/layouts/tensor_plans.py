"""Tensor plans: how a model's layers are divided among the processes of a tensor group, by the names of its modules.

A plan comes from the model: its attribute `tensor_plan`, from a module's dotted name (with `*` for any part of it) to
one of WORDS or a `ParallelStyle` of PyTorch; Stoker's own models have theirs here; Hugging Face models carry one
(`_tp_plan` and the configuration's `base_model_tp_plan`), read as
https://huggingface.co/docs/transformers/perf_infer_gpu_multi describes it. Nothing here needs a process group.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from torch import nn

from stoker.records import Layout
from stoker.stepping.activation_checkpointing import repeated_blocks
from stoker.zoo import GPT, Llama

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


Word = Literal["colwise", "rowwise", "embedding", "output", "region", "sequence", "summed", "replicated"]
"""The role of a module.

`colwise` and `rowwise` linear layers are divided by outputs or by inputs; an `embedding` and the `output` layer by the
vocabulary, if it divides, and are whole otherwise. A `region` is a module that takes whole features, uses them in
divided layers alone, and returns a rowwise layer's output: an attention, an MLP. A `sequence` module works on a part of
the tokens where the layout says so: blocks, and the norm after them. Parameters of a `summed` module, as those within a
region, take part in some of the group's work only, and their gradients are added up.
"""

WORDS: tuple[str, ...] = get_args(Word)


@dataclass(frozen=True)
class Fused:
    """A colwise layer of `parts` concatenated matrices, such as queries, keys and values: each is divided."""

    parts: int


Rule: TypeAlias = "Word | Fused | ParallelStyle"
Rules = dict[str, Rule]
"""Rules by dotted name of a module."""

_DIVIDED = ("colwise", "rowwise")

_GPT: Rules = {
    "tokens": "embedding",
    "blocks.*": "sequence",
    "blocks.*.attention": "region",
    "blocks.*.attention.qkv": Fused(3),
    "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp": "region",
    "blocks.*.mlp.into": "colwise",
    "blocks.*.mlp.out": "rowwise",
    "norm": "sequence",
    "head": "output",
}
_LLAMA: Rules = {
    "tokens": "embedding",
    "blocks.*": "sequence",
    "blocks.*.attention": "region",
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp": "region",
    "blocks.*.mlp.gate": "colwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
    "norm": "sequence",
    "head": "output",
}
_HUGGING_FACE: dict[str, Word] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_rep": "output",
    "colwise_gather_output": "output",
    "embedding_rowwise": "embedding",
    "replicated": "replicated",
    "replicated_with_grad_allreduce": "summed",
}

_HOW = (
    "Give the model an attribute tensor_plan, from names of modules to "
    f'{", ".join(WORDS)}: for example {{"layers.*.up": "colwise", "layers.*.down": "rowwise"}}.'
)


@dataclass(frozen=True)
class TensorPlanProblem:
    """Why a layout does not go with a model, and the remedy."""

    message: str
    remedy: str


def rules_of(model: nn.Module) -> Rules | TensorPlanProblem:
    """The rule of each module that has one, in the order of registration."""
    patterns = _patterns(model)
    if isinstance(patterns, TensorPlanProblem):
        return patterns
    names = [name for name, _ in model.named_modules() if name]
    rules: Rules = {}
    for pattern, rule in patterns.items():
        as_deep = [name for name in names if name.count(".") == pattern.count(".")]  # a `*` is one part of a name
        matching = fnmatch.filter(as_deep, pattern)
        if not matching:
            return TensorPlanProblem(f"tensor_plan of {type(model).__name__}: {pattern!r} matches no module", _HOW)
        rules.update(dict.fromkeys(matching, rule))
    # An embedding that shares its weight with the output layer is divided like it, even if no plan says so.
    modules = dict(model.named_modules())
    outputs = {id(getattr(modules[name], "weight", None)) for name, rule in rules.items() if rule == "output"}
    for name, module in modules.items():
        if isinstance(module, nn.Embedding) and id(module.weight) in outputs:
            rules.setdefault(name, "embedding")
    return {name: rules[name] for name in names if name in rules}


def tensor_plan_problem(model: nn.Module, layout: Layout) -> str | None:
    """Why the model's layers cannot be divided as the layout says, and the remedy; None where they can."""
    problem = first_problem(model, layout)
    return None if problem is None else f"{problem.message}. {problem.remedy}"


def first_problem(model: nn.Module, layout: Layout) -> TensorPlanProblem | None:
    """As `tensor_plan_problem`, message and remedy separate."""
    if layout.tensor == 1:
        return None
    rules = rules_of(model)
    if isinstance(rules, TensorPlanProblem):
        return rules
    modules = dict(model.named_modules())
    for name, rule in rules.items():
        if problem := _of_kind(name, rule, modules[name]) or _undivided(name, rule, modules, layout.tensor):
            return problem
    return _of_sequence(model, rules, layout) if layout.sequence else None


def is_divided_by_vocabulary(module: nn.Module, tensor: int) -> bool:
    """Whether the vocabulary of an embedding or output layer divides; the layer is kept whole otherwise."""
    if isinstance(module, nn.Embedding):
        # Frequencies are of all tokens, and a process sees those of its own rows.
        sees_all = module.max_norm is not None or module.sparse or module.scale_grad_by_freq
        return module.num_embeddings % tensor == 0 and not sees_all
    return isinstance(module, nn.Linear) and module.out_features % tensor == 0


def divided_dimensions(model: nn.Module, tensor: int) -> dict[str, int]:
    """The dimension along which each divided parameter is divided, by name; others are whole in every process.

    Assumes that `tensor_plan_problem` is None, and leaves out parameters that a ParallelStyle of PyTorch divides.
    """
    rules = rules_of(model)
    modules = dict(model.named_modules())
    found: dict[str, int] = {}
    for name, rule in () if isinstance(rules, TensorPlanProblem) else rules.items():
        module = modules[name]
        of_vocabulary = rule in ("embedding", "output") and is_divided_by_vocabulary(module, tensor)
        if rule == "rowwise":
            found[f"{name}.weight"] = 1
        elif of_vocabulary or isinstance(rule, Fused) or rule == "colwise":
            found[f"{name}.weight"] = 0
            # A fused layer's bias stays whole: of its parts FSDP could not divide what is divided already.
            if not isinstance(rule, Fused) and getattr(module, "bias", None) is not None:
                found[f"{name}.bias"] = 0
    return found


def _patterns(model: nn.Module) -> Mapping[str, Rule] | TensorPlanProblem:
    """The model's own plan, with patterns."""
    own: Any = getattr(model, "tensor_plan", None)
    if own is not None:
        for pattern, rule in own.items():
            if not (rule in WORDS if isinstance(rule, str) else isinstance(rule, Fused) or hasattr(rule, "_apply")):
                return TensorPlanProblem(f"tensor_plan of {type(model).__name__}: {pattern!r} is to be {rule!r}", _HOW)
        checked: Mapping[str, Rule] = own
        return checked
    if isinstance(model, GPT | Llama):
        return _GPT if isinstance(model, GPT) else _LLAMA
    given = dict(_hugging_face(model))
    if not given:
        return TensorPlanProblem(
            f"it is not known how to divide the layers of {type(model).__name__} among processes", _HOW
        )
    if unknown := sorted({style for style in given.values() if style not in _HUGGING_FACE}):
        return TensorPlanProblem(f"the plan that {type(model).__name__} carries has {unknown[0]!r}, unknown here", _HOW)
    return {pattern: _HUGGING_FACE[style] for pattern, style in given.items()}


def _hugging_face(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Patterns and styles of a Hugging Face model, its base model's first."""
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    dotted = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    names = [name for name, _ in model.named_modules()]
    own = getattr(model, "_tp_plan", None)
    plan = {f"{dotted}{key}": style for key, style in base.items()} | (dict(own) if isinstance(own, Mapping) else {})
    for pattern, style in plan.items():
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):  # plans name parts that a variant may lack
            yield pattern, style


def _of_kind(name: str, rule: Rule, module: nn.Module) -> TensorPlanProblem | None:
    """The problem of a rule for a layer of another kind."""
    expected: type[nn.Module] | None = None
    if isinstance(rule, Fused) or rule in (*_DIVIDED, "output"):
        expected = nn.Linear
    elif rule == "embedding":
        expected = nn.Embedding
    if expected is None or type(module) is expected:
        return None
    kind = rule if isinstance(rule, str) else "fused"
    return TensorPlanProblem(
        f"{name} is to be {kind}, but is a {type(module).__name__}, not an nn.{expected.__name__}", _HOW
    )


def _undivided(name: str, rule: Rule, modules: dict[str, nn.Module], tensor: int) -> TensorPlanProblem | None:
    """The problem of a layer whose heads or features the group's size does not divide."""
    module: Any = modules[name]
    parts = rule.parts if isinstance(rule, Fused) else 1
    if isinstance(rule, Fused) or rule == "colwise":
        size = module.out_features // parts
    elif rule == "rowwise":
        size = module.in_features
    else:
        return None
    parent = modules[name.rpartition(".")[0]]
    head_dim = getattr(parent, "head_dim", None)
    is_of_heads = isinstance(head_dim, int) and head_dim > 0 and size % head_dim == 0
    count, unit = (size // head_dim, "heads") if is_of_heads and head_dim else (size, "features")
    if module.out_features % parts or count % tensor:
        return TensorPlanProblem(
            f"{name} has {count} {unit}, which {tensor} tensor-parallel processes do not divide",
            f"Use a tensor group of {_divisors(count)}.",
        )
    return None


def _of_sequence(model: nn.Module, rules: Rules, layout: Layout) -> TensorPlanProblem | None:
    """Why the model cannot be divided along the sequence."""
    starts = [name for name, rule in rules.items() if rule == "sequence"]
    blocks = {id(block) for block in repeated_blocks(model)}
    modules = dict(model.named_modules())
    if not starts or id(modules[starts[0]]) not in blocks or "output" not in rules.values():
        return TensorPlanProblem(
            f"the layers of {type(model).__name__} cannot be divided along the sequence: its plan names no blocks as "
            '"sequence" with an "output" layer at the end',
            'Use sequence=False, or say "sequence", "region" and "output" in tensor_plan.',
        )
    parents = {name.rpartition(".")[0] for name, rule in rules.items() if rule in _DIVIDED or isinstance(rule, Fused)}
    if outside := sorted(parent for parent in parents if rules.get(parent) != "region"):
        return TensorPlanProblem(
            f'{outside[0]} has divided layers, but is no "region"', "Use sequence=False, or say so."
        )
    context = getattr(model, "context", None)
    if isinstance(context, int) and context % layout.tensor:
        return TensorPlanProblem(
            f"a context of {context} tokens cannot be divided along the sequence among {layout.tensor} processes",
            f"Use sequence=False, or a tensor group of {_divisors(context)}.",
        )
    return None


def _divisors(count: int) -> str:
    divisors = [size for size in range(2, min(count, 1024) + 1) if count % size == 0]
    return ", ".join(map(str, divisors[:12])) or "1"
