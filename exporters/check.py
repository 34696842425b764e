"""Graph lint: what will hurt on a device, and how to fix it. Rules are in checks/, one a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from runtime.bundle import Bundle, is_bundle
from runtime.errors import SourceError, UnknownName
from runtime.signature import GraphSignature

from .checks import RULES, standard
from .checks.tables import TARGETS
from .figures import Figures, figures_of
from .finding import SEVERITIES, BundleRule, Finding, Graph
from .graph import operators_of, read_model, read_without_weights, signature_of


@dataclass(frozen=True)
class CheckReport:
    subject: str
    findings: tuple[Finding, ...]
    operators: dict[str, int]
    opsets: dict[str, int]
    figures: Mapping[str, Figures]  # graph → what it costs
    target: str = "cpu"

    def __bool__(self) -> bool:
        return not any(finding.severity == "error" for finding in self.findings)

    def count(self) -> Counter[str]:
        return Counter(finding.severity for finding in self.findings)

    def groups(self) -> list[list[Finding]]:
        """The findings with those together that differ only in names and numbers, in their order of severity."""
        groups: dict[tuple[str, ...], list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault(finding.kind, []).append(finding)
        return list(groups.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "target": self.target,
            "passed": bool(self),
            "findings": [vars(finding) for finding in self.findings],
            "operators": self.operators,
            "opsets": self.opsets,
            "figures": {name: figures.to_json() for name, figures in self.figures.items()},
        }


def check(path: str | Path, target: str = "cpu") -> CheckReport:
    """Check every graph of a bundle, or a single .onnx file, for a target."""
    if target not in TARGETS:
        raise UnknownName.of("target", target, TARGETS)
    graphs = [replace(graph, target=target) for graph in _graphs(Path(path))]
    invalid = {graph.name for graph in graphs if any(standard.run(graph))}
    findings = sorted(_findings(graphs, invalid), key=lambda finding: SEVERITIES.index(finding.severity))
    operators: Counter[str] = sum((operators_of(graph.model) for graph in graphs), Counter())
    opsets = {item.domain or "ai.onnx": item.version for graph in graphs for item in graph.model.opset_import}
    figures = {graph.name: figures_of(graph) for graph in graphs if graph.name not in invalid}
    return CheckReport(str(path), tuple(findings), dict(operators.most_common()), opsets, figures, target)


def _findings(graphs: Sequence[Graph], invalid: Collection[str]) -> Iterator[Finding]:
    for rule in RULES:
        if isinstance(rule, BundleRule):
            yield from rule.run([graph for graph in graphs if graph.name not in invalid])
            continue
        for graph in graphs:
            name = graph.name if len(graphs) > 1 else ""
            try:
                yield from (replace(finding, graph=name) for finding in rule.run(graph))
            except (IndexError, KeyError, TypeError, ValueError):
                if graph.name not in invalid:  # only a graph that breaks the standard, which is said, may break a rule
                    raise


def _graphs(path: Path) -> list[Graph]:
    if is_bundle(path):
        bundle = Bundle.open(path)
        feeds = {entry.graph: inputs for entry, inputs, _ in bundle.goldens()}
        return [
            _graph(name, bundle.root / entry.file, entry.signature, feeds.get(name))
            for name, entry in bundle.manifest.graphs.items()
        ]
    if path.is_dir():
        raise SourceError(f"{path} is a directory without manifest.json; expected a bundle or a .onnx file")
    return [_graph(path.stem, path, None, None)]


def _graph(name: str, path: Path, signature: GraphSignature | None, feeds: Mapping[str, NDArray[Any]] | None) -> Graph:
    model = read_without_weights(path)
    complete = True
    try:
        model = read_model(path)
    except SourceError:  # its weights are not all there: the external-data rule says which
        complete = False
    sizes = signature.check_feeds(feeds) if signature is not None and feeds is not None else None
    if signature is None:
        try:
            signature = signature_of(model)
        except SourceError:  # the rules that need a signature pass over it
            signature = None
    return Graph(name, path, model, signature, complete, sizes, feeds)
