"""Metrics on their way out of a run: files beside the logs, the agent, and services of the user's."""
