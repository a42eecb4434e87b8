"""A rank that runs the user's script: as torchrun would run it, and what the script may ask of us."""
