"""Figures that docs cite, each by a command; no part of what is installed."""
