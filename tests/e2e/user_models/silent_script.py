"""A script that reports nothing."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
os.write(1, f"the sum is {float(total)}\n".encode())
dist.destroy_process_group()
