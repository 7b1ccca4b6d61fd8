"""Exported files: the model's labels and, for adaptive models, its exactness survive in another runtime."""

import json
import runpy
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, randomize
from torch import Tensor, nn

from common import create_model, from_pretrained
from common.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from common.data.splits import load_digits_data
from common.publishing.export import Normalised, check_exported, export_model, load_exported

SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "export.py"))
SMALL: dict[str, dict[str, Any]] = {  # every kind of layer and anchor, fewer of them: tracing takes seconds a stage
    "a_swinv2_micro": {"depths": (1, 1)},
    "a_cvt_micro": {"depths": (1,), "patch_sizes": (7,), "patch_strides": (4,), "patch_paddings": (2,),
                    "embed_dims": (32,), "num_heads": (2,)},
    "a_mvitv2_micro": {"depths": (1,), "stride_q": (2,)},
}  # fmt: skip


@pytest.fixture(scope="module")
def digits() -> Tensor:
    """Real digits as the micro checkpoints take them."""
    return Preprocess(size=(32, 32), mean=(0.0,) * 3, std=(0.35,) * 3).evaluate(load_digits_data()[1].images[:16])


def contents(path: Path) -> bytes:
    if path.suffix != ".pt2":
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return b"".join(archive.read(name) for name in archive.namelist())


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_onnx_files_of_adaptive_models_are_exact(name: str, digits: Tensor, tmp_path: Path) -> None:
    """Lost otherwise: who deploys with onnxruntime gets a model that is no longer shift-invariant, or another model."""
    model = randomize(create_model(name, **SMALL[name])).eval()
    run = load_exported(export_model(model, digits, tmp_path / "model.onnx"))
    check = check_exported(run, model, digits, shifts=6)
    assert check.problems(adaptive=True) == []
    assert check.label_kept == check.bit_identical == check.copies == 96


@pytest.mark.slow
def test_the_command_writes_a_checked_onnx_file(tmp_path: Path) -> None:
    """Lost otherwise: the documented way to an ONNX file, its metadata, uint8 input, or its own check of the result."""
    import onnx

    source, target = ROOT / "swin/checkpoints/a_swin_micro", tmp_path / "new" / "model.onnx"
    SCRIPT["main"](["--model", str(source), "--format", "onnx", "--output", str(target), "--with_preprocessing",
                    "--check", "12", "--shifts", "4", "--json", str(tmp_path / "counts.json")])  # fmt: skip
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert counts["images"] == counts["same label"] == 12
    assert counts["shifted copies"] == counts["label kept"] == counts["bit-identical"] == 48
    assert [path.name for path in target.parent.iterdir()] == ["model.onnx"]

    file = onnx.load_model(target)
    onnx.checker.check_model(file)
    (taken,) = file.graph.input
    assert [d.dim_param or d.dim_value for d in taken.type.tensor_type.shape.dim] == ["batch", 3, 32, 32]
    stored = {entry.key: json.loads(entry.value) for entry in file.metadata_props}
    assert stored["config"]["model_type"] == "shiftvit_swin"
    assert stored["config"]["id2label"]["7"] == "7"
    assert stored["preprocess"] == {"size": [32, 32], "resize": None, "mean": [0.0] * 3, "std": [0.35] * 3,
                                    "in_graph": True}  # fmt: skip
    assert str(ROOT).encode() not in contents(target), "the file tells where it was written"

    pixels, labels = load_digits_data()[1].images[:50], load_digits_data()[1].labels[:50]
    for batch in (1, 3, 50):  # the graph was traced with two images
        logits = load_exported(target)(pixels[:batch].contiguous())
        assert logits.shape == (batch, 10)
    assert (logits.argmax(1) == labels).float().mean() > 0.9  # it reads digits, from raw pixels


def test_a_default_model_changes_its_label_in_the_exported_graph(digits: Tensor, tmp_path: Path) -> None:
    """Lost otherwise: the proof that these checks can fail, or a .pt2 file that is a true copy of its model."""
    model = from_pretrained(str(ROOT / "swin/checkpoints/swin_micro"))
    path = export_model(model, digits[:1], tmp_path / "model.pt2", metadata={"config": model.config})
    run = load_exported(path)
    check = check_exported(run, model, digits)
    assert check.problems(adaptive=False) == []  # it does what its model does
    assert check.label_kept < 64
    assert check.problems(adaptive=True) == [f"{128 - check.label_kept} of 128 shifted images change their label"]
    assert run(digits[:5]).shape == (5, 10)
    assert b'"embed_dim": 48' in contents(path)
    assert str(ROOT).encode() not in contents(path), "the file tells where it was written"


@pytest.mark.slow
def test_exported_masks_move_with_the_image(tmp_path: Path) -> None:
    """Lost otherwise: segmenters cannot be deployed, or their masks no longer follow the image; exactness in .pt2."""
    args = {"backbone_args": {"depths": (1, 1)}, "pool_scales": (1, 2), "auxiliary_channels": 0}
    model = randomize(create_model("upernet_a_swin_micro", **args)).eval()
    images = Preprocess(size=(64, 64)).evaluate(load_digits_data()[1].images[:4])
    check = check_exported(load_exported(export_model(model, images, tmp_path / "model.pt2")), model, images, shifts=3)
    assert check.problems(adaptive=True) == []
    assert check.bit_identical == check.copies == 12


def test_the_check_finds_files_that_are_wrong(digits: Tensor) -> None:
    """Lost otherwise: a file with other labels, other logits or an edge passes for a true copy."""
    model = from_pretrained(str(ROOT / "swin/checkpoints/a_swin_micro"))
    assert check_exported(model, model, digits).problems(adaptive=True) == []
    other = check_exported(lambda x: model(x).roll(1, 1), model, digits).problems(adaptive=True)
    assert other[0] == "16 of 16 images get another label than the model's"
    assert "logits differ from the model's" in other[1]
    rounded = check_exported(lambda x: model(x) * 1.001, model, digits).problems(adaptive=True)
    assert [problem.split(" by ")[0] for problem in rounded] == ["logits differ from the model's"]
    edge = torch.zeros(1, 3, 32, 32)
    edge[..., :4, :] = 1

    def cut(x: Tensor) -> Tensor:
        return model(x) + 100 * (x * edge).mean((1, 2, 3))[:, None] * torch.eye(10)[3]

    assert any("change their label" in problem for problem in check_exported(cut, model, digits).problems(True))
    broken = check_exported(lambda x: model(x) * float("nan"), model, digits).problems(adaptive=True)
    assert any("logits differ" in problem for problem in broken)


class AsksForItsLength(nn.Module):
    """A model of somebody else's, which fixes the batch size where it is traced in the usual way."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones(len(x), 2) * x.mean((1, 2, 3))[:, None]


def test_any_batch_size_also_where_a_model_asks_for_its_length(tmp_path: Path) -> None:
    """Lost otherwise: models that call len(x), as adapted ones of other libraries do, export for one batch size only
    or not at all."""
    run = load_exported(export_model(AsksForItsLength(), torch.zeros(1, 3, 8, 8), tmp_path / "model.pt2"))
    assert run(torch.ones(7, 3, 8, 8)).shape == (7, 2)


def test_normalisation_in_the_graph_is_the_preprocessing() -> None:
    """Lost otherwise: a deployed model sees other numbers than the evaluated one."""
    pixels = load_digits_data()[1].images[:4]
    preprocess = Preprocess(size=(32, 32))
    assert torch.equal(Normalised(nn.Identity(), preprocess.mean, preprocess.std)(pixels), preprocess.evaluate(pixels))


def test_wrong_requests_are_refused_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost otherwise: an export that failed leaves a file that looks whole, or an error that says nothing."""
    model, images = nn.Conv2d(3, 2, 3), torch.zeros(1, 3, 8, 8)
    for name, opset, message in (
        ("model.pth", None, "must end in .pt2 or .onnx"),
        ("model.pt2", 20, "is not an ONNX file: leave it out"),
        ("model.onnx", 99, "torch cannot write opset 99"),
    ):
        with pytest.raises(ValueError, match=message):
            export_model(model, images, tmp_path / name, opset=opset)
    with pytest.raises(ValueError, match="do not convolve in bfloat16: export the model in float32 or float16"):
        export_model(nn.Conv2d(3, 2, 3).bfloat16(), images, tmp_path / "model.onnx")
    with pytest.raises(FileNotFoundError, match="no exported model"):
        load_exported(tmp_path / "model.onnx")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"pip install 'shift-equivariant-vits\[export\]'"):
        export_model(model, images, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_the_trained_model_where_there_is_one() -> None:
    """Lost otherwise: a file that guesses, or that says nothing of how its images are normalised."""
    model, normalisation = SCRIPT["load"]("a_swin_micro")
    trained = from_pretrained(ROOT / "swin/checkpoints/a_swin_micro")
    assert torch.equal(model.head.fc.weight, trained.head.fc.weight)
    assert normalisation == {"mean": (0.0,) * 3, "std": (0.35,) * 3}
    with pytest.warns(UserWarning, match="fresh weights"):
        SCRIPT["load"]("cvt_micro")


def test_a_model_in_half_precision_takes_raw_pixels() -> None:
    """Lost otherwise: the first layer gets float32, and the exported file ends in an error."""
    graph = Normalised(nn.Conv2d(3, 2, 3).to(torch.float16), (0.5,) * 3, (0.5,) * 3)
    assert graph(torch.zeros(1, 3, 8, 8, dtype=torch.uint8)).dtype == torch.float16


@pytest.mark.slow
def test_images_of_other_channels_are_exported(tmp_path: Path) -> None:
    """Lost otherwise: models of one channel cannot be exported at all, for the digits have three."""
    create_model("a_swin_micro", in_chans=1, depths=(1, 1)).save_pretrained(tmp_path / "grey")
    flags = ["--model", str(tmp_path / "grey"), "--format", "torch_export", "--check", "2", "--shifts", "2"]
    with pytest.warns(UserWarning, match="has no preprocessor_config.json"):
        counts = SCRIPT["main"]([*flags, "--output", str(tmp_path / "grey.pt2")])
    assert counts["bit-identical"] == 4
    with pytest.raises(SystemExit):
        SCRIPT["main"]([*flags, "--with_preprocessing"])


def test_a_preprocessor_file_of_a_size_alone(tmp_path: Path) -> None:
    """Every other command takes such a file, and ImageNet's normalisation; export ended in a KeyError."""
    shutil.copytree(ROOT / "swin/checkpoints/a_swin_micro", tmp_path, dirs_exist_ok=True)
    (tmp_path / "preprocessor_config.json").write_text('{"size": [32, 32]}')
    assert SCRIPT["load"](str(tmp_path))[1] == {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}


def test_the_command_refuses_what_cannot_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lost otherwise: minutes of tracing before a wrong flag shows."""
    for flags, message in (
        (["--output", "model.pt2"], "--format onnx is written to a .onnx file, not to model.pt2"),
        (["--check", "1000"], "there are 360 digits to check on"),
        (["--img_size", "32", "32", "3"], "--img_size takes a side, or height and width"),
    ):
        with pytest.raises(SystemExit):
            SCRIPT["main"](["--model", "a_swin_micro", "--format", "onnx", *flags])
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="the nearest valid sizes are 32x32 and 64x64"):
        SCRIPT["main"](["--model", "a_swin_micro", "--format", "onnx", "--img_size", "40"])


@pytest.mark.parametrize(("flags", "resize"), [((), 40), (("--img_size", "64"), None), (("--img_size", "32"), 40)])
def test_files_say_what_their_images_are_cropped_from(flags: tuple[str, ...], resize: int | None, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Else who follows the metadata cuts 64 px out of images of 40, or the middle out of what the model sees whole."""
    shutil.copytree(ROOT / "swin/checkpoints/a_swin_micro", tmp_path / "mine")
    path = tmp_path / "mine/preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"resize": 40}))
    written: list[Any] = []

    def export_nothing(model: Any, images: Tensor, target: Path, *, metadata: Any, **_: Any) -> None:
        written.append((target, metadata["preprocess"]["resize"]))
        target.parent.mkdir(parents=True)
        target.touch()

    monkeypatch.setitem(SCRIPT["main"].__globals__, "export_model", export_nothing)
    monkeypatch.chdir(tmp_path / "mine")
    SCRIPT["main"](["--model", ".", "--format", "torch_export", "--check", "0", *flags])
    assert written == [(Path("outputs/export/mine.pt2"), resize)]
