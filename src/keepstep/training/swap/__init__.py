"""The C++ half of group swapping: its source, its build step, and what was built."""
