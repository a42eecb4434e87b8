"""What the services agree on: words, shapes, keys and channels, and nothing that acts."""
