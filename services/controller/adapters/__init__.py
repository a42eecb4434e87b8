"""The residents of the ports: Redis, and a twin in memory."""
