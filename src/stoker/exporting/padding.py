"""What inputs can be filled up with, so that samples of several sizes share a batch: proposed by name, then verified.

The names are those of the tokenizers and models of the transformers library: `attention_mask` is 1 for a token and 0
for what is to be passed over; what the other inputs hold there is then without effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from stoker.errors import BadArtifact
from stoker.exporting.checking import Answer, is_held, prove_padding
from stoker.exporting.trial import Trial
from stoker.records import BATCH, Proof, TensorSpec

_MASKS = ("attention_mask", "input_mask", "mask", "padding_mask")


def padded_specs(
    who: str,
    answer: Answer,
    trial: Trial,
    outputs: tuple[TensorSpec, ...],
    given: Mapping[str, float] | None,
    limit: float,
) -> tuple[tuple[TensorSpec, ...], tuple[Proof, ...]]:
    """The inputs with what they are filled up with, where that changes no answer; and the proof.

    Args:
        who: who answers, for the proof.
        answer: the model as it was before the export.
        trial: samples to ask.
        outputs: what it gives.
        given: what the user says about filling up, by input; None: a mask among the inputs proposes 0 for all.
        limit: see `checking`.

    Raises:
        BadArtifact: what the user said changes the answers.
    """
    proposal = _proposal(trial.inputs) if given is None else dict(given)
    if not proposal or not trial.sizes:
        return trial.inputs, ()
    specs = tuple(dataclasses.replace(spec, pad=proposal.get(spec.name)) for spec in trial.inputs)
    proof = prove_padding(who, answer, trial.with_inputs(specs), outputs, limit)
    if is_held(proof):
        return specs, (proof,)
    if given is not None:
        raise BadArtifact(
            f"Filling up with {dict(given)} changes answers: {proof.what}: {proof.error:.2g}, at most {limit:g}",
            remedy="Leave `pad` out: samples of one size then share a batch.",
        )
    return trial.inputs, ()


def _proposal(inputs: tuple[TensorSpec, ...]) -> dict[str, float]:
    masked = {dim for spec in inputs if spec.name in _MASKS for dim in spec.shape if isinstance(dim, str)} - {BATCH}
    return {spec.name: 0 for spec in inputs if masked & set(spec.shape) and spec.datatype != "BYTES"}
