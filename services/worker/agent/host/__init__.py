"""The machine and its processes: devices, network, memory, folders, signals, stacks."""
