"""The systems that are compared, one file each. A new system is one more file; see arm.py."""
