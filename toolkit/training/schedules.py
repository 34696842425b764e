"""Learning-rate schedules: the share of the recipe's learning rate that an epoch gets. Pure functions of the epoch."""

from __future__ import annotations

import math
from collections.abc import Callable

SCHEDULES: dict[str, Callable[[int, int], float]] = {
    "constant": lambda epoch, epochs: 1.0,
    "cosine": lambda epoch, epochs: 0.5 * (1 + math.cos(math.pi * epoch / epochs)),
}
