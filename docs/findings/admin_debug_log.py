"""kafka-python: the debug log of KafkaAdminClient contains the passwords of SASL and of the TLS key."""

import contextlib
import io
import logging
import sys

from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaError

log = io.StringIO()
logging.basicConfig(stream=log, level=logging.DEBUG)
with contextlib.suppress(KafkaError):  # no server listens there: no broker is needed
    KafkaAdminClient(
        bootstrap_servers="127.0.0.1:9",
        bootstrap_timeout_ms=300,
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="PLAIN",
        sasl_plain_username="me",
        sasl_plain_password="correct-horse",
        ssl_password="battery-staple",
    )
lines = [line for line in log.getvalue().splitlines() if "correct-horse" in line or "battery-staple" in line]
for line in lines:
    print(f"{line[:70]} ... {line[line.index('sasl_plain_password') - 1 :][:42]} ...")
print("SEEN: passwords are in the log" if lines else "not seen: no password in the log")
sys.exit(0 if lines else 1)
