"""kafka-python: with the log level DEBUG every client writes the password, or the token, of its login into the log."""

import io
import logging
import sys

from kafka import KafkaProducer

from eos.broker import DEFAULT_VERSION, LocalKafka
from eos.broker.node import free_ports

JAAS = (
    "org.apache.kafka.common.security.plain.PlainLoginModule required "
    'username="admin" password="admin" user_admin="admin" user_me="correct-horse";'
)
broker, login, controller = free_ports(3)
listeners = {
    "listeners": f"PLAINTEXT://127.0.0.1:{broker},SASL://127.0.0.1:{login},CONTROLLER://127.0.0.1:{controller}",
    "advertised.listeners": f"PLAINTEXT://127.0.0.1:{broker},SASL://127.0.0.1:{login}",
    "controller.quorum.voters": f"0@127.0.0.1:{controller}",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,SASL:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
    "sasl.enabled.mechanisms": "PLAIN",
    "listener.name.sasl.plain.sasl.jaas.config": JAAS,
}
log = io.StringIO()
logging.basicConfig(stream=log, level=logging.DEBUG)
with LocalKafka(port=broker, version=sys.argv[1] if len(sys.argv) > 1 else DEFAULT_VERSION, config=listeners):
    producer = KafkaProducer(
        bootstrap_servers=f"127.0.0.1:{login}",
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="PLAIN",
        sasl_plain_username="me",
        sasl_plain_password="correct-horse",
    )
    producer.close()
lines = [line for line in log.getvalue().splitlines() if "correct-horse" in line]
for line in lines:
    print(f"{line[:60]} ... {line[line.index('correct-horse') - 12 :][:30]} ...")
print("SEEN: the password is in the log" if lines else "not seen: the password is not in the log")
sys.exit(0 if lines else 1)
