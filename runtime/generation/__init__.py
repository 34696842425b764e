"""Decoding: from a prompt and options to generated texts."""
