"""REST v1: thin routes over the use cases."""
