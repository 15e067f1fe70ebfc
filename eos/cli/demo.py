"""`eos demo`."""


def demo() -> int:
    """Kill workers on real data and prove that nothing was lost or doubled."""
    raise NotImplementedError
