"""From a network to a bundle: export, check, optimize, quantize — each result proved before it is written."""
