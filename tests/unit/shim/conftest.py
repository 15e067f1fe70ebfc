"""Configure Hypothesis for the shim's tests: no deadline; EOS_FUZZ_EXAMPLES=50000 makes a long search."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.unit.shim.messages import FUZZ_EXAMPLES

settings.register_profile(
    "shim", deadline=None, max_examples=FUZZ_EXAMPLES or 20, suppress_health_check=list(HealthCheck)
)
settings.load_profile("shim")
