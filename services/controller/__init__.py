"""The controller: decides which node runs what, and tells people the truth about it."""
