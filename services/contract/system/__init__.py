"""How processes of ours behave on their system: durable files, pipes, users, signals."""
