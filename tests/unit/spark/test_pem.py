"""Files named in settings are sent to executors by content, because executors cannot read them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eos.errors import ConfigurationError
from spark_connector.java_settings import java_consumer
from spark_connector.options import Options
from spark_connector.pem import contents

CERTIFICATE = "-----BEGIN CERTIFICATE-----\n{0}\n-----END CERTIFICATE-----\n"


def test_settings_contain_file_contents_instead_of_paths(tmp_path: Path) -> None:
    files = {"ssl.ca.location": "ca", "ssl.certificate.location": "own", "ssl.key.location": "key"}
    for name in files.values():
        (tmp_path / name).write_text(name.upper())
    settings = {setting: str(tmp_path / name) for setting, name in files.items()}
    options = Options.of("t", "id", "broker:9092", settings, "none")
    assert str(tmp_path) not in str(options.connection)
    assert {k: v for k, v in options.connection.items() if k.startswith("ssl.")} == {
        "ssl.ca.pem": "CA",
        "ssl.certificate.pem": "OWN",
        "ssl.key.pem": "KEY",
    }
    java = java_consumer(settings)
    assert (java["ssl.truststore.certificates"], java["ssl.keystore.key"]) == ("CA", "KEY")
    # Queries that run on the driver keep the path, so that they use a replaced file.
    assert options.settings["ssl.ca.location"] == settings["ssl.ca.location"]


def test_folder_is_sent_as_its_distinct_certificates(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.crt").write_text(CERTIFICATE.format(name))
    os.symlink("a.crt", tmp_path / "5ed36f99.0")  # a link like those of c_rehash
    (tmp_path / "README").write_text("about them")
    assert contents({"ssl.ca.location": str(tmp_path)}) == {
        "ssl.ca.pem": "\n".join(CERTIFICATE.format(name) for name in "ab")
    }


@pytest.mark.parametrize("name", ["ssl.ca.location", "ssl.key.location", "https.ca.location"])
def test_error_for_a_missing_file_names_the_setting(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name}=.*nowhere.pem cannot be read: .*No such file"):
        contents({name: str(tmp_path / "nowhere.pem")})


def test_ssl_ca_location_probe_is_kept() -> None:
    assert contents({"ssl.ca.location": "probe"}) == {"ssl.ca.location": "probe"}
