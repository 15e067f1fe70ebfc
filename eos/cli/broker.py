"""Define `eos broker start | status | stop | topics`, which run a real Kafka on this machine.

The module owns the options and the printed text. It must never decide anything: eos.broker.detached does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from eos.broker.detached import DetachedKafka, default_directory
from eos.cli.options import parse_named_value
from eos.errors import Unavailable, UsageError

NOT_RUNNING = 69

app = typer.Typer(no_args_is_help=True, help="Run a real Kafka on this machine: start, inspect and stop it.")

DataOption = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="Data directory (default: ~/.local/share/eos/broker)")
]


@app.command()
def start(
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", metavar="1|3", help="Number of nodes (default: that of the existing data, else 1)"),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option("--version", help="Kafka version (default: the version of the existing data, else 4.4.0)"),
    ] = None,
    data: DataOption = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=1, max=65533, help="First client port (default: that of the existing data, else 9092)"
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option("--config", metavar="NAME=VALUE", help="A broker setting, stored with the data; repeatable"),
    ] = None,
) -> None:
    """Start Kafka in the background and keep its data. Does nothing if Kafka is already running."""
    if nodes not in (None, 1, 3):
        raise UsageError(f"--nodes {nodes}: must be 1 or 3")
    kafka = DetachedKafka(data or default_directory())
    started = kafka.start(nodes, version, port, dict(parse_named_value("--config", text) for text in config or []))
    state = kafka.state()
    assert state is not None
    typer.echo(
        f"Kafka {state.version} {'is running' if started else 'is already running'}: {kafka.bootstrap_servers()}"
        f"  (data: {kafka.directory})"
    )


@app.command()
def status(data: DataOption = None) -> None:
    """Show the nodes. Exits with 0 if all of them run, with 69 if not."""
    kafka = DetachedKafka(data or default_directory())
    nodes, state = kafka.status(), kafka.state()
    if not nodes or state is None:
        typer.echo(f"Kafka is not running: no data in {kafka.directory}")
        raise typer.Exit(NOT_RUNNING)
    table = Table("node", "pid", "port", "state", "version")
    for node in nodes:
        colour, word = ("green", "up") if node.is_up else ("red", "down")
        pid = str(node.pid) if node.is_up else "-"
        table.add_row(str(node.index), pid, str(node.port), f"[{colour}]{word}[/]", state.version)
    Console().print(table)
    # Paths are long, and the table would cut them off.
    typer.echo(f"data: {kafka.directory}")
    for node in nodes:
        typer.echo(f"log:  {node.log_path}")
    if not all(node.is_up for node in nodes):
        raise typer.Exit(NOT_RUNNING)


@app.command()
def stop(data: DataOption = None) -> None:
    """Stop Kafka and keep its data."""
    kafka = DetachedKafka(data or default_directory())
    stopped = kafka.stop()
    typer.echo("Kafka is stopped" if stopped else "Kafka is not running")


@app.command()
def topics(
    names: Annotated[list[str], typer.Argument(metavar="NAME...")],
    partitions: Annotated[int, typer.Option(min=1, help="Partitions of each new topic")] = 8,
    data: DataOption = None,
) -> None:
    """Create topics with a replica on every node. Existing topics are left unchanged."""
    kafka = DetachedKafka(data or default_directory())
    nodes = kafka.status()
    if not nodes or not any(node.is_up for node in nodes):
        raise Unavailable("Kafka is not running: start it with `eos broker start`")
    from eos.cli.topic import create_and_print  # imported here: the other commands need no Kafka client
    from eos.kafka.client.settings import Settings

    create_and_print(Settings({"bootstrap.servers": kafka.bootstrap_servers()}), names, partitions, len(nodes))
