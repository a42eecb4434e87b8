"""Figures that the documents state: each module is a command that measures one of them."""
