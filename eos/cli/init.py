"""Define `eos init NAME`, which creates a folder with a working App, its test, its settings and a Dockerfile."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from eos.errors import UsageError
from eos.records import is_topic_name

FILES = {
    "app.py": '''"""The App $name: reads $name-in, writes $name-out."""

from eos import App

app = App("$name")


@app.process("$name-in", to="$name-out")
def louder(text: str) -> str:
    return text.upper()
''',
    "test_app.py": """import eos.testing
from app import app


def test_louder():  # without a broker
    ran = eos.testing.run(app, [("$name-in", "to be"), ("$name-in", "or not")])
    assert ran.values("$name-out") == [b"TO BE", b"OR NOT"]
""",
    "eos.toml": """# The environment (KAFKA_BOOTSTRAP_SERVERS, EOS_...) and -X override this file.
# `eos config app:app` shows the values in effect.
"bootstrap.servers" = "127.0.0.1:9092"
# Commit a transaction about this often.
"eos.transaction.interval.ms" = 100
""",
    "Dockerfile": """# docker build -t $name .
# docker run -e KAFKA_BOOTSTRAP_SERVERS=broker:9092 -e EOS_INSTANCE=$name-0 $name
ARG PYTHON=python:3.13-slim
FROM $${PYTHON}
WORKDIR /app
# eos-kafka is not on a package index yet: `EOS_PURE_PYTHON=1 pip wheel --no-deps -w . CHECKOUT` puts its wheel here.
COPY eos.toml *.whl ./
RUN pip install --no-cache-dir --find-links . 'eos-kafka[metrics]==$version'
# State of functions: a volume here makes restarts fast (docs/howto/state.md).
RUN useradd --uid 1000 --create-home worker && install -d -o worker /var/lib/eos
USER worker
COPY app.py ./
ENV EOS_STATE_DIR=/var/lib/eos PYTHONUNBUFFERED=1
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --retries=3 CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/livez')"]
ENTRYPOINT ["eos", "run", "app:app", "--http-port", "8080"]
""",
}


def init(
    name: Annotated[str, typer.Argument(help="The App's id, and the new folder's name.", show_default=False)],
) -> None:
    """Create a folder with an App, its test, its settings and a Dockerfile."""
    if not is_topic_name(name):
        raise UsageError(f"{name!r} is not a name for an App: use letters, digits, '.', '_' and '-'")
    folder = Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{name} already exists and is not an empty folder; choose another name")
    try:
        folder.mkdir(exist_ok=True)
        for file, text in FILES.items():
            (folder / file).write_text(Template(text).substitute(name=name, version=metadata.version("eos-kafka")))
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be written: {error.strerror}") from error
    print(
        f"{name}/ contains {', '.join(FILES)}. Try it:\n"
        f"  cd {name}\n"
        "  pip install pytest\n"
        "  python -m pytest                       # without a broker\n"
        "  eos broker start                       # a real Kafka on this machine: pip install 'eos-kafka[embedded]'\n"
        "  eos run app:app --create-topics\n"
        f"  eos topic send {name}-in hello          # in another terminal\n"
        f"  eos topic tail {name}-out"
    )
