"""kafka-python: each KafkaAdminClient that finds no broker leaves a thread running that cannot be ended."""

import sys
import threading
import time

from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaError

before = threading.active_count()
for _ in range(5):
    try:
        KafkaAdminClient(bootstrap_servers="127.0.0.1:9", bootstrap_timeout_ms=300)  # no server listens there
    except KafkaError as error:
        print(f"no client: {type(error).__name__}")
deadline = time.monotonic() + 10
while threading.active_count() > before and time.monotonic() < deadline:
    time.sleep(0.1)
left = [thread.name for thread in threading.enumerate()][before:]
print(f"threads ten seconds later: {', '.join(left) or 'none'}")
print(f"SEEN: {len(left)} threads are left" if left else "not seen: no thread is left")
sys.exit(0 if left else 1)
