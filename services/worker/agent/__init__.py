"""The agent: watches one node, starts, stops and reaps ranks, and never imports torch."""
