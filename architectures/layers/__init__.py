"""Blocks that several networks are made of."""
