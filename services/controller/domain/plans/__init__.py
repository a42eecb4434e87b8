"""Plans: the default one, the search for a better one, and what a plan shows."""
