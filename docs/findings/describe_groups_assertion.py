"""librdkafka: a coordinator found after the timeout of describe_consumer_groups() ends the process."""

import subprocess
import sys

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from eos.broker import DEFAULT_VERSION, LocalKafka
from eos.shim.faults import Phase, Plan, Rule
from eos.testing.shim import ShimThread

if sys.argv[1:2] == ["--ask"]:
    admin = AdminClient({"bootstrap.servers": sys.argv[2], "log_level": 0})
    try:
        admin.describe_consumer_groups(["group"], request_timeout=2)["group"].result()
    except KafkaException as error:
        print(f"the query ended: {error.args[0].name()}", flush=True)
    for _ in range(8):  # the program continues; the response arrives meanwhile
        admin.poll(1)
    print("the program finished")
    sys.exit()

with LocalKafka(version=sys.argv[1] if len(sys.argv) > 1 else DEFAULT_VERSION) as kafka:
    slow = Rule("FindCoordinator", "delay", Phase.AFTER_APPLY, times=9, seconds=4)
    with ShimThread(kafka.bootstrap_servers, Plan([slow])) as shim:
        asking = [sys.executable, __file__, "--ask", shim.bootstrap_servers]
        ended = subprocess.run(asking, capture_output=True, text=True, timeout=60, check=False)
print(ended.stdout + ended.stderr, end="")
seen = ended.returncode < 0
print(f"SEEN: signal {-ended.returncode} ended the process" if seen else "not seen: the process continued")
sys.exit(0 if seen else 1)
