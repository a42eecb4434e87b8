"""Bridges to libraries that ask for PyTorch's own FSDP classes."""

from __future__ import annotations
