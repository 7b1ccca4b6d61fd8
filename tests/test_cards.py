"""Cards and manifests say what runs measured, and name the files that are there."""

import hashlib
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from huggingface_hub import ModelCard
from publishing_helpers import CHECKPOINTS, MANIFESTS, edit

from common import create_model
from common.data.preprocess import Preprocess
from common.data.splits import load_digits_data
from common.models.registry import parse_arguments
from common.publishing import cards
from common.publishing import manifest as manifests
from common.publishing.results import (
    command,
    data_of,
    measured,
    package_of,
    public_results,
    read_results,
    recipes_of,
)
from common.training.recipe import parse_command_line


def entries() -> list[tuple[str, dict[str, Any]]]:
    return [(package, model) for package, path in MANIFESTS.items() for model in json.loads(path.read_text())["models"]]


def test_cards_and_manifests_are_up_to_date() -> None:
    """Else a card shows numbers of an older run: ``python -m common.publishing.manifest`` writes them anew."""
    manifests.main(["--check"])


def test_an_old_card_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above must be able to fail."""
    for module in (cards, manifests):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    for folder in ("swin/checkpoints/a_swin_micro", "results"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for package in MANIFESTS:
        (tmp_path / package / "checkpoints").mkdir(parents=True, exist_ok=True)
    manifests.main([])
    manifests.main(["--check"])
    path = tmp_path / "results" / "swin_digits.json"
    edit(path, top1=12.34)
    with pytest.raises(SystemExit, match="out of date: swin/checkpoints/a_swin_micro/README.md, .*manifest.json"):
        manifests.main(["--check"])
    path.unlink()
    with pytest.raises(ValueError, match="no file in results/ tells how swin/checkpoints/a_swin_micro was trained"):
        manifests.main(["--check"])


def test_manifests_name_the_files_that_are_there() -> None:
    """A sum that does not fit means that the checkpoint is not the one whose metrics are stated."""
    embedded = {model["path"]: model for _, model in entries() if model["path"]}
    assert set(embedded) == {path.relative_to(ROOT).as_posix() for path in CHECKPOINTS}
    for path, model in embedded.items():
        assert set(model["sha256"]) == {"config.json", "model.safetensors", "preprocessor_config.json"}
        for name, digest in model["sha256"].items():
            assert hashlib.sha256((ROOT / path / name).read_bytes()).hexdigest() == digest, f"{path}/{name}"
        stated = json.loads((ROOT / model["results"]).read_text())
        assert {metric: round(stated[metric], 2) for metric in model["metrics"]} == model["metrics"]


def test_manifests_claim_nothing_for_models_that_nobody_trained() -> None:
    """An entry with numbers but without a run would be a made-up result."""
    listed = entries()
    for package, recipes in ((package, recipes_of(package)) for package in MANIFESTS):
        rows = {model["recipe"] for folder, model in listed if folder == package}
        assert rows >= {name for name, recipe in recipes.items() if recipe.target}
    for _, model in listed:
        if model["status"] == "not trained":
            assert model["metrics"] is model["sha256"] is model["results"] is model["hub_id"] is None
        elif not model["published"]:  # where a published model's results are
            assert (ROOT / model["results"]).is_file()
        assert model["published"] == (model["hub_id"] is not None) == (model["revision"] is not None)


@pytest.mark.parametrize(
    ("package", "model"), entries(), ids=lambda value: value["name"] if isinstance(value, dict) else ""
)
def test_the_command_of_a_manifest_makes_its_model(package: str, model: dict[str, Any]) -> None:
    """Who copies it trains the model whose metrics stand beside it, setting by setting."""
    words = shlex.split(model["command"])
    assert words[:2] == ["accelerate", "launch"]
    assert (ROOT / words[2]).is_file()
    recipes = recipes_of(package)
    if words[2].endswith("reproduce.py"):
        assert words[3:] == ["--rows", model["recipe"]]
        assert recipes[model["recipe"]].model == model["model"]
        return
    _, recipe, options = parse_command_line(recipes, "digits", words[3:])
    if model["results"] is None:
        assert model["published"]
        return
    stated = json.loads((ROOT / model["results"]).read_text())
    settings = json.loads(json.dumps(recipe.settings()))
    for key, value in stated["settings"].items():
        if key != "data":  # a folder then, the Hub's id now
            assert settings[key] == value, key
    assert (options.mixed_precision or "no") == stated["precision"]


@pytest.mark.parametrize("directory", CHECKPOINTS, ids=lambda path: path.name)
def test_the_snippet_of_a_card_runs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the first thing that people copy."""
    text = (directory / "README.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.S)
    monkeypatch.chdir(ROOT)
    scope: dict[str, Any] = {}
    exec(snippet, scope)
    assert scope["labels"].shape[0] == len(scope["images"])
    if isinstance(scope["preprocess"], Preprocess):  # large photographs, too, as in predict.py
        expected = [scope["preprocess"].image(np.asarray(image)) for image in scope["images"]]
        assert torch.equal(scope["x"], torch.stack(expected))
    assert ("assert torch.equal" in snippet) == scope["model"].adaptive


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+\.\d+", text))


@pytest.mark.parametrize(
    "results", [run for _, run in manifests.training_runs()], ids=[path.stem for path, _ in manifests.training_runs()]
)
def test_no_number_of_a_card_is_made_up(results: dict[str, Any]) -> None:
    """Every decimal number stands in the results file or, as the paper's, in the recipe."""
    with torch.device("meta"):
        model = create_model(results["model"], **results["settings"]["model_args"])
    card = cards.model_card(model, results, source="team/model")
    recipe = recipes_of(package_of(results["model"])).get(results["recipe"])
    target = dict(recipe.target) if recipe is not None and recipe.model == results["model"] else {}
    known = numbers(json.dumps(results)) | {f"{value:.2f}" for value in (*measured(results).values(), *target.values())}
    known |= {str(round(value, 2)) for value in measured(results).values()}
    assert measured(results)
    assert numbers(card) <= known
    for metric, value in target.items():
        assert re.search(rf"\| +{results[metric]:.2f} \| +{value:.2f} \|", card), f"{metric}: ours beside the paper's"


def test_the_hub_understands_a_card() -> None:
    """Licence, task, data and results show on the model's page only if its metadata say them the Hub's way."""
    results = json.loads((ROOT / "results" / "swin_cifar10_30ep_adaptive.json").read_text())
    results["settings"]["data"] = "/home/somebody/secret/cifar10"
    results["recipe"] = "cifar10"  # a row of the paper, shortened
    with torch.device("meta"):
        model = create_model("a_swin_tiny", num_classes=10)
    text = cards.model_card(model, results, source="team/a_swin_tiny_cifar10")
    data = ModelCard(text).data
    assert (data.license, data.library_name, data.pipeline_tag) == (
        "mit",
        "shift-equivariant-vits",
        "image-classification",
    )
    assert data.datasets == ["uoft-cs/cifar10"]
    assert {"swin", "shift-equivariance", "adaptive"} <= set(data.tags)
    assert {(r.metric_type, r.metric_value, r.dataset_type, r.dataset_split) for r in data.eval_results} == {
        ("accuracy", 72.94, "uoft-cs/cifar10", "test"),
        ("c_cons", 100.0, "uoft-cs/cifar10", "test"),
        ("s_cons", 73.53, "uoft-cs/cifar10", "test"),
    }
    assert "This run is not the paper's: epochs 30 instead of 100, batch size 256 instead of 96." in text
    assert "multiples of 224 px" in text
    assert "@inproceedings" in text
    assert 'source = "team/a_swin_tiny_cifar10"' in text
    assert "secret" not in text
    assert "secret" not in json.dumps(public_results(results))


def test_the_papers_numbers_stand_beside_its_own_recipe_alone() -> None:
    """Else a card sets our accuracy on other images, or by another recipe, beside the paper's on CIFAR-10."""
    results = json.loads((ROOT / "results" / "swin_cifar10_80ep_default.json").read_text())
    results["settings"] |= {"epochs": 100, "lr": 0.5, "pretrained": "outputs/first"}
    with torch.device("meta"):
        model = create_model("swin_tiny", num_classes=10)
    card = cards.model_card(model, results, source="team/model")
    assert re.search(r"\| +85.79 \| +90.15 \|", card)
    assert "Not as in the paper's recipe: pretrained, lr, warmup epochs (see the command below)." in card
    limited = cards.model_card(model, results | {"limit": 100}, source="team/model")
    assert "pretrained, lr, warmup epochs, limit (see the command below)." in limited
    results["settings"]["seed"] = 7  # the paper has five
    assert cards.model_card(model, results, source="team/model").count("seed") == card.count("seed") + 1  # the command
    assert manifests.entry(results)["paper"]["top1"] == 90.15
    results["settings"]["data"] = "data/pets"
    card = cards.model_card(model, results, source="team/model")
    assert "90.15" not in card
    assert "The paper has no such row." in card
    assert manifests.entry(results)["paper"] is None


def test_a_folder_called_digits_is_not_taken_for_the_embedded_digits() -> None:
    """Else a card says that a model of somebody's images was trained on scikit-learn's, and its command does that."""
    results = json.loads((ROOT / "results" / "swin_digits.json").read_text())
    results["settings"]["data"] = "/home/somebody/secret/digits"
    with torch.device("meta"):
        model = create_model(results["model"])
    card = cards.model_card(model, results, source="team/model")
    assert "scikit-learn" not in card
    assert "trained on digits." in " ".join(card.split())
    assert "--data ./digits\n" in card
    assert "secret" not in card
    assert data_of(public_results(results)) == data_of(results) == (None, "digits", "evaluation")


def test_data_of_the_hub_keep_their_owner_and_weights_of_a_disk_lose_their_path() -> None:
    """Else the command of a card trains on the official data set instead, and shows where somebody's files lie."""
    results = json.loads((ROOT / "results" / "swin_cifar10_80ep_default.json").read_text())
    paths = {"data": "owner/CIFAR10@main", "pretrained": "outputs/secret"}
    results |= {"settings": results["settings"] | paths, "from_hub": ["data"]}
    with torch.device("meta"):
        card = cards.model_card(create_model("swin_tiny", num_classes=10), results, source="team/model")
    assert data_of(results) == ("owner/CIFAR10", "owner/CIFAR10", "evaluation")
    assert ModelCard(card).data.datasets == ["owner/CIFAR10"]
    assert all(words in card for words in ("--data owner/CIFAR10@main ", "--pretrained secret "))
    assert "90.15" not in card  # the paper's
    assert "outputs" not in card
    assert data_of(results | {"from_hub": []})[0] == "uoft-cs/cifar10"
    kept = results | {"from_hub": ["data", "pretrained"]}
    assert public_results(kept) == kept
    embedded = results["settings"] | {"pretrained": "swin/checkpoints/swin_micro"}
    assert public_results(results | {"settings": embedded})["settings"] == embedded


def test_a_run_tells_what_it_took_from_the_hub(train_digits: Callable[..., dict[str, Any]], tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """A folder and a data set of the Hub look alike: afterwards nothing else says which it was."""
    monkeypatch.setattr("common.training.task.load_data", lambda *_: load_digits_data())
    weights = str(ROOT / "swin" / "checkpoints" / "swin_micro")
    train_digits(tmp_path, "--data", "owner/digits", "--pretrained", weights, "--limit", "16")
    assert json.loads((tmp_path / "results.json").read_text())["from_hub"] == ["data"]


def test_model_arguments_of_a_command_are_read_as_they_were() -> None:
    """Else the command of a card builds another model, or none: null is a word, and a tuple of one a number."""
    results = json.loads((ROOT / "results" / "swin_digits.json").read_text())
    arguments = {"depths": [2], "anchors": ["token"], "padding_mode": None, "canonical": False, "sketch": 16}
    results["settings"]["model_args"] = arguments
    words = shlex.split(command(results))
    read = parse_arguments(words[words.index("--model_args") + 1 :][: len(arguments)])
    assert read == {k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()}


def test_names_with_spaces_are_one_word_of_the_command() -> None:
    """Else the command of a card or manifest ends with "unrecognized arguments", or runs what a name says."""
    results = json.loads((ROOT / "results" / "swin_digits.json").read_text())
    results["settings"] |= {"data": "/home/me/my pets; id", "pretrained": "runs/first try", "mean": [0.5, 0.25, 0.5]}
    words = shlex.split(command(results))
    _, recipe, _ = parse_command_line(recipes_of("swin"), "digits", words[3:])
    assert (recipe.data, recipe.pretrained, recipe.mean) == ("my pets; id", "runs/first try", (0.5, 0.25, 0.5))


def test_a_run_that_ended_early_says_so() -> None:
    """Else its numbers pass for those of the whole schedule."""
    model, results = create_model("mvitv2_mini"), read_results(ROOT / "results/mvitv2_cifar10_mini_default.json")
    whole = {**results, "epochs": results["settings"]["epochs"]}
    text = cards.model_card(model, results, source="mvitv2_mini")
    assert "69 of 88, measured before the end of its schedule" in text
    assert results["note"] in text
    assert "before the end" not in cards.model_card(model, whole, source="mvitv2_mini")
