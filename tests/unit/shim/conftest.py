"""How hypothesis runs here: examples without a deadline, and `--hypothesis-profile fuzz` for a long search."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("shim", deadline=None)
settings.register_profile("fuzz", deadline=None, max_examples=20_000, suppress_health_check=list(HealthCheck))
settings.load_profile("shim")
