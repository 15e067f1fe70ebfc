"""Define what `make check`, `make test`, `make test-all` and CI run: the suites as data (table.py), and their
runner."""
