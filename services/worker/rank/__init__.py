"""The rank: runs the user's model on ``fsdp_core``; knows its agent's pipe and storage only."""
