"""What the agent observes of its ranks (boards, output, arrivals, hangs), and the heartbeat that reports it."""
