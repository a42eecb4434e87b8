"""How a rank's process begins, is seen from outside, and ends."""
