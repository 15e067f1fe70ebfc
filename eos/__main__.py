"""Runs the program `eos` as `python -m eos`."""

from eos.cli import main

main()
