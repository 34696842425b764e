"""How variants of a bundle of a network on text are judged: by their task's metric on held-out texts, through the runtime.

Not on all of them, since a search measures many variants: some, spread over all.
"""

from __future__ import annotations

from typing import Any

from exporters.quantize import Quality
from runtime.bundle import Bundle
from runtime.errors import DataError, OptionError
from runtime.metrics import Metric
from runtime.model import Model

from .text_evaluation import measure_text, text_for

_CHARACTERS = 60_000
_TEXTS = 1000


def _not_from_outputs(outputs: Any, targets: Any) -> float:
    raise AssertionError("this metric is measured on texts")


_METRICS = {  # task → its metric, and what it is called among those that are measured
    "language-model": ("perplexity", Metric("perplexity", "", False, 2.0, _not_from_outputs)),
    "seq2seq": ("per", Metric("error rate", "%", False, 0.5, _not_from_outputs)),
    "classification": ("accuracy", Metric("accuracy", "%", True, 0.5, _not_from_outputs)),
}


def quality_on_texts(bundle: Bundle, path: str | None) -> Quality | None:
    """None where there is nothing to read: no tokenizer, no metric for the task, or, without a path, no data at hand."""
    manifest = bundle.manifest
    if path is not None and not manifest.tokenizers:
        raise OptionError(
            f"--data: {bundle.root.name} has no tokenizer to read texts with; leave it out: quality is then measured on the "
            "network's own answers"
        )
    if manifest.task not in _METRICS or not manifest.tokenizers:
        return None  # such texts calibrate, and quality is agreement with fp32
    try:
        texts, where = text_for(bundle, path)
    except (OptionError, DataError):
        if path is not None:
            raise
        return None
    texts, count = _some(texts), len(texts)
    name, metric = _METRICS[manifest.task]

    def measure(variant: Bundle) -> float:
        found, _ = measure_text(Model(variant, device="cpu", many_rows=True), texts)
        return float(found[name])

    return Quality(metric, measure, where if len(texts) == count else f"{len(texts)} of {where}")


def _some(texts: Any) -> Any:
    """As many, spread over all, as can be read again and again."""
    most = _TEXTS
    if texts.task == "language-model":
        most = max(1, int(len(texts) * _CHARACTERS / max(1, len(texts.stream))))
    return texts.limited(most) if most < len(texts) else texts
