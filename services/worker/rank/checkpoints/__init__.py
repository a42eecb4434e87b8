"""What a rank saves, how it writes it, and how it is loaded."""
