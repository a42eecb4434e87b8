"""Data that comes with the rank, and what a data source of the user's own must offer."""
