"""What the settings' PEM files hold, in place of where they are: executors run elsewhere and cannot see the files.

Owns which settings name a file, and the reading. It must never log or show what a file holds.
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
"""librdkafka's setting of a file, and its setting of what such a file holds."""
_SYSTEMS_OWN = "probe"  # librdkafka's word for the certificates that the machine itself trusts


def contents(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings without a file. Raises ConfigurationError, with the setting, for one that cannot be read."""
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
    """A folder of certificates (`c_rehash` has links to them in it, which are the same again) as one text."""
    if not path.is_dir():
        return path.read_text()
    files = sorted({file.resolve() for file in path.iterdir() if file.is_file()})
    texts = [text for file in files if "-----BEGIN" in (text := file.read_text())]
    return "\n".join(texts)
