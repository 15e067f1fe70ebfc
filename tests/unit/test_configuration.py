"""`eos config` and docs/reference/settings.md: one table, no secrets, an origin for every value."""

from __future__ import annotations

from pathlib import Path

import pytest

from eos.kafka.client import librdkafka_names
from eos.kafka.client import settings as module
from eos.kafka.client.configuration import DEFAULT, FORCED, HIDDEN, MEANINGS, list_settings, render_markdown
from eos.kafka.client.settings import OPTIONS, SECRETS, Settings, read_sources

ROOT = Path(__file__).parents[2]


def test_settings_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text()
    assert page == render_markdown(), "run: make reference"


def test_settings_page_has_every_option_and_default() -> None:
    page = render_markdown()
    for name in [*OPTIONS, *module.PRODUCER_DEFAULTS, *module.CONSUMER_DEFAULTS, *module.COMMON_DEFAULTS]:
        assert f"| `{name}` |" in page, name


def test_every_value_has_an_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eos.toml").write_text('linger.ms = 5\n"compression.type" = "zstd"\neos.transaction.interval.ms = 50\n')
    given = read_sources({"compression.codec": "lz4"}, {"EOS_INSTANCE": "here"})
    values: dict[str, object] = {}
    for _, more in given:
        values |= more
    found = {row.name: (row.value, row.origin) for row in list_settings(Settings(values), given)}
    assert found["linger.ms"] == ("5", "eos.toml")
    assert found["compression.type"] == ("lz4", "command line"), "the stronger source, under its alias"
    assert found["eos.transaction.interval.ms"] == ("50", "eos.toml")
    assert found["eos.instance"] == ("here", "environment")
    assert found["group.instance.id"] == ("here", DEFAULT)
    assert found["isolation.level"] == ("read_committed", FORCED)
    assert found["transaction.timeout.ms"] == ("10000", DEFAULT)


def test_shown_values_match_client_configuration() -> None:
    settings = Settings({"group.id": "g", "linger.ms": 7})
    found = {row.name: row.value for row in list_settings(settings, [])}
    for client in (settings.consumer(), settings.producer("id")):
        for name, value in client.items():
            if name in found and name not in ("auto.offset.reset",):  # resolved by the session, see docs/DESIGN.md
                assert found[name] == str(value).lower() if isinstance(value, bool) else str(value), name


@pytest.mark.parametrize("name", sorted(SECRETS))
def test_secret_is_not_shown(name: str) -> None:
    found = {row.name: row.value for row in list_settings(Settings({name: "hunter2"}), [("flag", {name: "hunter2"})])}
    assert found[name] == HIDDEN


def test_settings_with_secret_sounding_names_are_secrets() -> None:
    known = librdkafka_names.COMMON | librdkafka_names.CONSUMER_ONLY | librdkafka_names.PRODUCER_ONLY
    sounds = {n for n in known if any(w in n for w in ("password", "secret", "passphrase", "private.key.pem"))}
    assert sounds
    assert sounds <= SECRETS


def test_every_described_setting_exists() -> None:
    known = librdkafka_names.COMMON | librdkafka_names.CONSUMER_ONLY | librdkafka_names.PRODUCER_ONLY
    assert set(MEANINGS) <= known
