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
        width = max(len(entry["name"]) for entry in entries) + 2
        for entry in entries:
            facts = _facts(entry)
            text = f"  {entry['name']:<{width}}{facts}{entry['description']}"
            say(textwrap.fill(text, 80, subsequent_indent=" " * (2 + width + len(facts))))


def _facts(entry: dict[str, Any]) -> str:
    """The columns between a name and its description."""
    if "parameters" in entry:
        return f"{_TASK_NAMES.get(entry['task'], entry['task']):<12}{_short(entry['parameters']):>7}  "
    return f"{entry['task']:<16}" if "task" in entry else ""


_TASK_NAMES = {"classification": "classes", "language-model": "language", "masked-lm": "masked text"}


def _short(count: int) -> str:
    """61,706 → "61.7k"; the exact number is in --json."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


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
        from dataclasses import asdict

        from exporters.quantizers import SCHEMES

        return [
            {
                "name": item.name,
                "calibration": item.needs_calibration,
                "settings": asdict(item.settings),
                "description": item.description,
            }
            for item in SCHEMES.values()
        ]
    from exporters.checks import RULES

    return [{"name": item.name, "description": item.description} for item in RULES]
