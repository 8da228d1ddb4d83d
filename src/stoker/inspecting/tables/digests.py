"""Rows by digests of their values: what is there twice, in two splits, or with two targets. 44 bytes a row."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from stoker.inspecting.groups import groups_of
from stoker.inspecting.sources.splits import AGAINST, rank
from stoker.inspecting.tables.roles import Roles
from stoker.inspecting.tables.rows import Batch, Table
from stoker.inspecting.tables.values import same_as, shown
from stoker.records.cleaning import Finding

_BYTES = 16
_MOST_BESIDE = 5


class RowDigests:
    """The digests of every row that could be read: of all values, and of all but the target."""

    def __init__(self, tables: Sequence[Table], roles: Roles) -> None:
        self._tables, self._roles = tables, roles
        self._whole, self._features = bytearray(), bytearray()
        self._table, self._row = array("i"), array("q")
        self._names: dict[tuple[int, int], str] = {}

    def add(self, number: int, batch: Batch) -> None:
        """Take the rows of a batch of table `number`."""
        is_typed = self._tables[number].is_typed
        names = sorted(set(batch.columns) - self._roles.ignored - {self._roles.target})
        columns = [[same_as(value, is_typed=is_typed) for value in batch.columns[name]] for name in names]
        targets = batch.columns.get(self._roles.target) or [None] * batch.num_rows
        for row, values in enumerate(zip(*columns, strict=True) if columns else [()] * batch.num_rows):
            if row in batch.problems:
                continue
            content = repr([pair for pair in zip(names, values, strict=True) if pair[1] is not None]).encode(
                "utf-8", "backslashreplace"
            )
            self._features += hashlib.blake2b(content, digest_size=_BYTES).digest()
            target = repr(same_as(targets[row], is_typed=is_typed)).encode("utf-8", "backslashreplace")
            self._whole += hashlib.blake2b(content + b"\0" + target, digest_size=_BYTES).digest()
            self._table.append(number)
            self._row.append(batch.first_row + row)
            if batch.ids is not None:
                self._names[number, batch.first_row + row] = batch.ids[row]

    def findings(self) -> Iterator[Finding]:
        """Rows that are there more than once, and rows that differ in the target alone."""
        whole = _rows(self._whole)
        _, groups = groups_of(whole)
        for group in groups:
            yield from self._repetitions(group.tolist())
        if self._roles.target:
            _, alike = groups_of(_rows(self._features))
            for group in alike:
                contents = {row: whole[row].tobytes() for row in group.tolist()}
                if len(set(contents.values())) > 1:
                    yield from self._contradictions(contents)

    def _repetitions(self, rows: list[int]) -> Iterator[Finding]:
        ordered = sorted(rows, key=lambda row: (-rank(self._split(row)), self._table[row], row))
        kept, home = self._id(ordered[0]), self._split(ordered[0])
        for row in ordered[1:]:
            split = self._split(row)
            if split == AGAINST:
                continue
            detail = f"has the values of {kept}" + (f" in {home}" if split != home else "")
            yield Finding(fault="leak" if split != home else "duplicate", gravity="fault", id=self._id(row),
                          where=split, beside=(kept,), detail=detail)  # fmt: skip

    def _contradictions(self, contents: dict[int, bytes]) -> Iterator[Finding]:
        """Every row, beside those whose target is another one; by the digests of all their values."""
        for row, content in contents.items():
            if self._split(row) != AGAINST:
                unlike = (other for other, theirs in contents.items() if theirs != content)
                others = tuple(map(self._id, islice(unlike, _MOST_BESIDE)))
                detail = f"another {shown(self._roles.target)!r} than {others[0]}, with the same values otherwise"
                yield Finding(fault="contradiction", gravity="suspect", id=self._id(row), where=self._split(row),
                              beside=others, detail=detail)  # fmt: skip

    def _split(self, row: int) -> str:
        return self._tables[self._table[row]].split

    def _id(self, row: int) -> str:
        place = self._table[row], self._row[row]
        return self._names.get(place) or f"{self._tables[place[0]].name}:{place[1]}"


def _rows(digests: bytearray) -> NDArray[np.uint8]:
    return np.frombuffer(bytes(digests), np.uint8).reshape(-1, _BYTES)
