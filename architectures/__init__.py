"""The networks, in PyTorch. `catalog.py` is the one table of names."""
