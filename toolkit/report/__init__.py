"""The HTML report: one self-contained page, readable without a network."""
