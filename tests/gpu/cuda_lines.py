"""How many of the statements that only a GPU executes were executed: `python -m tests.gpu.cuda_lines DATA`.

DATA is a file of coverage.py. Such statements are, outside of forecasts, tracing and the simulation itself:
1. what is within, or after a return for other devices, an `if` about `type == "cuda"`, `is_cuda` or the like;
2. those of functions that name `torch.cuda` or `torch.backends.cuda` outside of such an `if`.
Conditional expressions on one line are not told apart. Exits with 1 below the least share.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from coverage import CoverageData

SOURCE = Path(__file__).parents[2] / "src" / "stoker"
LEFT_OUT = ("testing", "profiling/tracing", "planning/model", "cli", "web", "launching", "engines", "serving")
"""Folders of `SOURCE` that compute nothing on a device, or pretend one."""

Statements = set[int]


def asks_for_cuda(test: ast.expr) -> bool | None:
    """Whether the body of an `if` is for CUDA alone (True), its alternative is (False), or neither (None)."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = asks_for_cuda(test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return True if any(asks_for_cuda(value) for value in test.values) else None
    text = ast.unparse(test)
    if isinstance(test, ast.Attribute):
        return True if test.attr in ("is_cuda", "_is_cuda") else None
    if isinstance(test, ast.Call):
        return True if text.endswith(".startswith('cuda')") else None
    if not (isinstance(test, ast.Compare) and ".type" in text):
        return None
    kinds = {"'cuda'": isinstance(test.ops[0], ast.Eq), "'cpu'": isinstance(test.ops[0], ast.NotEq)}
    return next((is_it for kind, is_it in kinds.items() if text.endswith(kind)), None)


def lines_of(statements: Sequence[ast.stmt]) -> Statements:
    """First lines of all statements within, without docstrings."""
    return {
        node.lineno
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    }


def guarded(statements: Sequence[ast.stmt]) -> Iterator[Statements]:
    """Statements of a block that an `if` keeps for CUDA."""
    for index, statement in enumerate(statements):
        if isinstance(statement, ast.If) and (is_body := asks_for_cuda(statement.test)) is not None:
            yield lines_of(statement.body if is_body else statement.orelse)
            if not is_body and isinstance(statement.body[-1], ast.Return | ast.Raise):
                yield lines_of(statements[index + 1 :])
        for name in ("body", "orelse", "finalbody"):
            yield from guarded(getattr(statement, name, []))


def for_cuda_alone(source: str) -> Statements:
    """Lines of a file's statements that only a GPU executes."""
    tree = ast.parse(source)
    found = set[int]().union(*guarded(tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            named = {
                inner.lineno for inner in ast.walk(node)
                if isinstance(inner, ast.Attribute) and ast.unparse(inner) in ("torch.cuda", "torch.backends.cuda")
            }  # fmt: skip
            within = lines_of(node.body)
            signature = {line for line in named if not any(s.lineno <= line <= (s.end_lineno or 0) for s in node.body)}
            guarded_lines = found & within
            first = [max((line for line in within if line <= name), default=0) for name in named - signature]
            if first and not set(first) <= guarded_lines:
                found |= within
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the share by file, with the lines that were not executed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--least", type=float, default=0.9, help="share of the statements [0 to 1]")
    options = parser.parse_args(argv)
    data = CoverageData(basename=str(options.data))
    data.read()
    executed = {Path(file): set(data.lines(file) or ()) for file in data.measured_files()}
    num_all = num_executed = 0
    for file in sorted(SOURCE.rglob("*.py")):
        name = file.relative_to(SOURCE).as_posix()
        if name.startswith(LEFT_OUT):
            continue
        lines = for_cuda_alone(file.read_text(encoding="utf-8"))
        if not lines:
            continue
        missing = sorted(lines - executed.get(file, set()))
        num_all, num_executed = num_all + len(lines), num_executed + len(lines) - len(missing)
        left = f"   not executed: {', '.join(map(str, missing))}" if missing else ""
        print(f"{len(lines) - len(missing):4} of {len(lines):3}  {name}{left}")
    share = num_executed / max(1, num_all)
    print(
        f"{num_executed} of {num_all} statements for CUDA alone were executed: {share:.1%}, wanted {options.least:.0%}"
    )
    return 0 if share >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
