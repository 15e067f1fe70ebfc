"""The consuming half of a session: its group, its offsets and the records that wait."""
