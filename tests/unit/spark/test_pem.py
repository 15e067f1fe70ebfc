"""Files that settings name travel as what they hold: an executor cannot see them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eos.errors import ConfigurationError
from spark_connector.java_settings import java_consumer
from spark_connector.options import Options
from spark_connector.pem import contents

CERTIFICATE = "-----BEGIN CERTIFICATE-----\n{0}\n-----END CERTIFICATE-----\n"


def test_no_setting_names_a_file_any_more(tmp_path: Path) -> None:
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
    # What asks the coordinator from the driver may see a file that was replaced meanwhile.
    assert options.settings["ssl.ca.location"] == settings["ssl.ca.location"]


def test_a_folder_is_all_of_its_certificates_once_each(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.crt").write_text(CERTIFICATE.format(name))
    os.symlink("a.crt", tmp_path / "5ed36f99.0")  # as c_rehash makes them
    (tmp_path / "README").write_text("about them")
    assert contents({"ssl.ca.location": str(tmp_path)}) == {
        "ssl.ca.pem": "\n".join(CERTIFICATE.format(name) for name in "ab")
    }


@pytest.mark.parametrize("name", ["ssl.ca.location", "ssl.key.location", "https.ca.location"])
def test_a_file_that_is_not_there_is_refused_by_its_setting(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name}=.*nowhere.pem cannot be read: .*No such file"):
        contents({name: str(tmp_path / "nowhere.pem")})


def test_what_the_machine_itself_trusts_stays_the_machines() -> None:
    assert contents({"ssl.ca.location": "probe"}) == {"ssl.ca.location": "probe"}
