"""What shall be read of a table: which columns, as what, and what becomes of missing values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from stoker.data.files.source import class_names, require_choice
from stoker.errors import BadJob

Format = Literal["csv", "parquet", "jsonl"]
TargetKind = Literal["auto", "class", "integer", "number"]
Missing: TypeAlias = "str | float | Mapping[str, str | float] | None"
"""What a missing value becomes: an error (None), "mean", a number, or "drop" for its row; or that by column."""


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """A table as a user describes it; names of columns are theirs.

    `features` None means every column that is not named otherwise. `categories` and `classes` hold the values that are
    known in the order of their numbers, None where they are found. `means` are those of another table, by column.
    """

    format: Format
    features: tuple[str, ...] | None
    categories: tuple[tuple[str, tuple[str, ...] | None], ...]
    text: tuple[str, ...]
    target: str | None
    target_kind: TargetKind
    classes: tuple[str, ...] | None
    missing: tuple[tuple[str, str | float | None], ...]
    missing_else: str | float | None
    delimiter: str
    means: tuple[tuple[str, float], ...] = ()
    is_like: bool = False
    """Whether it describes a part, such as a validation file, of what another table was read for."""

    def for_missing(self, column: str) -> str | float | None:
        """What a missing value of `column` becomes."""
        return dict(self.missing).get(column, self.missing_else)

    def with_features(self, header: Sequence[str]) -> tuple[str, ...]:
        """The columns of features, where the table has these columns."""
        if self.features is not None:
            return self.features
        named = {*(name for name, _ in self.categories), *self.text, self.target}
        return tuple(name for name in header if name not in named)

    def columns(self, features: Sequence[str]) -> tuple[str, ...]:
        """All columns that are read."""
        last = () if self.target is None else (self.target,)
        return tuple(dict.fromkeys([*features, *(name for name, _ in self.categories), *self.text, *last]))

    def text_of(self) -> str:
        """Everything in it, for digests."""
        return json.dumps({name: getattr(self, name) for name in self.__dataclass_fields__})


def table_spec(  # noqa: PLR0913 - what can be said of a table
    table_format: Format,
    *,
    features: Sequence[str] | None,
    target: str | None,
    categories: Sequence[str] | Mapping[str, Sequence[str] | None],
    text: Sequence[str],
    target_kind: str,
    classes: Sequence[str] | None,
    missing: Missing,
    delimiter: str = ",",
) -> TableSpec:
    """The record of a user's words.

    Raises:
        BadJob: one of them cannot be meant.
    """
    require_choice("target_kind=…", target_kind, ("auto", "class", "integer", "number"))
    known = dict(categories) if isinstance(categories, Mapping) else dict.fromkeys(_words("categories", categories))
    spec = TableSpec(
        format=table_format,
        features=None if features is None else _words("features", features),
        categories=tuple((name, None if values is None else class_names(values)) for name, values in known.items()),
        text=_words("text", text),
        target=target,
        target_kind=cast("TargetKind", target_kind),
        classes=None if classes is None else class_names(classes),
        missing=tuple(missing.items()) if isinstance(missing, Mapping) else (),
        missing_else=None if isinstance(missing, Mapping) else missing,
        delimiter=delimiter,
    )
    _require_sense(spec)
    return spec


def _words(what: str, given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise BadJob(f"{what}={given!r} is one word", remedy=f"Give a list of columns: {what}=[{given!r}].")
    return tuple(given)


def _require_sense(spec: TableSpec) -> None:
    roles = [*(spec.features or ()), *(name for name, _ in spec.categories), *spec.text, *filter(None, [spec.target])]
    twice = sorted({name for name in roles if roles.count(name) > 1})
    if twice:
        raise BadJob(f"the column {twice[0]!r} is named for two things", remedy="Name it in one place.")
    if spec.classes is not None and spec.target_kind not in ("auto", "class"):
        raise BadJob(f'classes=… and target_kind="{spec.target_kind}" exclude each other')
    if spec.target is None and spec.classes is not None:
        raise BadJob("classes=… are of a target, and none is named", remedy="Name its column: target=….")
    numbers = {*(spec.features or ())}
    for column, choice in (*spec.missing, ("features", spec.missing_else)):
        if isinstance(choice, str) and choice not in ("mean", "drop") and column in {*numbers, "features"}:
            raise BadJob(
                f"missing={choice!r} of {column!r} is not known",
                remedy='Give "mean", "drop", or a number; for a category any word.',
            )
