"""Run records through an App's functions: what workers, replays, tests and Spark have in common."""
