"""The lint rules. To add one: a file here, and a line in RULES."""

from . import (
    constants,
    external_data,
    frozen_axes,
    non_finite,
    operators,
    shapes,
    standard,
    unsupported,
    unused,
    wide_types,
)

RULES = (
    standard.RULE,
    unsupported.RULE,
    external_data.RULE,
    shapes.RULE,
    operators.RULE,
    frozen_axes.RULE,
    wide_types.RULE,
    constants.RULE,
    unused.RULE,
    non_finite.RULE,
)
