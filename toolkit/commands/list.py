"""edgekit list"""

from __future__ import annotations

import textwrap
from typing import Any

import click

from ..console import print_json, say
from . import options

KINDS = ("architectures", "recipes", "datasets", "schemes", "checks")


@click.command("list")
@click.argument("kind", type=click.Choice(KINDS), required=False)
@options.as_json
def list_command(kind: str | None, as_json: bool) -> None:
    """Show what there is: architectures, recipes, datasets, schemes, checks.

    Example: edgekit list architectures
    """
    kinds = [kind] if kind else list(KINDS)
    found = {name: _entries(name) for name in kinds}
    if as_json:
        print_json(found[kind] if kind else found)
        return
    for name, entries in found.items():
        if not kind:
            say(f"\n{name}")
        for entry in entries:
            extra = f"  ({entry['parameters']:,} parameters)" if "parameters" in entry else ""
            text = f"  {entry['name']:<18} {entry['description']}{extra}"
            say(textwrap.fill(text, 80, subsequent_indent=" " * 21))


def _entries(kind: str) -> list[dict[str, Any]]:
    if kind == "architectures":
        from architectures.catalog import CATALOG

        return [
            {
                "name": item.name,
                "task": item.task,
                "tasks": list(item.tasks),
                "parameters": item.parameters(),
                "description": item.description,
            }
            for item in CATALOG.values()
        ]
    if kind == "recipes":
        from ..training.recipe import load_recipe, recipe_names

        recipes = {name: load_recipe(name) for name in recipe_names()}
        return [
            {"name": name, "architecture": item.architecture, "data": item.data.name, "description": item.description}
            for name, item in recipes.items()
        ]
    if kind == "datasets":
        from ..data.catalog import DATASETS

        return [{"name": item.name, "task": item.task, "description": item.description} for item in DATASETS.values()]
    if kind == "schemes":
        from exporters.quantizers import SCHEMES

        return [
            {"name": item.name, "calibration": item.needs_calibration, "description": item.description}
            for item in SCHEMES.values()
        ]
    from exporters.checks import RULES

    return [{"name": item.name, "description": item.description} for item in RULES]
