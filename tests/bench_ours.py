"""Our side of bench_generation.py: bundles made as a user makes them, decoded as an application does, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.bundle import ENCODER, Bundle
from runtime.errors import EdgekitError
from runtime.text import BOS, EOS

from .bench_peer_models import THREADS
from .bench_peers import FP32, INT4, INT8, Job, check_count

_HOME = Path(__file__).resolve().parent.parent
SCHEMES = {INT8: "int8-weights", INT4: "int4-weights"}
LETTERS, PHONEMES = 31, 43  # of the pronouncing dictionary, with the special tokens
_WORTH_A_THREAD = 8  # rows of the letters' networks: with fewer a second thread only costs
RECIPES = {"g2p-transformer": "transformer", "g2p-bahdanau": "seq2seq-attention"}
# B as the peers have it: BART's order of norms and positions; but <pad> and <bos> are our own 0 and 1
_B = {
    "vocabulary": 32_000, "target_vocabulary": 32_000, "width": 512, "heads": 8, "encoder_layers": 6, "decoder_layers": 6,
    "feedforward": 2048, "activation": "gelu", "norm": "post", "positions": "learned", "position_offset": 2,
    "shared_embeddings": "true", "embedding_norm": "true", "pad": 0,
}  # fmt: skip
_NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {"A": ("gpt2", {"pad": -1}), "B": ("transformer", _B)}


def network_of(shape: str) -> tuple[str, dict[str, Any]]:
    """Architecture and settings of a shape."""
    if shape in _NETWORKS:
        return _NETWORKS[shape]
    path = _HOME / "toolkit" / "recipes" / f"{RECIPES[shape]}.toml"
    recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    return recipe["architecture"], recipe["network"] | {"vocabulary": LETTERS, "target_vocabulary": PHONEMES}


class OurTarget:
    """What a worker times: see runtime/bench_worker.py."""

    device = "cpu"

    def __init__(self, request: dict[str, Any]) -> None:
        import runtime

        self._job = Job(**request["job"])
        rows = self._job.batch * self._job.beams
        # As quantize measured it, and the guide says: the form for many rows from so many on.
        many_from = (Bundle.open(request["bundle"]).manifest.generation or {}).get("many_rows_from", 1)
        threads = 1 if self._job.shape in RECIPES and rows < _WORTH_A_THREAD else THREADS
        self._model: Any = runtime.load(request["bundle"], device="cpu", threads=threads, many_rows=rows >= many_from)
        self.inputs = f"{self._job.batch} x {self._job.prompt} tokens"

    def prepare(self, batch: int | None) -> Callable[[], None]:
        job = self._job
        prompts = job.prompts().tolist()
        options = decoding_options(self._model.bundle, job)

        def call() -> None:
            answers = self._model.generate(prompts, **options)
            check_count(sum(len(answer.tokens) for answer in answers), job)

        return call


def decoding_options(bundle: Bundle, job: Job) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": job.new_tokens, "min_new_tokens": job.new_tokens, "beams": job.beams}
    options["stop_tokens"] = [EOS]  # which is looked for, and must not come before its time
    # The bundle of an untrained network has no tokenizer, which would know the decoder's first token.
    return options | ({"prefix": [BOS]} if ENCODER in bundle.manifest.graphs else {})


def bundle_of(shape: str, precision: str, work: Path) -> Path:
    """The bundle as a user makes it; each step's is kept."""
    architecture, settings = network_of(shape)
    changes = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    exported = _made_by("export", architecture, *changes, output=work / f"{shape}-exported.bundle")
    optimized = _made_by("optimize", str(exported), output=work / f"{shape}-optimized.bundle")
    if precision == FP32:
        return optimized
    scheme = SCHEMES[precision]
    # What random weights agree on says nothing of quality.
    accept = ("--scheme", scheme, "--max-drop", "100", "--threads", str(THREADS))
    return _made_by("quantize", str(optimized), *accept, output=work / f"{shape}-{scheme}.bundle")


def _made_by(verb: str, *arguments: str, output: Path) -> Path:
    if not output.exists():
        print(f"making {output.name}", file=sys.stderr)
        command = [sys.executable, "-m", "toolkit", verb, *arguments, "-o", str(output)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
        if result.returncode:
            raise EdgekitError(f"edgekit {verb} failed: {' '.join(result.stderr.split())[-300:]}")
    return output


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(_HOME), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path}


if __name__ == "__main__":
    from runtime.bench_worker import serve

    serve(OurTarget)
