"""`python -m eos` is the same program as `eos`."""

from eos.cli import main

main()
