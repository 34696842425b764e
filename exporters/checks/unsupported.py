"""unsupported: inputs and outputs that no command here can feed or read: text, sequences, maps, optional and sparse tensors."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.errors import SourceError

from ..finding import Finding, Graph, Rule
from ..graph import signature_of


def run(graph: Graph) -> Iterator[Finding]:
    try:
        signature_of(graph.model, observed_outputs=True)
    except SourceError as error:
        reason, _, fix = str(error).partition("; ")
        yield Finding("unsupported", "error", "", reason, fix)


RULE = Rule("unsupported", "inputs and outputs are tensors of numbers", run)
