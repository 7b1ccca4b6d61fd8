"""Manifests of the ``checkpoints/`` folders: all models of a folder, with their files, commands and measures.

``python -m common.publishing.manifest`` writes the cards and manifests of all folders anew; ``--check`` fails if one of
them is old.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import shiftvit

from ..data.preprocess import PREPROCESSOR_NAME
from ..models.hub import CONFIG_NAME, WEIGHTS_NAME
from ..models.registry import PACKAGES, from_pretrained
from ..training.recipe import BaseRecipe
from .cards import CARD_NAME, model_card
from .results import changes_of, command, measured, package_of, paper_of, public_results, recipes_of

__all__ = ["FILES", "digests", "entry", "main", "manifest", "render", "training_runs"]

ROOT = Path(__file__).resolve().parents[2]
FILES = (CONFIG_NAME, WEIGHTS_NAME, PREPROCESSOR_NAME)


def digests(directory: Path) -> dict[str, str]:
    """sha256 of the files that make a model."""
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in FILES}


def entry(results: Mapping[str, Any], /, **facts: Any) -> dict[str, Any]:
    """What a manifest says about a model that was trained. ``facts``: name, status, hub_id, revision, sha256, ..."""
    paper = paper_of(results)
    whole = bool(paper) and not changes_of(results)
    name = results["model"] if results["recipe"] == "digits" else f"{results['model']}_{results['recipe']}"
    name += "" if whole or results["recipe"] == "digits" else f"_{results['epochs']}ep"
    return {
        "name": name,
        "model": results["model"],
        "data": public_results(results)["settings"]["data"],
        "recipe": results["recipe"],
        "command": command(results),
        "status": "trained",
        "published": False,
        "hub_id": None,
        "revision": None,
        "path": None,
        "sha256": None,
        "parameters": results["parameters"],
        "metrics": {metric: round(value, 2) for metric, value in measured(results).items()},
        "paper": paper or None,
        "results": None,
    } | facts


def _untrained(package: str, name: str, recipe: BaseRecipe) -> dict[str, Any]:
    """A row of the paper that nobody has trained here yet."""
    facts: dict[str, Any] = dict.fromkeys(("hub_id", "revision", "path", "sha256", "parameters", "metrics"))
    return {"name": f"{recipe.model}_{name}", "model": recipe.model, "data": recipe.data, "recipe": name,
            "command": f"accelerate launch {package}/reproduce.py --rows {name}", "status": "not trained",
            "published": False, **facts, "paper": dict(recipe.target), "results": None}  # fmt: skip


def manifest(package: str, old: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All models of a folder: those it holds, those that were trained, the paper's rows that were not.

    What ``old`` says about published models stays.
    """
    runs = [(path, run) for path, run in training_runs() if package_of(run["model"]) == package]
    models = []
    for directory in _checkpoints(package):
        path, run = _run_of(directory, runs)
        models.append(entry(run, status="embedded", path=directory.relative_to(ROOT).as_posix(),
                            sha256=digests(directory), results=path.relative_to(ROOT).as_posix()))  # fmt: skip
    embedded = {model["name"] for model in models}
    trained = [entry(run, results=path.relative_to(ROOT).as_posix()) for path, run in runs]
    models += [model for model in trained if model["name"] not in embedded]
    known = {model["name"] for model in models}
    models += [_untrained(package, name, recipe) for name, recipe in recipes_of(package).items()
               if recipe.target and f"{recipe.model}_{name}" not in known]  # fmt: skip
    published = {model["name"]: model for model in (old or {"models": []})["models"] if model["published"]}
    models = [published.pop(model["name"], model) for model in models]
    return {"folder": package, "models": [*models, *published.values()]}


def training_runs() -> list[tuple[Path, dict[str, Any]]]:
    """The training runs among ``results/``."""
    found = ((path, json.loads(path.read_text())) for path in sorted((ROOT / "results").glob("*.json")))
    return [(path, run) for path, run in found if isinstance(run, dict) and "settings" in run and "recipe" in run]


def _run_of(directory: Path, runs: Iterable[tuple[Path, dict[str, Any]]]) -> tuple[Path, dict[str, Any]]:
    """The run that made an embedded checkpoint: it says so by the digest of these weights."""
    digest = digests(directory)[WEIGHTS_NAME]
    for path, run in runs:
        if run.get("weights") == digest:
            return path, run
    raise ValueError(f"no file in results/ tells how {directory.relative_to(ROOT)} was trained: add its results.json, "
                     f'with "weights": "{digest}"')  # fmt: skip


def _checkpoints(package: str) -> list[Path]:
    return sorted(path.parent for path in (ROOT / package / "checkpoints").glob(f"*/{CONFIG_NAME}"))


def _exactness(source: str) -> list[dict[str, Any]]:
    rows = [row for path in sorted((ROOT / "results").glob("exactness_*.json")) for row in json.loads(path.read_text())]
    return [row for row in rows if row["model"] == source]


def render() -> dict[Path, str]:
    """Text by path: the card of every embedded checkpoint and the manifest of every folder."""
    texts = {}
    runs = training_runs()
    for package in PACKAGES.values():
        for directory in _checkpoints(package):
            source = directory.relative_to(ROOT).as_posix()
            texts[directory / CARD_NAME] = model_card(from_pretrained(str(directory)), _run_of(directory, runs)[1],
                                                      source=source, exactness=_exactness(source))  # fmt: skip
        path = ROOT / package / "checkpoints" / "manifest.json"
        old = json.loads(path.read_text()) if path.is_file() else None
        texts[path] = json.dumps(manifest(package, old), indent=2) + "\n"
    return texts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    args = parser.parse_args(arguments)
    texts = render()
    old = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if args.check and old:
        names = ", ".join(path.relative_to(ROOT).as_posix() for path in old)
        raise SystemExit(f"out of date: {names}; run python -m common.publishing.manifest")
    for path in old:
        path.write_text(texts[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    shiftvit.run(main)
