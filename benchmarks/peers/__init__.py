"""The same job on other frameworks: Kafka Streams (Java) and Quix Streams. `make bench-peers` runs speed.py."""
