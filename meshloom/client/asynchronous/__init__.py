"""The client in async code. ``meshloom.client.synchronous`` is generated from this package."""
