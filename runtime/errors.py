"""Every error Edgekit raises on purpose.

    EdgekitError              exit 2: misuse or bad input
    ├── OptionError           options that contradict each other, or a value of the wrong type
    ├── UnknownName           a name that is not in a table; says the closest one
    ├── BundleError           a bundle that cannot be opened
    │   ├── AlteredFile       a file whose bytes are not the ones the manifest lists
    │   └── NewerFormat       a bundle written by a newer Edgekit
    ├── FeedError             inputs that do not fit a graph's signature
    ├── GenerationError       a generation that cannot start or go on: no room, or no token that is allowed
    ├── DeviceError           a device that was asked for and cannot be used
    ├── DataError             a data file that cannot be read as asked
    ├── SourceError           something that cannot be exported
    ├── OutputExists          a path that would have to be overwritten
    ├── MissingDependency     an optional package that is not installed
    └── Refusal               exit 1: the work was done and the answer is no
        ├── ParityRefused
        └── QuantizationRefused

A message says what happened, what was expected, and what to do about it, in one line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class EdgekitError(Exception):
    """Base of the tree. `exit_code` is what a command ends with."""

    exit_code = 2


class OptionError(EdgekitError):
    pass


class UnknownName(EdgekitError):
    @classmethod
    def of(cls, kind: str, name: str, known: Iterable[str]) -> UnknownName:
        """The error for `name`, with the closest known name and the whole list."""
        names = sorted(known)
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return cls(f"no {kind} named {name!r}; {hint}known: {', '.join(names)}")


class BundleError(EdgekitError):
    pass


class AlteredFile(BundleError):
    pass


class NewerFormat(BundleError):
    pass


class FeedError(EdgekitError):
    pass


class GenerationError(EdgekitError):
    pass


class DeviceError(EdgekitError):
    pass


class DataError(EdgekitError):
    pass


class SourceError(EdgekitError):
    pass


class OutputExists(EdgekitError):
    pass


class MissingDependency(EdgekitError):
    @classmethod
    def of(cls, package: str, extra: str, purpose: str) -> MissingDependency:
        return cls(f"{purpose} needs {package}, which is not installed; run: pip install 'edgekit[{extra}]'")


class Refusal(EdgekitError):
    exit_code = 1


class ParityRefused(Refusal):
    failed_sizes: tuple[Mapping[str, int], ...] = ()  # of the dynamic axes, in the cases that disagreed
    frozen_axis: str | None = None  # the dynamic axis that the graph has as a number


class QuantizationRefused(Refusal):
    pass
