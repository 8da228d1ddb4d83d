"""What compressing found, in the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker.compressing.compress import Compressed
from stoker.errors import BadJob
from stoker.records import Event, to_json
from stoker.records.codec import JSON
from stoker.records.compression import Compression, CompressionTrial
from stoker.units import Duration, format_bytes, format_seconds

_STYLES = {"chosen": "bold green", "reference": "bold", "passed": "", "rejected": "dim", "left out": "dim"}


def teller(console: Console, *, quiet: bool) -> Callable[[str], None]:
    """Prints what a search says while it goes on."""

    def tell(line: str) -> None:
        if not quiet:
            console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)

    return tell


def silence(_event: Event) -> None:
    """Receives the events of a run and shows nothing of them."""


def fine_tuning(epochs: float | None, *, prune: bool) -> Duration | None:
    """How long pruned networks are trained.

    Raises:
        BadJob: no length, or none is trained.
    """
    if epochs is None:
        return None
    if not prune:
        raise BadJob("--fine-tune says how long pruned networks are trained", remedy="Give --prune as well.")
    if not 0 < epochs < float("inf"):
        raise BadJob(f"--fine-tune {epochs:g}: wanted a positive number of epochs")
    return Duration(epochs, "epochs")


def render_compression(found: Compressed, console: Console) -> None:
    """Print a search: every trial with size, latency, what it loses, and why it was not taken."""
    record = found.record
    console.print(_table(record))
    console.print()
    for trial in record.trials[1:]:
        if trial.outcome != "chosen":
            console.print(Text(f"{trial.name}: {trial.reason}", style="dim"), soft_wrap=True)
    console.print()
    for note in record.notes:
        console.print(Text.assemble(("note: ", "bold"), note), soft_wrap=True)
    console.print(_basis(record), soft_wrap=True)
    if found.artifact is None:
        console.print(_no_gain(record), soft_wrap=True)
        return
    console.print(_gain(record), soft_wrap=True)
    console.print(Text.assemble(("written: ", "bold"), str(found.artifact.path)), soft_wrap=True)


def _no_gain(record: Compression) -> str:
    """Why no version was written: nothing to try, or nothing better among what was tried."""
    tried = sum(trial.outcome != "left out" for trial in record.trials[1:])
    if not tried:
        return "There was nothing to try: no version was written."
    among = f" among {tried} of {len(record.trials) - 1} candidates" if tried < len(record.trials) - 1 else ""
    return f"Nothing was better than the original{among}: no version was written."


def compression_document(found: Compressed) -> dict[str, JSON]:
    """The search for `--json`."""
    path = None if found.artifact is None else str(found.artifact.path)
    return {"path": path, "compression": to_json(found.record)}


def _table(record: Compression) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("candidate", no_wrap=True)
    table.add_column("size", justify="right")
    for size in record.batch_sizes:
        table.add_column(f"batch {size}", justify="right")
    table.add_column("speed", justify="right")
    table.add_column(f"{record.metric} lost", justify="right")
    table.add_column("verdict", no_wrap=True)
    for trial in record.trials:
        times = [_time(trial, size) for size in record.batch_sizes]
        pace = "" if trial.pace is None else f"{trial.pace:.2f}×"
        name = f"{trial.name} ◆" if trial.on_front else trial.name
        table.add_row(name, _size(trial), *times, pace, _lost(trial), trial.outcome, style=_STYLES[trial.outcome])
    return table


def _size(trial: CompressionTrial) -> str:
    return "" if trial.num_bytes is None else format_bytes(trial.num_bytes)


def _time(trial: CompressionTrial, rows: int) -> str:
    found = trial.latency_s.get(str(rows))
    return "" if found is None else format_seconds(found)


def _lost(trial: CompressionTrial) -> str:
    """The drop with the bounds where there are any."""
    if trial.drop is not None:
        return f"{trial.drop.value:.4f}, ≤ {trial.drop.high:.4f}"
    return "" if trial.selection_drop is None else f"{trial.selection_drop:.4f}"


def _basis(record: Compression) -> str:
    rows = record.rows
    return (
        f"◆ none other is smaller, faster and as good. {record.metric} {record.baseline:.4g} of the original on "
        f"{rows.acceptance:,} rows for acceptance; {rows.selection:,} chose, {rows.calibration:,} calibrated. "
        f"May lose {record.max_drop:.4g} with {100 * record.confidence:g} % confidence. "
        f"{record.threads} {'thread' if record.threads == 1 else 'threads'} on {record.proved_on}; "
        f"took {format_seconds(record.took_s)}."
    )


def _gain(record: Compression) -> str:
    trials = {one.name: one for one in record.trials}
    chosen, original = trials[record.chosen], record.trials[0]
    smaller = (original.num_bytes or 0) / (chosen.num_bytes or 1)
    return f"{chosen.name}: {chosen.pace or 1:.2f}× as fast, {smaller:.2f}× smaller."
