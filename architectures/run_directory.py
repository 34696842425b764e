"""A run directory: what training leaves behind, and what export starts from.

run.json             architecture, configuration, preprocessing, labels, data, recipe, metrics, status
weights.safetensors  the weights that were kept
checkpoint.safetensors   only while training (see toolkit/training)
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from runtime.errors import SourceError
from runtime.files import write_file
from runtime.signature import TensorSpec

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
    preprocessing: Preprocessing
    labels: tuple[str, ...] | None
    data: dict[str, Any]
    recipe: dict[str, Any]
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
            data["preprocessing"] = Preprocessing.from_json(data["preprocessing"])
            data["labels"] = None if data["labels"] is None else tuple(data["labels"])
            return cls(**data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SourceError(f"{path} is damaged ({error!r}); train again") from None

    def build(self) -> tuple[nn.Module, TensorSpec]:
        """The network with fresh weights, and the tensor it takes."""
        architecture = find(self.architecture)
        return build_network(architecture, architecture.configure(self.config), self.preprocessing)

    def load(self, directory: str | Path) -> tuple[nn.Module, TensorSpec]:
        """The trained network in evaluation mode."""
        import safetensors
        from safetensors.torch import load_file

        if self.status != "complete":
            raise SourceError(
                f"training in {directory} has not finished; finish it with: edgekit train --resume -o {directory}"
            )
        module, spec = self.build()
        path = Path(directory) / WEIGHTS_FILE
        try:
            module.load_state_dict(load_file(path))
        except (OSError, safetensors.SafetensorError, RuntimeError) as error:
            first = str(error).splitlines()[0]
            raise SourceError(f"{path} cannot be loaded ({first}); train again") from None
        return module.eval(), spec


def is_run(path: str | Path) -> bool:
    return (Path(path) / RUN_FILE).is_file()
