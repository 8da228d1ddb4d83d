"""The README and docs/ say what is so today: their links, commands, code and tables are held against the code."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import inspect
import itertools
import json
import re
import shlex
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import stoker
from stoker.cli.main import app
from stoker.jobs import Job, load_job
from stoker.planning.plan_ranking import SURE_ENOUGH
from stoker.planning.plan_search import LEAST_GAIN, LEAST_PLANNING_S, PLANNING_SHARE
from stoker.records import (
    LARGEST_GRADIENT_ERROR,
    ONE_PROCESS,
    Candidate,
    Decision,
    EventKind,
    Forecast,
    Plan,
    Rejection,
    loads,
)
from tests.cases import each_of

ROOT = Path(__file__).resolve().parents[1]
README, DOCS, PACKAGE = ROOT / "README.md", ROOT / "docs", ROOT / "src" / "stoker"
EXAMPLES = ROOT / "examples"
PAGES = [README, EXAMPLES / "README.md", *sorted(DOCS.rglob("*.md"))]

# Pages that stand for a folder of another name, or for several; design.md tells of the rest.

# What the reference calls an argument that may be one of two things.
_ONE_OF_TWO = {("profile", "job"): "job_or_step", ("profile", "step_fn"): "job_or_step"}

every_page = each_of(PAGES, name=lambda page: page.relative_to(ROOT))


def _blocks(page: Path, language: str) -> list[str]:
    """The contents of the fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def _prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def _section(page: Path, title: str) -> str:
    """What is under the heading `title`, up to the next one of its level."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page.name} has no section {title!r}"
    return found[1]


def _first_cells(table: str) -> list[str]:
    """The code in the first column of a table, without its backticks."""
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _shell_lines(page: Path) -> Iterator[list[str]]:
    """The words of each line of the shell blocks, comments and what follows a pipe or redirection left out."""
    for block in _blocks(page, "sh"):
        for line in block.splitlines():
            if words := shlex.split(line, comments=True):
                yield list(itertools.takewhile(lambda word: word not in {"|", ">"}, words))


@functools.cache
def _stoker() -> Any:
    """The command line, put together once."""
    return get_command(app)


def _command(words: list[str]) -> tuple[str, Any, list[str]]:
    """The name and the command that `words`, what follows `stoker`, mean; and the words that are left for it."""
    name, command = "stoker", _stoker()
    while words and not words[0].startswith("-") and hasattr(command, "commands"):
        name, words = words[0], words[1:]
        assert name in command.commands, f"there is no command {name!r}"
        command = command.commands[name]
    return name, command, words


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Each command that is shown to people, with its name."""
    yield name, command
    for word, one in getattr(command, "commands", {}).items():
        if not one.hidden:
            yield from _commands(f"{name} {word}", one)


def _parse(words: list[str]) -> None:
    """Parse as the command line does, without running anything; raises the error that a user would see."""
    name, command, rest = _command(words)
    if "--help" not in rest:
        command.make_context(name, list(rest))


@every_page
def test_relative_links_resolve(page: Path) -> None:
    """Each link within the repository leads to a file, and each anchor to a heading."""
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        place, _, anchor = target.partition("#")
        there = (page.parent / place).resolve() if place else page
        assert there.exists(), f"{target} is not there"
        assert not anchor or anchor in _anchors(there), f"{there.name} has no heading for #{anchor}"


@pytest.mark.slow
@every_page
def test_commands_parse(page: Path) -> None:
    """Each `stoker …` line has the commands, options and number of arguments that the command line takes."""
    for words in _shell_lines(page):
        if words[0] == "stoker":
            _parse(words[1:])


@every_page
def test_commands_named_in_the_text_exist(page: Path) -> None:
    """Each `stoker …` within a sentence names a command, and only options that it has."""
    for span in re.findall(r"`stoker ([^`]+)`", _prose(page)):
        name, command, rest = _command(span.split())
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        assert {word for word in rest if word.startswith("-")} <= known, name


@pytest.mark.parametrize("line", ["train job.py --nwe", "trian job.py", "plan", "runs diff A"])
def test_a_wrong_command_is_caught(line: str) -> None:
    """The check above fails for an unknown option, an unknown command and a missing argument."""
    with pytest.raises(Exception, match=r"--nwe|trian|job_file|second"):
        _parse(line.split())


@every_page
def test_make_targets_exist(page: Path) -> None:
    """Each `make …` names a target of the Makefile."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = [words[1] for words in _shell_lines(page) if words[0] == "make"]
    named += re.findall(r"`make ([a-z-]+)`", _prose(page))
    assert set(named) <= set(targets)


@every_page
def test_python_compiles(page: Path) -> None:
    """Each block of Python is Python."""
    for block in _blocks(page, "python"):
        compile(block, str(page), "exec")


@every_page
def test_names_of_stoker_exist(page: Path) -> None:
    """Each `stoker.name` in code is a public name."""
    code = "\n".join([*re.findall(r"`([^`\n]+)`", _prose(page)), *_blocks(page, "python")])
    modules = {path.stem for path in PACKAGE.iterdir()}
    named = set(re.findall(r"\bstoker\.([A-Za-z_]\w*)", code))
    assert named <= {*stoker.__all__, *modules}


def test_the_readme_shows_the_example() -> None:
    """The job file in the README is examples/digits.py, that of the quickstart examples/train_me.py, word for word."""
    for page, name in ((README, "digits"), (DOCS / "quickstart.md", "train_me")):
        assert (EXAMPLES / f"{name}.py").read_text(encoding="utf-8") in _blocks(page, "python")


def test_the_example_makes_a_job() -> None:
    """The quickstart's job file loads with the settings of its commands; nothing is read or trained."""
    job, entry = load_job(ROOT / "examples" / "train_me.py", {"lr": "0.02", "epochs": "10"})
    assert isinstance(job, Job)
    assert (job.until, job.batch) == (stoker.epochs(10), 512)
    assert entry.parameters == {"width": 64, "lr": 0.02, "epochs": 10.0}


def test_every_example_is_listed() -> None:
    """Each file and folder among the examples has a link on their page."""
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    there = {one.name for one in EXAMPLES.iterdir() if one.name not in {"README.md", "__pycache__"}}
    assert there == set(re.findall(r"\]\(([^)/]+)\)", page))


@pytest.mark.parametrize("example", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.stem)
def test_examples_import_modules_that_exist(example: Path) -> None:
    """Within functions too, where only a run of several minutes would find out."""
    nodes = ast.walk(ast.parse(example.read_text(encoding="utf-8")))
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    ours = {module for module in modules if module.split(".")[0] == "stoker"}
    assert [module for module in sorted(ours) if importlib.util.find_spec(module) is None] == []


def test_every_page_is_in_the_table_of_contents() -> None:
    """Each page of docs/ is linked from docs/README.md."""
    linked = re.findall(r"\]\(([^)#]+)", (DOCS / "README.md").read_text(encoding="utf-8"))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"README.md"}
    assert pages <= set(linked)


def test_every_public_name_is_documented() -> None:
    """Each name of `stoker.__all__` is in the docs as `stoker.name`."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in stoker.__all__ if not re.search(rf"\bstoker\.{name}\b", text)] == []


def test_the_reference_lists_every_public_name() -> None:
    """Its table has each name of `stoker.__all__`, and no other; a module's row has each of that module's."""
    table = _section(DOCS / "reference.md", "Names")
    rows = re.findall(r"^\| (`stoker\..+?) \| (.+) \|$", table, re.MULTILINE)
    named = re.findall(r"`stoker\.(\w+)`", " ".join(itertools.chain(*rows)))
    assert sorted(named) == sorted(stoker.__all__)
    told = {first.strip("`").removeprefix("stoker."): set(re.findall(r"`(\w+)`", rest)) for first, rest in rows}
    for name in stoker.__all__:
        public = getattr(stoker, name)
        if inspect.ismodule(public):
            assert (name, told[name]) == (name, _public_names(public))


def _public_names(module: types.ModuleType) -> set[str]:
    """What a module says is public; without a word of its own, the functions it defines."""
    functions = inspect.getmembers(module, inspect.isfunction)
    own = {name for name, one in functions if one.__module__ == module.__name__ and not name.startswith("_")}
    return set(getattr(module, "__all__", own))


def test_the_reference_has_every_field_of_a_job() -> None:
    """Its table names exactly the fields of Job, with the defaults that can be written as one word."""
    fields = {field.name: field.default for field in dataclasses.fields(Job)}
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|", _section(DOCS / "reference.md", "A Job's fields"), re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(fields)
    for name, told in rows:
        if isinstance(default := fields[name], str | int | float):
            assert told.strip() == (f'`"{default}"`' if isinstance(default, str) else f"{default:g}"), name


def test_the_reference_has_every_argument_of_a_verb() -> None:
    """Each call in its table takes the arguments of the function, `entry` left out, with its defaults."""
    calls = re.findall(r"`stoker\.(\w+)\((.*?)\)`[ |]", _section(DOCS / "reference.md", "Verbs"))
    told: dict[str, dict[str, str]] = {}
    for verb, arguments in calls:
        call = ast.parse(f"f({arguments.replace('=…', '=...')})", mode="eval").body
        assert isinstance(call, ast.Call)
        names = [_ONE_OF_TWO.get((verb, name), name) for name in map(ast.unparse, call.args)]
        told.setdefault(verb, {}).update(dict.fromkeys(names, ""))
        told[verb].update({word.arg: ast.unparse(word.value) for word in call.keywords if word.arg is not None})
    packages = {
        "training",
        "compressing",
        "exporting",
        "launching",
        "planning",
        "predicting",
        "profiling",
        "serving",
        "tuning",
        "verifying",
    }
    functions = {name: thing for name in stoker.__all__ if inspect.isfunction(thing := getattr(stoker, name))}
    verbs = {
        name for name, function in functions.items() if function.__module__.split(".")[1] in {*packages, "training"}
    }
    assert set(told) == verbs - {"on"}
    for verb, arguments_told in told.items():
        wanted = inspect.signature(getattr(stoker, verb)).parameters.values()
        known = {one.name: one.default for one in wanted if one.name != "entry" and one.kind is not one.VAR_KEYWORD}
        assert set(arguments_told) == set(known), verb
        for name, default in arguments_told.items():
            assert default in {"", "...", repr(known[name])}, (verb, name)


def test_every_option_is_told() -> None:
    """Each option of each command that people call is named in the docs."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name, command in _commands("stoker", _stoker()):
        for parameter in command.params:
            spellings = [*parameter.opts, *parameter.secondary_opts]
            options = [word for word in spellings if word.startswith("-")]
            is_told = any(re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) for word in options)
            assert is_told or not options, f"{name} {options[0]}"


def test_glossary_terms_are_used() -> None:
    """Each term of the glossary stands in another page; terms are sorted, and explained once."""
    glossary = DOCS / "glossary.md"
    terms = re.findall(r"^\| \*\*(.+?)\*\* \|", glossary.read_text(encoding="utf-8"), re.MULTILINE)
    others = "\n".join(page.read_text(encoding="utf-8") for page in PAGES if page != glossary).lower()
    assert [term for term in terms if not re.search(rf"\b{re.escape(term.lower())}", others)] == []
    assert terms == sorted(set(terms), key=str.lower)


def test_the_events_page_knows_every_kind_and_field() -> None:
    """Each kind of event has a section whose table names exactly the fields of its example."""
    page = DOCS / "events.md"
    examples = {
        example["event"]: example
        for text in _blocks(page, "json")
        for example in [json.loads(text.replace("{…}", "{}").replace("[…]", "[]"))]
    }
    assert set(examples) == set(typing.get_args(EventKind))
    for kind, example in examples.items():
        fields = _first_cells(_section(page, f"`{kind}`"))
        assert set(fields) == set(example) - {"event", "at"}, kind


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("contract.md", f"bf16 is not used above {100 * LARGEST_GRADIENT_ERROR:g} %"),
        ("planning.md", f"more than {100 * LARGEST_GRADIENT_ERROR:g} % from fp32's"),
        ("planning.md", f"faster by more than {100 * LEAST_GAIN:g} %"),
        ("planning.md", f"{LEAST_PLANNING_S:g} s or {100 * PLANNING_SHARE:g} % of the forecast total"),
        ("planning.md", f"fits with a probability of at least {100 * SURE_ENOUGH:g} %"),
        ("contract.md", f"at most {100 * LARGEST_GRADIENT_ERROR:g} %"),
        ("quickstart.md", f"by default one every {Plan(device='cpu', micro_batch=1).checkpoint_every_s:g} s"),
    ],
)
def test_numbers_in_the_text_are_the_codes(page: str, words: str) -> None:
    """A threshold on a page is the one the code uses."""
    assert words in " ".join((DOCS / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("record", [Plan, Decision, Candidate, Rejection, Forecast])
def test_the_plan_files_page_knows_every_field(record: type) -> None:
    """The tables of docs/planning.md name exactly the fields of each record."""
    fields = _first_cells(_section(DOCS / "planning.md", record.__name__))
    assert fields == [field.name for field in dataclasses.fields(record)]


def test_the_plan_on_the_page_can_be_read() -> None:
    """The plan shown is one that `--plan` takes, and the defaults in its table are the record's."""
    page = DOCS / "planning.md"
    assert isinstance(loads(_blocks(page, "json")[0], Plan), Plan)
    defaults = dict(re.findall(r"^\| `(\w+)` \| [^|]*\| `?([^|`]+?)`? \|", _section(page, "Plan"), re.MULTILINE))
    for field in dataclasses.fields(Plan):
        shown = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
        shown = "one process" if field.default == ONE_PROCESS else shown
        assert defaults[field.name] == ("required" if field.default is dataclasses.MISSING else shown), field.name
