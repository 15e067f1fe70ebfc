"""Upstream addresses: where they hide in responses, which local port stands for which broker, and that none leaks."""
