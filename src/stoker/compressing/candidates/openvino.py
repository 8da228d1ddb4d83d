"""Candidates that OpenVINO runs: in fp32, in bf16, and in int8 as NNCF quantises.

What: int8 static quantisation after training. Scales of weights are per channel, those of activations per tensor, taken
from calibration rows; biases are corrected for the mean error. "SmoothQuant" first moves outliers of activations into
the weights, which transformers need.
Use when: the CPU has 8-bit dot products (VNNI, AMX), where it is 1.5 to 2 times as fast as bf16.
Costs: seconds; some accuracy, which the search measures.
Source: Nagel et al. 2021, https://arxiv.org/abs/2106.08295 (quantisation after training, bias correction); Xiao et al.
2022, https://arxiv.org/abs/2211.10438 (SmoothQuant); NNCF's documentation of `nncf.quantize`.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from stoker.compressing.candidates.base import CannotMake, Made, Workshop, explained
from stoker.compressing.candidates.ir import read, saved

Style = Literal["min-max", "mixed", "percentile", "smooth"]
"""How scales are found: extremes; the same, activations of either sign with a zero point; extremes without outliers;
after SmoothQuant."""


def as_it_is(workshop: Workshop, directory: Path) -> Made:
    """The graph in OpenVINO's own format."""
    with explained("OpenVINO"):
        return saved(read(workshop.source.graph_path), directory)


def halved(workshop: Workshop, directory: Path) -> Made:
    """The graph with its weights stored in fp16, which bf16 is computed from: half the size."""
    with explained("OpenVINO"):
        return saved(read(workshop.source.graph_path), directory, halve=True)


def quantised(workshop: Workshop, directory: Path, style: Style) -> Made:
    """The graph in int8."""
    with explained("NNCF"):
        return saved(quantised_model(workshop, style), directory)


def quantised_model(workshop: Workshop, style: Style) -> Any:
    """The graph in int8, in memory.

    Raises:
        CannotMake: NNCF is not installed.
    """
    nncf = _nncf()
    rows = list(workshop.calibration_inputs())
    settings: dict[str, Any] = {}
    if style == "smooth":
        settings["model_type"] = nncf.ModelType.TRANSFORMER
    if style in {"mixed", "percentile"}:
        settings["preset"] = nncf.QuantizationPreset.MIXED
    if style == "percentile":
        ranges = nncf.quantization.range_estimator.RangeEstimatorParametersSet.MEAN_NO_OUTLIERS_MINMAX
        settings["advanced_parameters"] = nncf.AdvancedQuantizationParameters(activations_range_estimator_params=ranges)
    with _quietly():
        model = read(workshop.source.graph_path)
        return nncf.quantize(model, nncf.Dataset(rows), subset_size=len(rows), **settings)


def _nncf() -> Any:
    try:
        with _quietly():
            import nncf  # noqa: PLC0415 - an extra, which is loaded where it is used
    except ImportError as error:
        raise CannotMake("nncf is not installed", remedy="pip install 'stoker[compress]'") from error
    return nncf


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the bars and notes that NNCF writes while it works."""
    logger = logging.getLogger("nncf")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
