"""Provides what clients of the cluster need: settings, logins, errors, calls with deadlines, and the World."""

from eos.kafka.client.lean_import import defer

defer("kafka")
