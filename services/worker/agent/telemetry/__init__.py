"""What is seen of ranks from outside: boards, output, arrivals, hangs; and the beat that tells it."""
