"""The parts of docs/reproduction.md, one module for each source; see `reproduction.py`."""
