"""Recipe: a TOML file that says what to train, on what, and how. Checked once, before any work."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from architectures.catalog import CATALOG, find
from architectures.run_directory import RUN_FILE, Run, is_run
from architectures.settings import apply_settings
from runtime.errors import DataError, OptionError, UnknownName

from ..data.dataset import DataSettings
from .augment import Augmentation
from .schedules import SCHEDULES

_SHARE, _FEWEST_EPOCHS = 0.1, 3  # of a recipe, to fine-tune its run for a scheme
RECIPES = Path(__file__).resolve().parent.parent / "recipes"
CHOICES = {
    "optimizer": ("sgd", "adam", "adamw"),
    "schedule": SCHEDULES,
    "keep": ("best", "last"),
    "precision": ("float32", "bf16", "fp16"),
    "device": ("auto", "cpu", "cuda"),
}


@dataclass(frozen=True)
class TrainingSettings:
    """The [training] section of a recipe."""

    epochs: int = 30
    batch_size: int = 64  # rows a step; 0: the whole training part at once
    accumulate: int = 1  # work through a batch in this many pieces, for less memory; the same step, batch norms aside
    window: int = 128  # language models: tokens of each row in one step (back-propagation through time ends there)
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    momentum: float | None = None  # sgd only; without it 0.9
    beta2: float = 0.999  # adam and adamw
    weight_decay: float = 0.0  # of matrices and kernels; biases and norms are spared
    schedule: str = "constant"  # see schedules.py
    warmup: int = 0  # steps in which the learning rate grows from nothing
    step_every: int = 10  # step schedule: epochs until the rate is multiplied by step_factor
    step_factor: float = 0.1
    clip: float | None = None  # largest norm of the gradient
    label_smoothing: float = 0.0
    ema: float | None = None  # keep an exponential moving average of the weights with this decay, e.g. 0.999
    precision: str = "float32"  # or bf16, fp16: mixed precision
    recompute: bool = False  # Transformers: compute activations again going backward, for less memory
    shift: int = 0  # images: move each by up to this many pixels, anew in every epoch
    rotate: float = 0.0  # images: turn each by up to this many degrees
    flip: bool = False  # images: mirror every second one
    crop: float = 0.0  # images: cut away up to this share of each side
    noise: float = 0.0  # images: add noise of this many deviations
    patience: int | None = None  # stop after this many epochs without a better validation metric; 0: never
    keep: str = "best"  # the weights of the best validation epoch, or of the last epoch
    start: str | None = None  # a finished run whose weights to start from; its head is replaced where the task differs
    freeze: bool = False  # with start: train the new head only
    quantize: str | None = None  # compute with weights as this scheme rounds them: int8-static, int8-weights, int4-weights
    seed: int = 0
    threads: int | None = None  # None: all available cores; a resumed run uses what it began with
    device: str = "auto"  # cpu, cuda, or auto: cuda where there is one

    def __post_init__(self) -> None:
        limits = {
            "epochs": (1, 10**9),
            "batch_size": (0, 10**9),
            "accumulate": (1, 10**6),
            "window": (2, 10**6),
            "learning_rate": (1e-12, 1e12),
            "momentum": (0, 1),
            "beta2": (0, 0.9999999),
            "weight_decay": (0, 1e6),
            "warmup": (0, 10**9),
            "step_every": (1, 10**9),
            "step_factor": (1e-12, 1),
            "clip": (1e-12, 1e12),
            "label_smoothing": (0, 0.99),
            "ema": (0, 0.9999999),
            "shift": (0, 10**4),
            "rotate": (0, 180),
            "crop": (0, 0.9),
            "noise": (0, 100),
            "patience": (0, 10**9),
            "seed": (0, 2**40),
            "threads": (1, 4096),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise OptionError(f"training.{name} is {value:g}, expected {low:g} to {high:g}")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise UnknownName.of(f"value for training.{name}", getattr(self, name), known)
        if self.momentum is not None and self.optimizer != "sgd":
            raise OptionError(f"training.momentum is for sgd, but the optimizer is {self.optimizer}; leave it out")
        if self.freeze and self.start is None:
            raise OptionError("training.freeze keeps the weights of an earlier run; name it with training.start")

    @property
    def augmentation(self) -> Augmentation:
        return Augmentation(self.shift, self.rotate, self.flip, self.crop, self.noise)


@dataclass(frozen=True)
class Recipe:
    architecture: str
    description: str = ""
    network: Mapping[str, Any] = field(default_factory=dict)  # settings of the architecture
    data: DataSettings = field(default_factory=DataSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)

    def with_settings(self, settings: Mapping[str, Any]) -> Recipe:
        """`training.epochs=3`, `data.seed=1`, `network.dropout=0.1`; a bare key is looked for in [training]."""
        network = {key.removeprefix("network."): value for key, value in settings.items() if key.startswith("network.")}
        others = {key: value for key, value in settings.items() if not key.startswith("network.")}
        sections = Sections(self.data, self.training)
        full = {key if "." in key or key in ("data", "training") else f"training.{key}": value for key, value in others.items()}
        changed = apply_settings(sections, full, kind="recipe setting")
        merged = {**self.network, **network}
        find(self.architecture).configure(
            merged, task=changed.data.task
        )  # refuses unknown keys and wrong types now rather than later
        return replace(self, network=merged, data=changed.data, training=changed.training)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any], origin: str) -> Recipe:
        known = ("architecture", "description", "network", "data", "training")
        if unknown := [key for key in document if key not in known]:
            raise UnknownName.of(f"section in {origin}", unknown[0], known)
        if not isinstance(document.get("architecture"), str):
            raise OptionError(f'{origin} names no architecture; add: architecture = "lenet"')
        recipe = cls(find(document["architecture"]).name, str(document.get("description", "")))
        for section in ("network", "data", "training"):
            if not isinstance(document.get(section, {}), Mapping):
                raise OptionError(f"{section!r} in {origin} is a single value, expected a section: [{section}]")
        settings = {f"network.{key}": value for key, value in document.get("network", {}).items()}
        settings |= {section: document[section] for section in ("data", "training") if section in document}
        return recipe.with_settings(settings)


@dataclass(frozen=True)
class Sections:
    data: DataSettings
    training: TrainingSettings


def load_recipe(name: str) -> Recipe:
    """By the name of a shared recipe, by the path of a .toml, or by an architecture (its shared recipe, or the defaults)."""
    if is_run(name):
        raise OptionError(
            f"{name} is a run, not a recipe; fine-tune it for a scheme with --quantize NAME, or begin a recipe with its "
            f"weights: --set start={name}"
        )
    if name.endswith(".toml"):
        return _read(Path(name))
    shared = RECIPES / f"{name}.toml"
    if name in recipe_names():
        return _read(shared)
    if name in CATALOG:
        return Recipe(name)
    raise UnknownName.of("recipe or architecture", name, {*recipe_names(), *CATALOG})


def recipe_for(scheme: str, directory: str) -> Recipe:
    """The recipe of a finished run, to go on from its weights for a while, computing as quantization by `scheme` will.

    A tenth of the epochs, and a tenth of the learning rate without warm-up: weights move by about a step of the scheme's
    grid, and what was learnt stays.
    """
    if not is_run(directory):
        raise OptionError(
            f"--quantize goes on from a finished run, and {directory} is none; train it first, e.g.: "
            f"edgekit train {directory} -o RUN, then: edgekit train RUN --quantize {scheme} -o NEW"
        )
    recipe = Recipe.from_json(Run.open(directory).recipe, str(Path(directory) / RUN_FILE))
    before = recipe.training
    changed = replace(
        before,
        start=str(Path(directory).resolve()),
        quantize=scheme,
        epochs=max(_FEWEST_EPOCHS, round(before.epochs * _SHARE)),
        learning_rate=before.learning_rate * _SHARE,
        warmup=0,
        patience=None,
        freeze=False,
    )
    return replace(recipe, training=changed)


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def _read(path: Path) -> Recipe:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"the recipe {path} cannot be read: {error.strerror}; check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"the recipe {path} is not valid TOML: {error}") from None
    recipe = Recipe.from_json(document, str(path))
    if recipe.data.path is None or Path(recipe.data.path).is_absolute():
        return recipe
    return replace(recipe, data=replace(recipe.data, path=str(path.parent / recipe.data.path)))  # beside the recipe
