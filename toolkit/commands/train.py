"""edgekit train"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..console import note, number_text, print_json, progress_bar, say, table
from . import options


@click.command()
@click.argument("recipe", required=False)
@options.output
@options.data
@options.settings
@click.option(
    "--quantize",
    metavar="SCHEME",
    help="Fine-tune the run RECIPE for this scheme: int8-static, int8-weights or int4-weights.",
)
@click.option("--resume", is_flag=True, help="Go on with an interrupted run at PATH.")
@click.option(
    "--folds", type=click.IntRange(2), metavar="K", help="Cross-validate: train K runs, each validated on another part."
)
@options.force
@options.as_json
def train(
    recipe: str | None,
    output: str,
    data: str | None,
    settings: tuple[str, ...],
    quantize: str | None,
    resume: bool,
    folds: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Train a network by a recipe.

    RECIPE is a shared recipe's name, a .toml file, or an architecture's name.

    With --quantize it is a finished run, which is trained on for a tenth of its
    epochs, but three at least, with weights (int8-static: and activations)
    rounded as the scheme will.
    Export the new run and quantize that.

    \b
    Examples:
      edgekit train lenet -o runs/lenet
      edgekit train mlp --data houses.csv --set data.target=price -o runs/houses
      edgekit train --resume -o runs/lenet
      edgekit train softmax --folds 5 -o runs/softmax-folds
      edgekit train runs/gpt --quantize int4-weights -o runs/gpt-int4
      torchrun --nproc-per-node 2 -m toolkit train gpt -o runs/gpt
    """
    from architectures.settings import parse_settings
    from runtime.errors import OptionError

    from ..training import loop
    from ..training.distributed import join_group
    from ..training.recipe import load_recipe, recipe_for

    if recipe is None and not resume:
        raise OptionError("name a recipe, e.g.: edgekit train lenet -o runs/lenet; or pass --resume to go on with a run")
    if resume and force:
        raise OptionError("--resume goes on with a run and --force replaces it; give one of them")
    if recipe is None and (data or settings):
        raise OptionError("--data and --set need a recipe; a resumed run keeps the settings it began with")
    if quantize is not None and (recipe is None or folds):
        raise OptionError("--quantize goes on from one finished run: edgekit train RUN --quantize int8-static -o NEW")
    chosen = None
    if recipe is not None:
        changes = parse_settings(settings) | ({"data.path": data} if data else {})
        chosen = (load_recipe(recipe) if quantize is None else recipe_for(quantize, recipe)).with_settings(changes)
    directory = Path(output)
    if folds:
        _cross_validate(chosen, directory, folds, resume=resume, force=force, as_json=as_json)
        return
    if resume:
        run, parts = loop.resume(directory, chosen)
    else:
        assert chosen is not None
        run, parts = loop.start(chosen, directory, force=force)
    run = _train(run, parts, directory)
    if not join_group().leads:
        return
    metrics = run.metrics or {}
    if as_json:
        print_json({"run": str(directory), "architecture": run.architecture, **metrics})
        return
    say(
        f"{run.architecture}, weights of epoch {_kept(run)} of {metrics['epochs']}: {metrics['metric']} "
        f"{number_text(metrics['validation'])} on validation, {number_text(metrics['test'])} on test"
    )
    if base := _before(run):
        say(f"computed as {run.recipe['training']['quantize']} will; in float32, before: {base}")
    others = {name: value for name, value in metrics["details"]["test"].items() if name != metrics["metric"]}
    if others:
        say("also on test: " + ", ".join(f"{name} {number_text(value)}" for name, value in others.items()))
    say(f"run: {directory}")


def _train(run: Any, parts: Any, directory: Path) -> Any:
    from ..training import loop
    from ..training.distributed import join_group

    if run.status == "complete":
        note(f"the run at {directory} is already complete")
        return run
    leads = join_group().leads
    if leads:
        note(
            f"training {run.architecture} on {run.data['name']}: {len(parts.train)} {parts.unit}, "
            f"{len(parts.validation)} to validate, {len(parts.test)} to test"
        )
        _note_left_out(run)
    remark = [""]

    def remember(epoch: Any) -> None:
        remark[0] = f"epoch {epoch.number}/{epoch.total}  {epoch}"

    try:
        with progress_bar("step") as update:
            return loop.train(
                run, parts, directory, remember, lambda done, total: update(done, total, remark[0]) if leads else None
            )
    except KeyboardInterrupt:
        note(f"\ninterrupted; go on from the last checkpoint with: edgekit train --resume -o {directory}")
        raise SystemExit(130) from None


def _before(run: Any) -> str | None:
    """What the run that fine-tuning for a scheme started from had reached; if it is still there."""
    from architectures.run_directory import Run, is_run

    settings = run.recipe["training"]
    if settings.get("quantize") is None or settings["start"] is None or not is_run(settings["start"]):
        return None
    metrics = Run.open(settings["start"]).metrics
    if metrics is None:
        return None
    return f"{number_text(metrics['validation'])} on validation, {number_text(metrics['test'])} on test"


def _note_left_out(run: Any) -> None:
    """Of fake quantization: what is computed in float32 all the same."""
    scheme = run.recipe["training"].get("quantize")
    if scheme is None:
        return
    from exporters.fake_quantization import left_out

    if left := left_out(run.build()[0], scheme):
        note(f"not trained for {scheme}, but in float32: {', '.join(left)}")


def _cross_validate(recipe: Any, directory: Path, folds: int, *, resume: bool, force: bool, as_json: bool) -> None:
    """One run for each fold in folders of `directory`, and their mean."""
    from runtime.errors import OptionError, OutputExists

    from ..training import loop
    from ..training.distributed import join_group
    from ..training.folds import summarise

    if resume or recipe is None:
        raise OptionError("--folds trains from the beginning; it cannot be combined with --resume")
    if join_group().size > 1:
        raise OptionError("--folds trains one run after another in one process; start it without torchrun")
    if directory.exists() and not force:
        raise OutputExists(f"{directory} already exists; choose another -o, or pass --force to replace its folds")
    runs = []
    for fold in range(folds):
        run, parts = loop.start(
            recipe.with_settings({"data.folds": folds, "data.fold": fold}), directory / f"fold-{fold + 1}", force=force
        )
        runs.append(_train(run, parts, directory / f"fold-{fold + 1}"))
    summary = summarise(runs, directory)
    if as_json:
        print_json(summary)
        return
    rows = [[f"fold {number}", number_text(value)] for number, value in enumerate(summary["folds"], 1)]
    say(table(["", f"validation {summary['metric']}"], [*rows, ["mean", number_text(summary["mean"])]]))
    say(f"deviation between folds: {number_text(summary['deviation'])}; the test part was not used")


def _kept(run: Any) -> int:
    return run.metrics["best_epoch"] if run.recipe["training"]["keep"] == "best" else run.metrics["epochs"]
