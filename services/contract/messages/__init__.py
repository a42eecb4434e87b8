"""What machines say to each other, one module for each way of saying it.

Commands and facts travel on Redis streams at least once: whoever handles one must bear a repeat.
All carry the fence of the attempt that they speak of; lower than the current one is void.
"""
