"""Faults on purpose: the catalogue, the campaign against real processes, and the simulator."""
