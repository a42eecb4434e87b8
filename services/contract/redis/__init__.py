"""Where Redis is, and its keys."""
