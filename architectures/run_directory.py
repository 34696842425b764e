"""A run directory: what training leaves behind, and what export starts from.

run.json             architecture, configuration, preprocessing, labels, data, recipe, metrics, status
weights.safetensors  the weights that were kept
tokenizer-*.json     text: how each side is cut into tokens
curves.csv, .png     loss, metric and learning rate of every epoch; confusion.png and attention.png where they apply
checkpoint.safetensors   only while training (see toolkit/training)
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from runtime.errors import SourceError
from runtime.files import write_file
from runtime.signature import TensorSpec
from runtime.text import Tokenizer

from .catalog import find
from .raw_input import Preprocessing, build_network

RUN_FILE = "run.json"
WEIGHTS_FILE = "weights.safetensors"
FORMAT = 1


@dataclass(frozen=True)
class Run:
    architecture: str
    config: dict[str, Any]
    task: str
    preprocessing: Preprocessing | None  # None for text
    labels: tuple[str, ...] | None
    data: dict[str, Any]
    recipe: dict[str, Any]
    tokenizers: tuple[str, ...] = ()  # "text", or "source" and "target"
    status: str = "training"  # then "complete"
    metrics: dict[str, Any] | None = None

    def save(self, directory: Path) -> None:
        document = {"format": FORMAT, **asdict(self)}
        write_file(directory / RUN_FILE, json.dumps(document, indent=1) + "\n")

    @classmethod
    def open(cls, directory: str | Path) -> Run:
        path = Path(directory) / RUN_FILE
        if not path.is_file():
            raise SourceError(f"{directory} is not a run: it has no {RUN_FILE}; make one with: edgekit train")
        try:
            data = json.loads(path.read_text())
            if data.pop("format") != FORMAT:
                raise SourceError(f"{path} has another format than this edgekit reads ({FORMAT}); train again")
            if data["preprocessing"] is not None:
                data["preprocessing"] = Preprocessing.from_json(data["preprocessing"])
            data["labels"] = None if data["labels"] is None else tuple(data["labels"])
            data["tokenizers"] = tuple(data["tokenizers"])
            return cls(**data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SourceError(f"{path} is damaged ({error!r}); train again") from None

    def build(self) -> tuple[nn.Module, tuple[TensorSpec, ...]]:
        """The network with fresh weights, and the tensors it takes."""
        architecture = find(self.architecture)
        return build_network(architecture, architecture.configure(self.config), self.preprocessing)

    def load(self, directory: str | Path) -> tuple[nn.Module, tuple[TensorSpec, ...]]:
        """The trained network in evaluation mode, and the tensors it takes."""
        module, specs = self.build()
        weights = self.weights(directory)
        try:
            module.load_state_dict(weights)
        except RuntimeError as error:
            raise self._unloadable(directory, error) from None
        return module.eval(), specs

    def weights(self, directory: str | Path) -> dict[str, Tensor]:
        import safetensors
        from safetensors.torch import load_file

        if self.status != "complete":
            raise SourceError(
                f"training in {directory} has not finished; finish it with: edgekit train --resume -o {directory}"
            )
        try:
            return load_file(Path(directory) / WEIGHTS_FILE)
        except (OSError, safetensors.SafetensorError) as error:
            raise self._unloadable(directory, error) from None

    def load_tokenizers(self, directory: str | Path) -> dict[str, Tokenizer]:
        return {name: Tokenizer.open(Path(directory) / tokenizer_file(name)) for name in self.tokenizers}

    @staticmethod
    def _unloadable(directory: str | Path, error: Exception) -> SourceError:
        lines = [line.strip() for line in str(error).splitlines()]  # torch's first line only announces the others
        return SourceError(f"{Path(directory) / WEIGHTS_FILE} cannot be loaded ({lines[:2][-1]}); train again")


def tokenizer_file(name: str) -> str:
    return f"tokenizer-{name}.json"


def is_run(path: str | Path) -> bool:
    return (Path(path) / RUN_FILE).is_file()
