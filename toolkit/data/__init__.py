"""Data sets, one a file: those that come with a library, and the user's own tables, image folders and arrays."""
