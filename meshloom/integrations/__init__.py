"""Connects trainers of other libraries to Meshloom: ``transformers``, ``accelerate``, ``lightning``.

Each module imports its library; none is needed by another.
"""
