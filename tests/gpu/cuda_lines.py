"""How many of the statements that only a GPU executes were executed: `python -m tests.gpu.cuda_lines DATA`.

DATA is a file of coverage.py. Such statements are, outside of forecasts, tracing and the simulation itself:
1. what is within, or after a return for other devices, an `if` about the kind of a device, such as `type == "cuda"`;
2. those of functions that name `torch.cuda` outside of such a condition, for more than a question that PyTorch answers
   on a CPU too (`ANSWERED_ON_A_CPU`).
Settings below `torch.backends.cuda` exist on every machine and are no sign of CUDA. Conditional expressions on one line
are not distinguished. Exits with 1 below the least share.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from coverage import CoverageData

SOURCE = Path(__file__).parents[2] / "src" / "stoker"
LEFT_OUT = (
    "testing",
    "profiling/tracing",
    "planning",
    "devices",
    "layouts",
    "records",
    "reporting",
    "tuning",
    "pool",
    "launching",
    "cli",
    "web",
    "engines",
    "serving",
)
"""Folders of `SOURCE` that pretend a device, or decide by records of devices, on any machine, and compute on none."""
ANSWERED_ON_A_CPU = ("torch.cuda.is_available", "torch.cuda.is_initialized", "torch.cuda.device_count")

Statements = set[int]


def asks_for_cuda(test: ast.expr) -> bool | None:
    """Whether the body of an `if` is for CUDA alone (True), its alternative is (False), or neither (None)."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = asks_for_cuda(test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        if "not torch.cuda.is_available()" in map(ast.unparse, test.values):  # for a machine without
            return None
        return True if any(asks_for_cuda(value) for value in test.values) else None
    if isinstance(test, ast.Attribute):
        return True if test.attr in ("is_cuda", "_is_cuda") else None
    if isinstance(test, ast.Call):
        return True if ast.unparse(test).endswith(".startswith('cuda')") else None
    if not (isinstance(test, ast.Compare) and ast.unparse(test.left).endswith((".type", "kind", ".device"))):
        return None
    is_equal = isinstance(test.ops[0], ast.Eq)
    return {"'cuda'": is_equal, "'cpu'": not is_equal}.get(ast.unparse(test.comparators[0]))


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


def names_of_cuda(node: ast.AST) -> Iterator[int]:
    """Lines at which `torch.cuda` is named for what needs CUDA, outside of conditional expressions about the device."""
    if isinstance(node, ast.IfExp) and asks_for_cuda(node.test) is not None:
        return
    text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
    if text in ANSWERED_ON_A_CPU:
        return
    if text == "torch.cuda":
        yield node.lineno
    for child in ast.iter_child_nodes(node):
        yield from names_of_cuda(child)


def for_cuda_alone(source: str) -> Statements:
    """Lines of a file's statements that only a GPU executes."""
    tree = ast.parse(source)
    found = set[int]().union(*guarded(tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and "torch" not in {argument.arg for argument in node.args.args}:
            within = lines_of(node.body)
            named = {line for statement in node.body for line in names_of_cuda(statement)}
            if not {max(first for first in within if first <= line) for line in named} <= found & within:
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
