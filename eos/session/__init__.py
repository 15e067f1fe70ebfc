"""Runs one transaction after the other over a consumer and its producers, and decides each commit or abort."""
