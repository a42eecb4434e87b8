"""The training loop: its parts, built whole, and one step after the other."""
