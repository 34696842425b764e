"""What a finished run leaves for people to look at: curves, a confusion matrix, attention maps."""

from __future__ import annotations

import csv
import importlib.util
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from architectures.layers.attention import collect_attention
from architectures.run_directory import Run
from runtime.errors import MissingDependency
from runtime.files import write_file
from runtime.metrics import confusion_matrix
from runtime.text import BOS, EOS, pad_batch

from ..data.preparation import Prepared
from .tasks.samples import SampleTask, predict
from .tasks.seq2seq import Seq2SeqTask
from .tasks.text_classes import TextClassificationTask

CURVES, CURVES_PICTURE, CONFUSION, ATTENTION = "curves.csv", "curves.png", "confusion.png", "attention.png"
RECORD_FILES = (CURVES, CURVES_PICTURE, CONFUSION, ATTENTION)
_MOST_CLASSES = 50
_ATTENTION_EXAMPLES = 4


def write_records(run: Run, parts: Prepared, directory: Path, network: nn.Module, task: Any) -> None:
    assert run.metrics is not None
    history = run.metrics["history"]
    write_file(directory / CURVES, curves_csv(history))
    write_file(directory / CURVES_PICTURE, _draw_curves(run.architecture, history, task.metric))
    if run.task == "classification" and run.labels and len(run.labels) <= _MOST_CLASSES:
        if isinstance(task, SampleTask):
            outputs = predict(network, parts.test)
        else:
            assert isinstance(task, TextClassificationTask)
            outputs = task.predict(network, parts.test)
        matrix = confusion_matrix(outputs.argmax(-1), parts.test.targets, len(run.labels))
        run.metrics["confusion"] = matrix.tolist()  # rows: the true class; columns: the predicted one
        write_file(directory / CONFUSION, _draw_confusion(matrix, run.labels))
    if run.task == "seq2seq":
        maps = attention_maps(network, parts, task)
        if maps:
            write_file(directory / ATTENTION, _draw_attention(maps))


def curves_csv(history: list[dict[str, Any]]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(history[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(history)
    return stream.getvalue()


def attention_maps(network: Any, parts: Prepared, task: Seq2SeqTask) -> list[tuple[list[str], list[str], NDArray[Any]]]:
    """(source tokens, decoded tokens, weights (decoded, source)) of a few validation rows; none without attention."""
    examples = parts.validation.some(_ATTENTION_EXAMPLES)
    source_names, target_names = (parts.tokenizers[side].vocabulary for side in ("source", "target"))
    maps = []
    device = next(network.parameters()).device
    for number, decoded in enumerate(task.decode(network, examples)):
        decoded = decoded[: (task.positions or len(decoded) + 1) - 1]  # <bos> has a place too
        if not decoded:
            continue
        source = torch.from_numpy(pad_batch([examples.sources[number]], eos=True)).to(device)
        tokens = torch.tensor([[BOS, *decoded]], device=device)
        with collect_attention(network) as found, torch.inference_mode():
            memory, state = network.encode(source)
            found.clear()  # the encoder's own attention is not what is drawn
            network.decode(tokens, memory, state)
        weights = _alignment(found)
        if weights is None:
            return []
        names = [source_names[token] for token in source[0].tolist()]
        maps.append((names, [*(target_names[token] for token in decoded), target_names[EOS]], weights))
    return maps


def _alignment(found: dict[str, list[torch.Tensor]]) -> NDArray[Any] | None:
    """Mean over layers and heads of the weights from target to source, (steps, source)."""
    layers = []
    for name, weights in found.items():
        if weights and weights[0].ndim == 2:  # additive attention, one step a call
            layers.append(torch.stack([step[0] for step in weights]))
        elif weights and name.endswith("cross_attention"):
            layers.append(weights[0][0].mean(0))
    return torch.stack(layers).mean(0).cpu().numpy() if layers else None


def check_drawing() -> None:
    """Say now rather than after hours of training that curves cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependency.of("matplotlib", "report", "drawing the curves of a run")


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()


def _draw_curves(title: str, history: list[dict[str, Any]], metric: str) -> bytes:
    epochs = [row["epoch"] for row in history]
    figure = _figure(10, 3.2)
    for place, (key, label) in enumerate(
        (("loss", "training loss"), (metric, f"validation {metric}"), ("learning_rate", "learning rate"))
    ):
        axes = figure.add_subplot(1, 3, place + 1)
        axes.plot(epochs, [row[key] for row in history], marker="." if len(epochs) < 40 else None, color="#1f5fa8")
        axes.set(xlabel="epoch", title=label)
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    return _png(figure)


def _draw_confusion(matrix: NDArray[np.int64], labels: tuple[str, ...]) -> bytes:
    side = 2.2 + 0.42 * len(labels)
    figure = _figure(side, side)
    axes = figure.add_subplot()
    shares = matrix / np.maximum(1, matrix.sum(axis=1, keepdims=True))
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for (row, column), count in np.ndenumerate(matrix):
        if count and len(labels) <= 20:
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(count), ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(len(labels)), labels, rotation=60, ha="right")
    axes.set_yticks(range(len(labels)), labels)
    axes.set(xlabel="predicted", ylabel="true", title="test part")
    return _png(figure)


def _draw_attention(maps: list[tuple[list[str], list[str], NDArray[Any]]]) -> bytes:
    figure = _figure(4.2 * len(maps), 4.4)
    for place, (source, target, weights) in enumerate(maps):
        axes = figure.add_subplot(1, len(maps), place + 1)
        axes.imshow(weights, cmap="Greys", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(source)), source, rotation=90)
        axes.set_yticks(range(len(target)), target)
        axes.set(xlabel="source", ylabel="decoded" if place == 0 else "")
    return _png(figure)
