"""Rows of published measurements, as different programs write them."""

from __future__ import annotations

import pytest

from bench.forecast.gpu_labels import Label

ROW = {
    "device": "Tesla_V100-PCIE-32GB",
    "model": "bert_large",
    "mode": "train",
    "seqlen": "512",
    "batch": "2",
    "option": "",
    "num_layer": "24",
    "e2e_ms": "234.0",
    "forward_ms": "83.0",
    "backward_ms": "151.0",
}


def test_a_row_is_read_with_its_units() -> None:
    """Milliseconds become seconds, a device's name loses its spelling."""
    label = Label.of(ROW)
    assert (label.device, label.tokens, label.batch, label.layers) == ("tesla v100 pcie 32gb", 512, 2, 24)
    assert (label.is_training, label.is_compiled) == (True, False)
    assert (label.seconds, label.forward_s, label.backward_s) == pytest.approx((0.234, 0.083, 0.151))


def test_numbers_that_a_data_frame_wrote_are_the_same() -> None:
    """`512.0` is 512, and `nan` is nothing."""
    written = {**ROW, "seqlen": "512.0", "batch": "2.0", "num_layer": "24.0", "option": "nan"}
    assert Label.of(written) == Label.of(ROW)


@pytest.mark.parametrize("absent", ["", "nan", "NaN", "null", " ", None])
def test_what_is_absent_is_no_option_and_no_depth(absent: str | None) -> None:
    """However it is written, the step is eager and the depth the model's own."""
    label = Label.of({**ROW, "option": absent, "num_layer": absent, "forward_ms": absent})
    assert (label.is_compiled, label.layers, label.forward_s) == (False, None, None)
    without = {key: value for key, value in ROW.items() if key not in {"option", "num_layer", "forward_ms"}}
    assert Label.of(without) == label


def test_a_depth_of_nought_is_the_models_own() -> None:
    """The published files write 0 where they do not say."""
    assert Label.of({**ROW, "num_layer": "0"}).layers is None
    assert Label.of({**ROW, "num_layer": "6"}).layers == 6


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"option": "dp4"}, "several devices"),
        ({"mode": "serve"}, "neither inf nor train"),
        ({"device": "nan"}, "device is missing"),
        ({"seqlen": "512.5"}, "no whole number"),
        ({"batch": "0"}, "at least 1"),
        ({"e2e_ms": "nan"}, "no time"),
        ({"e2e_ms": "-1"}, "no time"),
        ({"e2e_ms": "inf"}, "no time"),
    ],
)
def test_what_cannot_be_modelled_is_refused_with_a_reason(change: dict[str, str], reason: str) -> None:
    """Nothing is guessed in its place."""
    with pytest.raises((LookupError, ValueError), match=reason):
        Label.of({**ROW, **change})


def test_the_labels_that_a_constant_was_judged_from_are_known() -> None:
    """Three of training on one V100, and all of the T4."""
    assert Label.of(ROW).is_judged_on
    assert not Label.of({**ROW, "mode": "inf"}).is_judged_on
    assert not Label.of({**ROW, "batch": "4"}).is_judged_on
    assert not Label.of({**ROW, "device": "Tesla_P4"}).is_judged_on
    assert Label.of({**ROW, "device": "Tesla_T4", "mode": "inf"}).is_judged_on
