"""What runs inside the user's process: the only room that imports torch."""
