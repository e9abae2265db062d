"""What faults cost, and what was kept: accounts of time and money. Pure."""
