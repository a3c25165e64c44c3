"""Observers of events: metrics, files, console. Only the composition root imports this room."""
