"""Implements the consuming half of a session: its group, its offsets and the waiting records."""
