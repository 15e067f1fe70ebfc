"""Examines and changes a cluster: preflight checks, transactions, group offsets, and reading and watching topics."""
