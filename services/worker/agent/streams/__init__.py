"""The agent's connections to Redis: commands in, facts out, and whether the lease is held."""
