"""What the controller needs of the world, as protocols.

Each has two residents, Redis and memory (``services.controller.adapters``), and both pass one
suite of tests. All methods raise ``StoreUnavailableError`` when the store does not answer.
"""
