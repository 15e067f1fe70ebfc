"""Replaces the settings' PEM files by their contents, since executors run elsewhere and cannot read the files.

Owns the list of settings that name a file, and reads the files. It must never log or show the contents of a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eos.errors import ConfigurationError

FILES = {
    "ssl.ca.location": "ssl.ca.pem",
    "ssl.certificate.location": "ssl.certificate.pem",
    "ssl.key.location": "ssl.key.pem",
    "https.ca.location": "https.ca.pem",
}
"""librdkafka's setting for a file, and its setting for the contents of such a file."""
_SYSTEMS_OWN = "probe"  # librdkafka's word for the machine's own trusted certificates


def contents(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the contents of files in place of paths. Raise ConfigurationError for an unreadable
    file.
    """
    found = dict(settings)
    for location, text in FILES.items():
        path = found.get(location)
        if path is None or path == _SYSTEMS_OWN:
            continue
        try:
            found[text] = _read(Path(str(path)))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{location}={path} cannot be read: {error}") from error
        del found[location]
    return found


def _read(path: Path) -> str:
    """Return a file, or all certificates of a folder, as one text; `c_rehash` adds links, which are skipped."""
    if not path.is_dir():
        return path.read_text()
    files = sorted({file.resolve() for file in path.iterdir() if file.is_file()})
    texts = [text for file in files if "-----BEGIN" in (text := file.read_text())]
    return "\n".join(texts)
