"""transformers: its ``Auto`` classes and pipelines load what we save, and give our logits to the bit."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, randomize
from PIL import ExifTags, Image
from safetensors.torch import load_file

from common import create_model, from_pretrained, list_models
from common.data.preprocess import PREPROCESSOR_NAME, Preprocess
from common.data.splits import load_digits_data
from segmentation.data import load_digit_scenes
from segmentation.preprocess import ScenePreprocess

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("common.transformers_models")

SWIN, UPERNET = (str(ROOT / path) for path in ("swin/checkpoints/a_swin_micro",
                                               "segmentation/checkpoints/upernet_a_swin_micro"))  # fmt: skip


def picture(i: int) -> Image.Image:
    return Image.fromarray(load_digits_data()[1].images[i].permute(1, 2, 0).numpy())


@torch.no_grad()
def test_a_classifier_gives_our_logits() -> None:
    """Lost otherwise: transformers takes a checkpoint for a Swin of its own, and answers with random weights."""
    config = transformers.AutoConfig.from_pretrained(SWIN)
    assert config.model_type == "shiftvit_swin"
    assert config.num_labels == 10
    model = transformers.AutoModelForImageClassification.from_pretrained(SWIN)
    processor = transformers.AutoImageProcessor.from_pretrained(SWIN)
    images = load_digits_data()[1].images[:8]
    x = Preprocess.load(Path(SWIN) / PREPROCESSOR_NAME).evaluate(images)
    given = processor([picture(i) for i in range(8)], return_tensors="pt")
    assert torch.equal(given["pixel_values"], x)
    assert torch.equal(processor(images)["pixel_values"], x)
    assert torch.equal(model(**given).logits, from_pretrained(SWIN)(x))
    loss = model(**given, labels=load_digits_data()[1].labels[:8]).loss
    assert loss < 1


@pytest.mark.parametrize("source", [SWIN, UPERNET])
@pytest.mark.parametrize("named", [True, False])
def test_a_config_saved_by_transformers_is_read(source: str, named: bool, tmp_path: Path) -> None:
    """Else config.save_pretrained, after a class got another name, makes the model beside it unreadable."""
    model = from_pretrained(source)
    model.class_names = model.class_names if named else ()
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    names = model.class_names
    if named:
        config.id2label[1], names = "première", (names[0], "première", *names[2:])
    config.save_pretrained(tmp_path)
    again = from_pretrained(str(tmp_path))
    assert again.config == model.config
    assert again.class_names == names
    assert transformers.AutoConfig.from_pretrained(tmp_path).id2label == config.id2label
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored.get("architecture") == model.timm_config().get("architecture")


@pytest.mark.parametrize("source", [SWIN, UPERNET])
def test_images_of_opencv_are_taken(source: str) -> None:
    """Its colours are turned round by image[..., ::-1], which torch refuses to read."""
    colours = torch.randint(0, 256, (48, 40, 3), dtype=torch.uint8).numpy()
    prepare = transformers.AutoImageProcessor.from_pretrained(source)
    assert torch.equal(prepare(colours[..., ::-1].copy()[..., ::-1]).pixel_values, prepare(colours).pixel_values)


def test_the_pipeline_gives_our_probabilities() -> None:
    pipe = transformers.pipeline("image-classification", model=SWIN, device="cpu")
    with torch.no_grad():
        x = Preprocess.load(Path(SWIN) / PREPROCESSOR_NAME).image(
            load_digits_data()[1].images[0].permute(1, 2, 0).numpy()
        )
        expected = from_pretrained(SWIN)(x[None]).softmax(1)[0].topk(3)
    found = pipe(picture(0), top_k=3)
    assert [pipe.model.config.label2id[best["label"]] for best in found] == expected.indices.tolist()
    assert [best["score"] for best in found] == pytest.approx(expected.values.tolist(), rel=1e-5)
    assert (
        pipe(picture(0), top_k=1, function_to_apply="none")[0]["score"] == from_pretrained(SWIN)(x[None]).max().item()
    )


@torch.no_grad()
def test_a_segmenter_gives_our_logits() -> None:
    model = transformers.AutoModelForSemanticSegmentation.from_pretrained(UPERNET)
    processor = transformers.AutoImageProcessor.from_pretrained(UPERNET)
    images = load_digit_scenes(train=1, test=2)[1].images
    given = processor([image.permute(1, 2, 0).numpy() for image in images], return_tensors="pt")
    x = ScenePreprocess.load(Path(UPERNET) / PREPROCESSOR_NAME).evaluate(images)
    assert torch.equal(given["pixel_values"], x)
    output, expected = model(**given), from_pretrained(UPERNET)(x)
    assert torch.equal(output.logits, expected)
    masks = processor.post_process_semantic_segmentation(output, target_sizes=[(64, 64), (128, 96)])
    assert torch.equal(masks[0], expected[0].argmax(0))
    assert masks[1].shape == (128, 96)
    turned = Image.fromarray(images[0].permute(1, 2, 0).numpy())
    turned.getexif()[ExifTags.Base.Orientation] = 6  # masks lie over pixels as they are stored, and as in training
    assert torch.equal(processor(turned)["pixel_values"], x[:1])
    pipe = transformers.pipeline("image-segmentation", model=UPERNET, device="cpu")
    assert len(pipe(Image.fromarray(images[0].permute(1, 2, 0).numpy()))) >= 2


@pytest.mark.parametrize("name", list_models("a_*_micro"))
@torch.no_grad()
def test_every_architecture_saved_there_and_here_is_the_same(name: str, tmp_path: Path) -> None:
    """Also with names of classes: what transformers saves, ``common`` loads."""
    model = randomize(create_model(name, num_classes=3)).eval()
    model.class_names = ("cat", "chest of drawers", "Käfer/bug")
    model.save_pretrained(tmp_path / "ours")
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "ours")
    assert theirs.config.id2label == dict(enumerate(model.class_names))
    theirs.save_pretrained(tmp_path / "theirs")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "theirs" / file).read_bytes() == (tmp_path / "ours" / file).read_bytes()
    x = torch.randn(2, 3, *model.img_size)
    assert torch.equal(theirs(x).logits, model(x))


def test_other_classes_and_other_arguments(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="start anew for 3"):
        model = transformers.AutoModelForImageClassification.from_pretrained(
            SWIN, id2label={0: "a", 1: "b", 2: "c"}, ignore_mismatched_sizes=True, adaptive=False
        )
    assert model(torch.zeros(1, 3, 32, 32)).logits.shape == (1, 3)
    assert not model.model.adaptive
    model.save_pretrained(tmp_path)
    assert from_pretrained(str(tmp_path)).class_names == ("a", "b", "c")
    with pytest.raises(ValueError, match=r"\['device_map'\] do not apply"):
        transformers.AutoModelForImageClassification.from_pretrained(SWIN, device_map="auto")


def test_a_fresh_model_from_a_config_without_names(tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(create_model("a_swin_micro").save_pretrained(tmp_path))
    assert config.id2label[9] == "LABEL_9"
    model = transformers.AutoModelForImageClassification.from_config(config)
    assert model(torch.zeros(1, 3, 32, 32)).logits.shape == (1, 10)


@torch.no_grad()
def test_old_files_still_load(tmp_path: Path) -> None:
    """Files from before 'shiftvit_swin' say 'swin', and transformers has a Swin of its own: random weights."""
    path = Path(shutil.copytree(SWIN, tmp_path / "old")) / "config.json"
    config = json.loads(path.read_text())
    old = {k: v for k, v in config.items() if k not in ("id2label", "architecture", "pretrained_cfg")}
    path.write_text(json.dumps({**old, "model_type": "swin"}))
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(from_pretrained(str(path.parent))(x), from_pretrained(SWIN)(x))
    loaded = transformers.AutoModelForImageClassification.from_pretrained(path.parent)
    assert torch.equal(loaded(x).logits, from_pretrained(SWIN)(x))
    processor = transformers.AutoImageProcessor.from_pretrained(path.parent)
    assert processor.image_std == [0.35] * 3
    transformers.SwinConfig(depths=[1, 1], num_heads=[1, 1]).save_pretrained(tmp_path / "theirs")
    assert type(transformers.AutoConfig.from_pretrained(tmp_path / "theirs")) is transformers.SwinConfig


def test_the_trainers_checkpoints_load(tmp_path: Path) -> None:
    """Else ``resume_from_checkpoint`` goes on from fresh weights: it reads our file into the wrapper."""
    model = transformers.AutoModelForImageClassification.from_pretrained(SWIN)
    model.save_pretrained(tmp_path)
    fresh = transformers.AutoModelForImageClassification.from_config(model.config)
    assert not fresh.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False).missing_keys
    again = pickle.loads(pickle.dumps(fresh))
    for loaded in (fresh, again):
        assert all(map(torch.equal, model.state_dict().values(), loaded.state_dict().values()))
    fresh.load_state_dict(model.state_dict())


def test_one_process_of_several_saves(tmp_path: Path) -> None:
    """Else the others, to whom FSDP gives no weights, write their own over those that were gathered."""
    model = transformers.AutoModelForImageClassification.from_pretrained(SWIN)
    model.save_pretrained(tmp_path, is_main_process=True, state_dict=model.state_dict())
    written = (tmp_path / "model.safetensors").read_bytes()
    other = transformers.AutoModelForImageClassification.from_config(model.config)
    other.save_pretrained(tmp_path, is_main_process=False, state_dict={})
    for save in (other.save_pretrained, other.model.save_pretrained):
        with pytest.raises(ValueError, match="does not fit the model: missing"):
            save(tmp_path, state_dict={})
    assert (tmp_path / "model.safetensors").read_bytes() == written


def test_options_are_heard_or_refused() -> None:
    """None of these changed anything."""
    auto, processor = transformers.AutoModelForImageClassification, transformers.AutoImageProcessor
    assert next(auto.from_pretrained(SWIN, dtype="bfloat16").parameters()).dtype == torch.bfloat16
    assert next(auto.from_pretrained(SWIN, dtype="auto").parameters()).dtype == torch.float32
    assert next(auto.from_pretrained(SWIN, torch_dtype=torch.float16).parameters()).dtype == torch.float16
    with pytest.warns(UserWarning, match="start anew for 3"):
        assert auto.from_pretrained(SWIN, num_classes=3)(torch.zeros(1, 3, 32, 32)).logits.shape == (1, 3)
    with pytest.raises(ValueError, match="unknown dtype"):
        type(auto.from_pretrained(SWIN)).from_pretrained(SWIN, dtype="bfloat17")
    with pytest.raises(ValueError, match="'size'.* do not apply"):
        processor.from_pretrained(SWIN, size=(64, 64))
    prepare = processor.from_pretrained(SWIN)
    with pytest.raises(ValueError, match="'do_resize'.* do not apply"):
        prepare(picture(0), do_resize=False)
    with pytest.raises(ValueError, match="expected Pillow images.*got str"):
        prepare("image.png")
    with pytest.raises(ValueError, match="return_tensors='np'"):
        prepare(picture(0), return_tensors="np")
    model = auto.from_pretrained(SWIN)
    model.config.problem_type = "multi_label_classification"
    with pytest.raises(ValueError, match="multi_label_classification.* has no loss here"):
        model(torch.zeros(1, 3, 32, 32), labels=torch.zeros(1, 10))


@pytest.mark.parametrize("source", [SWIN, UPERNET])
def test_a_processor_says_how_images_are_prepared(source: str, tmp_path: Path) -> None:
    """Scripts of transformers ask it for size, mean and deviation; without mean they take images as they are."""
    processor = transformers.AutoImageProcessor.from_pretrained(source)
    stored = json.loads((Path(source) / PREPROCESSOR_NAME).read_text())
    assert [processor.size["height"], processor.size["width"]] == stored["size"]
    assert (processor.image_mean, processor.image_std) == (stored["mean"], stored["std"])
    with pytest.raises(AttributeError):  # it would have no effect
        processor.size = {"height": 8, "width": 8}
    processor.save_pretrained(tmp_path)
    assert json.loads((tmp_path / PREPROCESSOR_NAME).read_text()) == stored


def test_a_loss_that_transformers_would_not_compute_is_refused() -> None:
    """It takes float labels for several classes an image, and one class for a regression: as the cross entropy of one
    class such a model would learn something else or, with a loss of 0, nothing."""
    model = transformers.AutoModelForImageClassification.from_pretrained(SWIN)
    x, shares = torch.zeros(2, 3, 32, 32), torch.full((2, 10), 0.1)
    with pytest.raises(ValueError, match=r"'multi_label_classification' has no loss here: .* labels as whole numbers"):
        model(x, labels=shares)
    model.config.problem_type = "single_label_classification"  # as of mixed images
    assert model(x, labels=shares).loss > 0
    one = transformers.AutoModelForImageClassification.from_pretrained(SWIN, num_labels=1)
    with pytest.raises(ValueError, match="problem_type 'regression' has no loss here"):
        one(x, labels=torch.zeros(2, 1))


def test_a_segmenter_trains_its_auxiliary_head() -> None:
    model = transformers.AutoModelForSemanticSegmentation.from_pretrained(UPERNET)
    x, labels = torch.randn(2, 3, 64, 64), torch.randint(0, 11, (2, 64, 64))
    both, one = model.train()(x, labels=labels).loss, model.eval()(x, labels=labels).loss
    both.backward()
    assert all(p.grad is not None for p in model.model.auxiliary_head.parameters())
    assert both > one
    assert one.item() == pytest.approx(F.cross_entropy(model(x).logits, labels).item(), rel=1e-5)
    assert model(x, labels=torch.full_like(labels, 255)).loss == 0


@torch.no_grad()
def test_a_segmenter_in_half_precision() -> None:
    """The losses of many pixels add up to more than float16 holds, and masks are stretched between rounded logits."""
    model = transformers.AutoModelForSemanticSegmentation.from_pretrained(UPERNET, dtype="float16")
    processor = transformers.AutoImageProcessor.from_pretrained(UPERNET)
    x = processor(list(load_digit_scenes(train=1, test=8)[1].images), return_tensors="pt")["pixel_values"].half()
    labels = torch.randint(0, 11, (8, 64, 64))
    output = model(x, labels=labels)
    logits = output.logits.float()
    assert output.loss.item() == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    masks = torch.stack(processor.post_process_semantic_segmentation(output, [(240, 200)] * 8))
    assert torch.equal(masks, F.interpolate(logits, (240, 200), mode="bilinear").argmax(1))
