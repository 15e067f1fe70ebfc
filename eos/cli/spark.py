"""Define `eos spark run MODULE:APP`, which runs an App of `eos run` as a Structured Streaming query."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from eos import log
from eos.cli.options import (
    BootstrapServers,
    LogFormat,
    LogLevel,
    Set,
    Target,
    UntilEnd,
    check_log_options,
    collect_flags,
)
from eos.errors import ConfigurationError, Unavailable, UsageError
from eos.kafka.client import settings
from eos.worker.loading import load_app, refuse_ids

app = typer.Typer(no_args_is_help=True)

# The configuration of a run on one machine. A cluster has its own.
_LOCAL_CONFIG = {
    "spark.ui.enabled": "false",
    # State has this many partitions, each a task of every micro-batch. A checkpoint keeps the number it began with.
    "spark.sql.shuffle.partitions": "8",
}
_LOCAL_LEVELS = {"debug": "WARN"}


@app.callback()
def spark() -> None:
    """Run Apps on Spark."""


@app.command("run")
def run(
    target: Target,
    master: Annotated[
        str | None, typer.Option(help="Spark's master. Default: the one of spark-submit, else local[*].")
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="Folder that a restart reads. On a cluster, use a shared file system."),
    ] = None,
    instance: Annotated[
        str | None, typer.Option(help="Suffix of the transactional.id. Keep it stable across restarts. Default: spark.")
    ] = None,
    bootstrap_servers: BootstrapServers = None,
    until_end: UntilEnd = False,
    interval_ms: Annotated[int, typer.Option(min=0, help="Start a micro-batch this often.")] = 0,
    set_: Set = None,
    conf: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A Spark setting (spark.*); repeatable.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of Spark's Kafka source (minPartitions); repeatable."),
    ] = None,
    py_files: Annotated[
        str | None, typer.Option(help="Further .py and .zip files that the App's module imports, separated by commas.")
    ] = None,
    log_format: LogFormat = "human",
    log_level: LogLevel = "info",
) -> int:
    """Run an App on Spark: each micro-batch is one transaction."""
    check_log_options(log_format, log_level)
    log.configure(log_format, log_level)
    loaded = settings.load(collect_flags(bootstrap_servers, set_, instance))
    refuse_ids(loaded, "eos spark run")
    config = _parse_pairs("--conf", conf)
    try:
        # Imported here: the other commands must start without PySpark.
        from spark_connector import run as engine
        from spark_connector.session import is_local, spark_session, stop
    except ModuleNotFoundError as error:
        raise Unavailable(f"Spark needs {error.name}: pip install 'eos-kafka[spark]'") from error
    local = is_local(master or config.get("spark.master")) and "PYSPARK_GATEWAY_PORT" not in os.environ
    if not local and checkpoint is None:
        raise UsageError("--checkpoint DIR is needed on a cluster: a restarted driver may be on another machine")
    plan = engine.Run(load_app(target), loaded, checkpoint, until_end, interval_ms, _parse_pairs("--option", option))
    engine.check(plan)
    if local:
        config = _LOCAL_CONFIG | {"spark.log.level": _LOCAL_LEVELS.get(log_level, "FATAL")} | config
    session = spark_session(plan.transactional_id, master=master, config=config)
    try:
        for file in filter(None, (py_files or "").split(",")):
            session.sparkContext.addPyFile(file)
        engine.run_app(plan, session)
    finally:
        stop(session)
    return 0


def _parse_pairs(option: str, texts: list[str] | None) -> dict[str, str]:
    pairs = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigurationError(f"{option} {text}: expected name=value")
        pairs[name.strip()] = value.strip()
    return pairs
