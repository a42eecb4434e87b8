"""A job and what belongs to it: its record, its attempts and checkpoints, its states, its events."""
