"""What runs on a node: the agent that watches it and the ranks that compute on it."""
