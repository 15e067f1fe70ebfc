"""Which failures get a second try: what a slow machine does. What was found wrong, a loss above all, is final."""

SECOND_TRY = (
    "--reruns=1",
    # A wait that was too long (tests/support/reading.py), a process, a call of the client, the test itself.
    r"--only-rerun=^(TooSlow|TimeoutExpired|TimeoutError|KafkaTimeoutError|Unavailable|Failed: Timeout)\b"
    r"|^(KafkaException|CallFailed): .*(_TIMED_OUT|_TRANSPORT|COORDINATOR_LOAD_IN_PROGRESS)",
    "--rerun-except=^Violated",
)
"""Arguments of pytest (pytest-rerunfailures); `make` names each test that took a second try."""
