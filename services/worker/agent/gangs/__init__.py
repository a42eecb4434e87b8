"""Gangs on this node: what is decided about one, and what performs it."""
