"""edgekit train"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..console import note, number_text, print_json, progress_bar, say
from . import options


@click.command()
@click.argument("recipe", required=False)
@options.output
@options.data
@options.settings
@click.option("--resume", is_flag=True, help="Go on with an interrupted run at PATH.")
@options.force
@options.as_json
def train(
    recipe: str | None, output: str, data: str | None, settings: tuple[str, ...], resume: bool, force: bool, as_json: bool
) -> None:
    """Train a network by a recipe.

    RECIPE is a shared recipe's name, a .toml file, or an architecture's name.

    \b
    Examples:
      edgekit train lenet -o runs/lenet
      edgekit train mlp --data houses.csv --set data.target=price -o runs/houses
      edgekit train --resume -o runs/lenet
    """
    from architectures.settings import parse_settings
    from runtime.errors import OptionError

    from ..training import loop
    from ..training.recipe import load_recipe

    if recipe is None and not resume:
        raise OptionError("name a recipe, e.g.: edgekit train lenet -o runs/lenet; or pass --resume to go on with a run")
    if resume and force:
        raise OptionError("--resume goes on with a run and --force replaces it; give one of them")
    if recipe is None and (data or settings):
        raise OptionError("--data and --set need a recipe; a resumed run keeps the settings it began with")
    chosen = None
    if recipe is not None:
        changes = parse_settings(settings) | ({"data.path": data} if data else {})
        chosen = load_recipe(recipe).with_settings(changes)
    directory = Path(output)
    if resume:
        run, parts = loop.resume(directory, chosen)
    else:
        assert chosen is not None
        run, parts = loop.start(chosen, directory, force=force)
    if run.status == "complete":
        note(f"the run at {directory} is already complete")
    else:
        note(
            f"training {run.architecture} on {run.data['name']}: {len(parts.train)} rows, "
            f"{len(parts.validation)} to validate, {len(parts.test)} to test"
        )
        try:
            with progress_bar("epoch") as update:
                run = loop.train(run, parts, directory, lambda epoch: update(epoch.number, epoch.total, str(epoch)))
        except KeyboardInterrupt:
            note(f"\ninterrupted; go on from the last checkpoint with: edgekit train --resume -o {output}")
            raise SystemExit(130) from None
    metrics = run.metrics or {}
    if as_json:
        print_json({"run": str(directory), "architecture": run.architecture, **metrics})
    else:
        say(
            f"{run.architecture}, weights of epoch {_kept(run)} of {metrics['epochs']}: {metrics['metric']} "
            f"{number_text(metrics['validation'])} on validation, {number_text(metrics['test'])} on test"
        )
        say(f"run: {directory}")


def _kept(run: Any) -> int:
    return run.metrics["best_epoch"] if run.recipe["training"]["keep"] == "best" else run.metrics["epochs"]
