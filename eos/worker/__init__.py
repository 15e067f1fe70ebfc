"""Runs an App on a session: error policies, dead letters, slow functions, hooks, worker processes."""
