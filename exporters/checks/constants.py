"""unfolded-constants: nodes whose inputs are all constants are computed anew on every run on hosts that do not fold."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Finding, Graph, Rule

_NEVER = {
    "DequantizeLinear",
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
    "Bernoulli",
    "Multinomial",
}


def run(graph: Graph) -> Iterator[Finding]:
    constant = {item.name for item in graph.model.graph.initializer}
    foldable = []
    for node in graph.model.graph.node:
        named = [name for name in node.input if name]
        if node.op_type == "Constant":
            constant.update(node.output)
        elif named and all(name in constant for name in named) and node.op_type not in _NEVER:
            constant.update(node.output)
            foldable.append(node)
    if foldable:
        yield Finding(
            "unfolded-constants",
            "warning",
            foldable[0].name or foldable[0].op_type,
            f"{len(foldable)} nodes compute constants on every run (first: {foldable[0].op_type})",
            "run: edgekit optimize",
        )


RULE = Rule("unfolded-constants", "nothing constant is computed at run time", run)
