"""Install built packages into new environments, and check that they work there without the checkout (`make dist`).

Each wheel is tried under every supported Python on PATH that it is for, and the source with a compiler and without one.
Each extra is installed with the pure wheel to measure its size; with `embedded` and `demo` the demo runs. Run as
`python -m tests.suites.dist FOLDER`; exits with 1 at the first error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from email.parser import Parser
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MOST_BYTES = 60 << 20  # limit of an installation without extras and without pip


class Wrong(Exception):
    pass


def environment_of(python: str, folder: Path, what: str, build: Mapping[str, str]) -> Path:
    """Create an environment, install the package and its dependencies there, and return its `bin`."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-cache-dir"]
    subprocess.run([*pip, what], check=True, env=os.environ | build)
    return folder / "bin"


def output_of(bin_: Path, *command: str, where: Path) -> str:
    done = subprocess.run([bin_ / command[0], *command[1:]], cwd=where, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Wrong(f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-2_000:]}{done.stderr[-2_000:]}")
    return done.stdout


def check(bin_: Path, where: Path, loop: str) -> str:
    versions = output_of(bin_, "eos", "--version", where=where).strip()
    if not versions.endswith(f"hot loop {loop}"):
        raise Wrong(f"the loop is not {loop}: {versions}")
    output_of(bin_, "eos", "init", "shop", where=where)
    test = "import test_app; test_app.test_what_comes_out()"
    output_of(bin_, "python", "-c", test, where=where / "shop")
    output_of(bin_, "eos", "topology", "app:app", where=where / "shop")
    if (size := size_of(bin_)) > MOST_BYTES:
        raise Wrong(f"an installation without extras takes {size >> 20} MB")
    return f"{versions}; {size >> 20} MB"


def size_of(bin_: Path) -> int:
    """Return the size of the installed packages in bytes, without pip."""
    (packages,) = bin_.parent.glob("lib/python*/site-packages")
    ours = (file for file in packages.rglob("*") if file.is_file() and file.relative_to(packages).parts[0] != "pip")
    return sum(file.stat().st_size for file in ours)


def extras_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(metadata).decode()).get_all("Provides-Extra", [])


def weigh(wheel: Path) -> None:
    """Install each extra in its own environment, and print the size."""
    for extras in ("", *extras_of(wheel), "embedded,demo"):
        with tempfile.TemporaryDirectory() as scratch:
            what = f"{wheel}[{extras}]" if extras else str(wheel)
            bin_ = environment_of(sys.executable, Path(scratch) / "env", what, {})
            output_of(bin_, "eos", "--help", where=Path(scratch))
            print(f"[{extras}]: {size_of(bin_) >> 20} MB", flush=True)
            if extras == "embedded,demo":
                print(output_of(bin_, "eos", "demo", "--flights", "40000", where=Path(scratch)).splitlines()[-1])


def runs(python: str) -> bool:
    """Return whether the program runs, because a version manager's stand-in may know no such Python."""
    found = shutil.which(python)
    return found is not None and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0


def installations(folder: Path) -> Iterator[tuple[str, str, dict[str, str], str]]:
    """Yield the Python, the package, the environment of its build, and the kind of loop that it must have."""
    (source,) = folder.glob("*.tar.gz")
    here = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for version in PYTHONS:
        python = f"python{version}"
        if not runs(python):
            print(f"not here: {python}")
            continue
        for wheel in sorted(folder.glob("*.whl")):
            pure = wheel.name.endswith("py3-none-any.whl")
            if pure or f"cp{version.replace('.', '')}" in wheel.name:
                yield python, str(wheel), {}, "in Python" if pure else "compiled"
    if shutil.which("cc"):
        yield here, str(source), {}, "compiled"
    yield here, str(source), {"CC": "/nonexistent/cc"}, "in Python"


def main(folder: str) -> int:
    try:
        for python, what, build, loop in installations(Path(folder).resolve()):
            with tempfile.TemporaryDirectory() as scratch:
                bin_ = environment_of(python, Path(scratch) / "env", what, build)
                without = " without a compiler" if build else ""
                print(f"{python}, {Path(what).name}{without}: {check(bin_, Path(scratch), loop)}", flush=True)
        weigh(next(wheel for wheel in Path(folder).resolve().glob("*.whl") if "none-any" in wheel.name))
    except (Wrong, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
