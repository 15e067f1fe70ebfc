"""Implements the producing half of a session: the transactional producer and its ownership of the transactional.id."""
