"""Benchmarks: run from the project root as `python -m bench.X`; each prints its figure last."""
