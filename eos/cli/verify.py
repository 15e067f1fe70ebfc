"""Define `eos verify`, which checks on a live cluster that each committed input has exactly its outputs and rows.

Outputs are examined for an App that runs with eos.lineage=true.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from eos.cli.options import BootstrapServers, Set, load_settings
from eos.errors import EosError, UsageError
from eos.kafka.admin import facts
from eos.worker.loading import load_app, refuse_ids
from eos.worker.new_topics import NewTopics
from eos.worker.verify_rows import Verified, verify_rows

if TYPE_CHECKING:
    from eos.app.definition import App
    from eos.kafka.client.settings import Settings
    from eos.testing.verify import Verification

_MAX_WRONG = 10  # wrong rows of a table that are printed


class NothingToExamine(EosError):
    """Report that no committed offset of the group has lineage, or that retention removed all counted records."""

    exit_code = 65


def verify(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[MODULE:APP]", help="The App to check, with all of its topics and its group."),
    ] = None,
    input: Annotated[list[str] | None, typer.Option(help="Without an App: a source topic; repeatable.")] = None,
    output: Annotated[list[str] | None, typer.Option(help="Without an App: an output topic; repeatable.")] = None,
    group: Annotated[str | None, typer.Option(help="Without an App: its id, the consumer group.")] = None,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> int:
    """Check on a live cluster that each committed input has exactly its outputs (written with eos.lineage=true).

    If the App writes into databases, check that each committed record has its row there.
    """
    named = (input, output, group)
    if any(named) if target else not all(named):
        raise UsageError("eos verify needs either MODULE:APP, or --input, --output and --group")
    loaded = load_settings(bootstrap_servers, set_)
    app = None if target is None else load_app(target)
    # Check now whether any broker answers. A read would wait as long as a killed broker may need to restart.
    facts.connect(loaded, loaded["eos.startup.timeout.ms"] / 1000)
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(f"reading {what}")
            bars.update(tasks[what], completed=done, total=total)

        tables = [] if app is None else verify_rows(app, loaded, progress)
        names = (input or [], output or [], group or "") if app is None else _topics(loaded, app)
        found = _verify_outputs(loaded, names, console, progress) if names[0] else None
    codes = [code for table in tables if (code := _print_rows(table)) is not None]
    for function in () if app is None else _functions_with_own_sql(app):
        print(f"note: {function} runs its own SQL, whose effects are not examined", file=sys.stderr)
    if found is not None and not (codes and not found.report.verdicts):
        codes.append(_print_result(found, names[2], names[1], app))
    elif found is not None:
        print("note: no outputs were examined: run the worker with eos.lineage=true", file=sys.stderr)
    if not codes:
        raise NothingToExamine("nothing to examine: no outputs and no rows of committed records")
    return max(codes)


def _functions_with_own_sql(app: App) -> list[str]:
    return [route.name for route in app.functions if route.sink is not None and route.sink.table is None]


def _verify_outputs(
    loaded: Settings,
    names: tuple[list[str], list[str], str],
    console: Console,
    progress: Callable[[str, int, int], None],
) -> Verification:
    try:
        from eos.testing.verify import verify as verify_cluster
    except ImportError as error:
        raise UsageError(f"eos verify needs {error.name}: pip install 'eos-kafka[verify]'") from error
    return verify_cluster(
        *(loaded.bootstrap_servers, *names, loaded.connection()),
        progress=progress,
        on_wait=lambda sentence: console.print(f"eos: {sentence}", markup=False, highlight=False, soft_wrap=True),
    )


def _print_rows(found: Verified) -> int | None:
    """Print the result for a table. Return the exit code; None if nothing could be examined."""
    where = f"table {found.table.name} in {found.database}"
    for note in found.notes:
        print(f"note: {where}: {note}", file=sys.stderr)
    if not found.records:
        print(f"note: {where}: no committed record was examined", file=sys.stderr)
        return None
    wrong = f"VIOLATED: {len(found.wrong):,} rows are wrong" if found.wrong else "holds"
    print(f"{where}: {found.rows:,} rows of {found.records:,} committed records examined: {wrong}")
    for row in found.wrong[:_MAX_WRONG]:
        print(f"  {row}")
    if len(found.wrong) > _MAX_WRONG:
        print(f"  and {len(found.wrong) - _MAX_WRONG:,} more")
    return 1 if found.wrong else 0


def _topics(loaded: Settings, app: App) -> tuple[list[str], list[str], str]:
    """Return the topics that a worker of the App reads now for outputs, those it writes, and its group."""
    app.check()
    refuse_ids(loaded, "eos verify")
    if app.patterns:
        app.add_topics(NewTopics(loaded.without("eos.create.topics"), app).now())
    inputs = [topic for topic, route in app.routes.items() if route.sink is None]
    return inputs, sorted(app.destinations), app.id


def _print_result(found: Verification, group: str, outputs: list[str], app: App | None) -> int:
    notes = found.notes
    if app is None and "no_losses" in found.report.violated:
        notes += (
            f"only {', '.join(outputs)} was searched for outputs: if the App writes to another topic too, add it with "
            "--output, or use `eos verify MODULE:APP`",
        )
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if not found.report.verdicts:
        raise NothingToExamine(
            f"nothing to examine: no committed offset of group {group} on these inputs has lineage, or retention "
            "removed all counted records (a note says so). Run the worker with eos.lineage=true; without it a "
            "filtered input looks like a lost output"
        )
    console = Console()
    console.print(found.report.table())
    verdict = "holds" if found.report.ok else f"VIOLATED: {', '.join(found.report.violated)}"
    if found.report.ok and found.notes:
        verdict += "; some checks are undecided (see the notes)"
    console.print(f"{found.inputs:,} inputs and {found.outputs:,} outputs of group {group} examined: {verdict}")
    return 0 if found.report.ok else 1
