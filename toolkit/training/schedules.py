"""Learning-rate schedules: the share of the recipe's learning rate that a step gets. Pure functions of the step.

Every schedule starts with `warmup` steps in which the share grows linearly to 1. After it, with t the steps since and n the
steps that remain then:

constant      1
step          factor^(number of whole `step_every` epochs done)
cosine        (1 + cos(π t / n)) / 2, which would be zero after the last step
inverse-sqrt  √(warmup / (warmup + t)), as in "Attention is all you need"
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SCHEDULES = ("constant", "step", "cosine", "inverse-sqrt")


@dataclass(frozen=True)
class Schedule:
    kind: str
    steps: int  # in all
    warmup: int = 0
    steps_an_epoch: int = 1
    step_every: int = 10  # epochs
    step_factor: float = 0.1

    def share(self, step: int) -> float:
        """Of the learning rate, for the step with this number; the first is 0."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        since = step - self.warmup
        if self.kind == "step":
            return self.step_factor ** (step // self.steps_an_epoch // self.step_every)
        if self.kind == "cosine":
            return 0.5 * (1 + math.cos(math.pi * since / max(1, self.steps - self.warmup)))
        if self.kind == "inverse-sqrt":
            return math.sqrt(max(1, self.warmup) / (max(1, self.warmup) + since))
        return 1.0
