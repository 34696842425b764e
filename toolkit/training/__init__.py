"""One training loop for every task, driven by recipes."""
