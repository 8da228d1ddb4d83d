"""What the findings of a data check are called, in the terminal and on the page."""

from __future__ import annotations

from stoker.records.cleaning import Fault, Gravity

FAULTS: dict[Fault, tuple[str, str]] = {
    "corrupt": ("corrupt", "cannot be decoded to its end"),
    "empty": ("empty file", "has no bytes"),
    "foreign": ("other file", "is no data by its name, and was not opened"),
    "extension": ("wrong extension", "is of another format than its name says; it can be read, and is kept"),
    "mode": ("odd mode", "has other channels than nearly all others"),
    "shape": ("odd size", "has another size or shape than nearly all others"),
    "blank": ("blank", "shows one colour"),
    "not-finite": ("not finite", "holds NaN or infinity"),
    "duplicate": ("duplicate", "is there twice in its split; the first is kept"),
    "near-duplicate": ("near duplicate", "looks like another of its split"),
    "leak": ("leak", "is in two splits; the one that measures keeps it"),
    "near-leak": ("near leak", "looks like one of another split"),
    "contradiction": ("contradiction", "has equal content under two labels"),
    "suspect-label": ("suspect label", "nearly all of its nearest neighbours carry one other label"),
    "unlabelled": ("no label", "has no label, where others have one"),
    "empty-class": ("empty class", "a class without a sample"),
    "imbalance": ("imbalance", "the largest class has ten times the samples of the smallest, or more"),
    "unknown-class": ("unknown class", "a class that training does not have"),
    "ragged": ("ragged", "has more or fewer values than it should"),
    "missing": ("missing values", "a column with values that are missing"),
    "missing-column": ("missing column", "lacks a column that others have"),
    "constant": ("constant column", "a column with one value"),
    "mixed-types": ("mixed types", "a value of another type than its column's, or a column of several"),
    "outlier": ("outlier", "a number far from the median of its column"),
    "out-of-vocabulary": ("out of vocabulary", "a category that training never has"),
    "target-leak": ("target leak", "a column that tells the target"),
    "empty-text": ("empty text", "nothing to read"),
    "encoding": ("encoding", "text that was not decoded as it was encoded"),
}
"""Fault: (its name, what is said of a sample, a column or a class that has it)."""

GRAVITY_COLOURS: dict[Gravity, str] = {"corrupt": "bad", "fault": "ember", "suspect": "amber", "note": "grey"}
"""Names of `palette.COLOURS`."""
