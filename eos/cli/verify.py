"""`eos verify`: does each committed input have exactly its outputs? Reads a live cluster; needs eos.lineage=true."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from eos.cli.options import BootstrapServers, Set, load_settings
from eos.errors import EosError, UsageError
from eos.kafka import facts

if TYPE_CHECKING:
    from eos.testing.verify import Verification


class NothingToExamine(EosError):
    """No committed offset of the group carries lineage, or all that was counted was removed."""

    exit_code = 65


def verify(
    input: Annotated[list[str], typer.Option(help="A source topic; repeatable.")],
    output: Annotated[list[str], typer.Option(help="A topic the outputs went to; repeatable.")],
    group: Annotated[str, typer.Option(help="The consumer group: the App's id.")],
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> int:
    """Check a live cluster: each committed input has exactly its outputs (written with eos.lineage=true)."""
    try:
        from eos.testing.verify import verify as verify_cluster
    except ImportError as error:
        raise UsageError(f"eos verify needs {error.name}: pip install 'eos-kafka[verify]'") from error
    loaded = load_settings(bootstrap_servers, set_)
    # Reading goes on for as long as a broker that was killed may need; whether one is there at all is known sooner.
    facts.connect(loaded, loaded["eos.startup.timeout.ms"] / 1000)
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(f"reading {what}")
            bars.update(tasks[what], completed=done, total=total)

        found = verify_cluster(
            *(loaded.bootstrap_servers, input, output, group, loaded.connection()),
            progress=progress,
            waits=lambda sentence: console.print(f"eos: {sentence}", markup=False, highlight=False, soft_wrap=True),
        )
    return _tell(found, group, output)


def _tell(found: Verification, group: str, outputs: list[str]) -> int:
    notes = found.notes
    if "no_losses" in found.report.violated:
        notes += (
            f"looked for in {', '.join(outputs)} alone: does the App write to another topic too? --output names it",
        )
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if not found.report.verdicts:
        raise NothingToExamine(
            f"nothing to examine: no committed offset of group {group} on these inputs carries lineage, or retention "
            "removed all that was counted (a note says so). Run the worker with eos.lineage=true; without it nobody "
            "can tell a filtered input from a lost output"
        )
    console = Console()
    console.print(found.report.table())
    verdict = "holds" if found.report.ok else f"VIOLATED: {', '.join(found.report.violated)}"
    if found.report.ok and found.notes:
        verdict += ", as far as it could be decided (see the notes)"
    console.print(f"{found.inputs:,} inputs and {found.outputs:,} outputs of group {group} examined: {verdict}")
    return 0 if found.report.ok else 1
