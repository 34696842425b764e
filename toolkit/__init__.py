"""The product around the other three packages: commands, data, training and reports."""
