"""What a benchmark's worker times of a bundle; see bench_worker.py. Imports wait until it is opened: part of a cold start."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from .bundle import DECODER, Bundle
from .errors import OptionError
from .signature import GraphSignature


class BundleTarget:
    """One graph of a bundle, on its golden inputs repeated to the batch size; of a decoder, one token after a past."""

    def __init__(self, request: dict[str, Any]) -> None:
        from .session import Session

        bundle = Bundle.open(request["path"])
        name, graph = bundle.graph(request["graph"] or (None if len(bundle.manifest.graphs) == 1 else DECODER))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the device is in the report
            self._session = Session(
                bundle.graph_path(name), graph.signature, device=request["device"], threads=request["threads"]
            )
        self.device = self._session.device
        self._signature = graph.signature
        self._past: int = request["past"]
        longest = (bundle.manifest.generation or {}).get("longest")
        if graph.signature.states and longest is not None and self._past >= longest:
            raise OptionError(
                f"--past {self._past} leaves no position for one more: this network has {longest}; take a shorter past"
            )
        _, self._inputs, _ = next(golden for golden in bundle.goldens() if golden[0].graph == name)
        shapes = _shapes_text(graph.signature, self._inputs)
        self.inputs = f"{name}: one token after {self._past}" if graph.signature.states else shapes

    def prepare(self, batch: int | None) -> Callable[[], object]:
        from .feeds import batch_of, natural_batch

        size = natural_batch(self._signature) if batch is None else batch
        if self._signature.states:
            from .state import step_feeds

            return self._session.bind(step_feeds(self._signature, size, self._past))
        feeds = batch_of(self._signature, self._inputs, size)
        self._session.run(feeds)  # checked once; the timed calls are the runtime's own path without the checks
        return lambda: self._session.run_unchecked(feeds)


def _shapes_text(signature: GraphSignature, inputs: Mapping[str, NDArray[Any]]) -> str:
    """e.g. "pixels[batch, 1, 8, 8]"."""
    from .feeds import batch_axis_of

    batch = batch_axis_of(signature)
    texts = []
    for spec in signature.inputs:
        sizes = zip(spec.shape, inputs[spec.name].shape, strict=True)
        texts.append(f"{spec.name}[{', '.join('batch' if dim == batch else str(size) for dim, size in sizes)}]")
    return ", ".join(texts)
