"""Detectors: from a fault in the world to a dated reading. A probe half and a pure half each."""
