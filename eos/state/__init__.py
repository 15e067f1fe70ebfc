"""Keeps the state of functions: where it is stored, how transactions change it and how a restart restores it.

The changelog, a compacted topic per function, is the source of truth. A transaction writes the state that it changed to
the changelog together with its outputs and offsets. A worker's session does not know about state: eos/state/keeper.py
takes part in its transactions (eos/session/outcomes.py).
"""
