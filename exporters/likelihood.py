"""How good a quantized network on text is, without data: how likely it finds what the original itself writes.

The original draws a few texts from its own probabilities p. A variant with probabilities q that reads them is judged by

    likelihood = 100 · exp(-KL),   KL = mean over the tokens of Σ p log(p / q)

100 % is equality; at 98 % its perplexity on such texts is 1 / 0.98 of the original's. The source of an encoder–decoder goes
through the variant's encoder as well. The share of tokens whose likeliest successor is still the same is told beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.bundle import DECODER, ENCODER, MANY, Bundle
from runtime.errors import QuantizationRefused
from runtime.metrics import Metric
from runtime.session import Session
from runtime.state import LOGITS, step

from .heads import log_softmax
from .laws import Host, Text
from .quantize import Quality

_ROWS, _TOKENS = 4, 24
_BUDGET = 5.0  # points: perplexity grows by a twentieth at most

Array = NDArray[Any]


@dataclass(frozen=True)
class Comparison:
    likelihood: float  # percent
    divergence: float  # nats a token
    agreement: float  # percent of the tokens
    tokens: int

    def __str__(self) -> str:
        return (
            f"KL divergence {self.divergence:.2g} nats a token, the likeliest token is the same for {self.agreement:.1f} % "
            f"of {self.tokens}"
        )


def compare_logits(reference: Array, logits: Array) -> Comparison:
    """Both (…, vocabulary). What is not finite agrees with nothing."""
    wanted, got = reference.reshape(-1, reference.shape[-1]), logits.reshape(-1, logits.shape[-1])
    if not np.isfinite(got).all():
        return Comparison(0.0, float("inf"), 0.0, len(wanted))
    p, q = log_softmax(wanted), log_softmax(got)
    divergence = max(0.0, float(np.mean(np.sum(np.exp(p) * (p - q), axis=-1))))
    same = float(100 * np.mean(wanted.argmax(-1) == got.argmax(-1)))
    return Comparison(100 * float(np.exp(-divergence)), divergence, same, len(wanted))


METRIC = Metric("likelihood", "%", True, _BUDGET, lambda logits, reference: compare_logits(reference, logits).likelihood)


def generates(bundle: Bundle) -> bool:
    return DECODER in bundle.manifest.graphs


def quality_of_text(bundle: Bundle) -> Quality:
    """How to judge variants of a bundle whose network generates text."""
    host = _hosts(bundle)[0]
    text = _own_text(bundle, host)
    reference = host.feed(text, [text.tokens])
    if not np.isfinite(reference).all():
        raise QuantizationRefused(
            f"{bundle.root.name} itself gives logits that are not finite numbers; nothing can be compared"
        )
    found: dict[str, Comparison] = {}

    def compared(variant: Bundle) -> Comparison:
        """Of the form of its decoder that does worse, if there are two."""
        if variant.seal not in found:
            forms = [compare_logits(reference, form.feed(text, [text.tokens])) for form in _hosts(variant)]
            found[variant.seal] = min(forms, key=lambda item: item.likelihood)
        return found[variant.seal]

    where = f"{text.tokens.size} tokens that the original itself writes"
    return Quality(
        METRIC, lambda variant: compared(variant).likelihood, where, lambda variant: f"on {where}: {compared(variant)}"
    )


def _hosts(bundle: Bundle) -> list[Host]:
    graphs = bundle.manifest.graphs
    sessions = {name: Session(bundle.graph_path(name), graph.signature, device="cpu") for name, graph in graphs.items()}
    pad = (bundle.manifest.generation or {}).get("pad")
    encoder = {ENCODER: sessions[ENCODER]} if ENCODER in sessions else {}
    forms = [name for name in (DECODER, MANY) if name in sessions]
    return [Host({DECODER: sessions[form], **encoder}, -1 if pad is None else pad) for form in forms]


def _own_text(bundle: Bundle, host: Host) -> Text:
    """Texts drawn from the network's own probabilities, to the sources of its goldens.

    A graph that takes several tokens at a time cannot write one after the other, and gets any tokens.
    """
    random = np.random.default_rng(0)
    vocabulary = next(spec.shape[-1] for spec in host.signature.outputs if spec.name == LOGITS)
    assert isinstance(vocabulary, int)
    words = np.array([token for token in range(vocabulary) if token != host.pad])
    source = _source(bundle)
    rows = host.sizes.rows or (_ROWS if source is None else len(source))
    about = bundle.manifest.generation or {}
    longest = min(about.get("longest") or _TOKENS, host.sizes.capacity(_TOKENS), _TOKENS)
    size = max(1, longest // host.sizes.tokens_at_once) * host.sizes.tokens_at_once
    tokens = random.choice(words, (rows, size))
    if host.sizes.tokens_at_once > 1:
        return Text(tokens, source, np.empty(0), 0.0)
    if about.get("bos") is not None:
        tokens[:, 0] = about["bos"]
    memory, state = host.start(Text(tokens, source, np.empty(0), 0.0), size)
    for place in range(1, size):
        logits, state = step(host.sessions[DECODER], tokens[:, place - 1 : place], state, memory)
        chances = logits[:, -1].astype(np.float64) + random.gumbel(size=(rows, vocabulary))  # the largest is a draw
        tokens[:, place] = words[chances[:, words].argmax(axis=-1)]
    return Text(tokens, source, np.empty(0), 0.0)


def _source(bundle: Bundle) -> Array | None:
    if ENCODER not in bundle.manifest.graphs:
        return None
    sources = [inputs["source"] for entry, inputs, _ in bundle.goldens() if entry.graph == ENCODER]
    return max(sources, key=len)[:_ROWS]
