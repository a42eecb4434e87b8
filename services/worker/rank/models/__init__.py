"""Models that come with the rank, and what a model of the user's own must offer."""
