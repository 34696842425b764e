"""The kinds of work the one loop can do, one a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from architectures.architecture import Architecture
from architectures.catalog import find
from architectures.run_directory import Run
from runtime.text import Tokenizer

from ..recipe import TrainingSettings
from .language_model import LanguageModelTask
from .masked_lm import MaskedLMTask
from .samples import SampleTask
from .seq2seq import Seq2SeqTask
from .task import Task
from .text_classes import TextClassificationTask


def takes_segments(architecture: Architecture, config: Any) -> bool:
    """Whether the network is given `<cls> text <sep>` and the sentence that each token belongs to, as BERT is."""
    return any(spec.name == "segments" for spec in architecture.inputs(config))


def task_for(run: Run, settings: TrainingSettings, tokenizers: Mapping[str, Tokenizer]) -> Task:
    architecture = find(run.architecture)
    config = architecture.configure(run.config)
    if run.preprocessing is not None:
        return SampleTask(run.task, settings, run.preprocessing)
    positions = getattr(config, "max_positions", None)
    if run.task == "seq2seq":
        return Seq2SeqTask(settings, positions=positions)
    if run.task == "language-model":  # judged at the positions it was trained at, not at all that it has
        return LanguageModelTask(settings, positions=positions and min(positions, settings.window))
    if run.task == "masked-lm":
        return MaskedLMTask(settings, tokenizers["text"])
    return TextClassificationTask(settings, segments=takes_segments(architecture, config))
