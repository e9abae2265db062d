"""The agent: one process per node that starts and watches workers. It never imports torch."""
