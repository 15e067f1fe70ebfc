"""Define which failures get a second try: those of a slow machine. A violation, above all a loss, is final."""

SECOND_TRY = (
    "--reruns=1",
    # A wait that took too long (tests/support/reading.py), a process, a call of the client, or the test itself.
    r"--only-rerun=^(TooSlow|TimeoutExpired|TimeoutError|KafkaTimeoutError|Unavailable|Failed: Timeout)\b"
    r"|^(KafkaException|CallFailed): .*(_TIMED_OUT|_TRANSPORT|COORDINATOR_LOAD_IN_PROGRESS)",
    "--rerun-except=^Violated",
)
"""Arguments of pytest (pytest-rerunfailures); `make` names each test that needed a second try."""
