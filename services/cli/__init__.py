"""The ``meshloom`` command and the Python client: REST and nothing else."""
