"""Graph lint: what will hurt on a device, and how to fix it. Rules are in checks/, one a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.bundle import Bundle, is_bundle
from runtime.errors import SourceError
from runtime.signature import GraphSignature

from .checks import RULES
from .finding import SEVERITIES, Finding, Graph
from .graph import operators_of, read_model, read_without_weights, signature_of


@dataclass(frozen=True)
class CheckReport:
    subject: str
    findings: tuple[Finding, ...]
    operators: dict[str, int]
    opsets: dict[str, int]

    def __bool__(self) -> bool:
        return not any(finding.severity == "error" for finding in self.findings)

    def count(self) -> Counter[str]:
        return Counter(finding.severity for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "passed": bool(self),
            "findings": [vars(finding) for finding in self.findings],
            "operators": self.operators,
            "opsets": self.opsets,
        }


def check(path: str | Path) -> CheckReport:
    """Check every graph of a bundle, or a single .onnx file."""
    graphs = _graphs(Path(path))
    findings = [finding for graph in graphs for rule in RULES for finding in rule.run(graph)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    operators: Counter[str] = sum((operators_of(graph.model) for graph in graphs), Counter())
    opsets = {item.domain or "ai.onnx": item.version for graph in graphs for item in graph.model.opset_import}
    return CheckReport(str(path), tuple(findings), dict(operators.most_common()), opsets)


def _graphs(path: Path) -> list[Graph]:
    if is_bundle(path):
        bundle = Bundle.open(path)
        sizes = {
            entry.graph: bundle.manifest.graphs[entry.graph].signature.check_feeds(inputs)
            for entry, inputs, _ in bundle.goldens()
        }
        return [
            _graph(name, bundle.root / entry.file, entry.signature, sizes.get(name))
            for name, entry in bundle.manifest.graphs.items()
        ]
    if path.is_dir():
        raise SourceError(f"{path} is a directory without manifest.json; expected a bundle or a .onnx file")
    return [_graph(path.stem, path, None, None)]


def _graph(name: str, path: Path, signature: GraphSignature | None, sizes: Mapping[str, int] | None) -> Graph:
    model = read_without_weights(path)
    complete = True
    try:
        model = read_model(path)
    except SourceError:  # its weights are not all there: the external-data rule says which
        complete = False
    if signature is None:
        try:
            signature = signature_of(model)
        except SourceError:  # the rules that need a signature pass over it
            signature = None
    return Graph(name, path, model, signature, complete, sizes)
