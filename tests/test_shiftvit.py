"""The command ``shiftvit``, checkpoints by name, and torch.hub."""

from pathlib import Path

import pytest
import torch
from conftest import ROOT
from PIL import Image

from common import from_pretrained
from common.data.splits import load_digits_data
from common.evaluation.evaluate import load_for_evaluation
from shiftvit.command import COMMANDS, main


def test_embedded_checkpoints_go_by_name_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away from the repository, as after ``pip install``."""
    monkeypatch.chdir(tmp_path)
    x = torch.randn(2, 3, 32, 32)
    expected = from_pretrained(str(ROOT / "swin/checkpoints/a_swin_micro"))(x)
    for source in ("a_swin_micro", "swin/checkpoints/a_swin_micro"):
        assert torch.equal(from_pretrained(source)(x), expected)
    for source in ("a_swin_tiny", "cvt/checkpoints/a_swin_micro", "../a_swin_micro", "*", ""):
        with pytest.raises((FileNotFoundError, ValueError)):
            from_pretrained(source)


def test_a_name_is_its_checkpoint_and_fresh_weights_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost otherwise: a person evaluates a name, and takes 10 % for the checkpoint's."""
    model, preprocess = load_for_evaluation("a_swin_micro", 10)
    assert torch.equal(model.head.fc.weight, from_pretrained("a_swin_micro").head.fc.weight)
    assert preprocess.mean == (0.0,) * 3
    with pytest.warns(UserWarning, match="cvt_micro is the name of a model without a checkpoint: it gets fresh"):
        load_for_evaluation("cvt_micro", 10)
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("cvt_micro")
    assert load_for_evaluation("cvt_micro", 10)[0].config == model.config


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["shiftvit"])
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert not end.value.code
    assert "--" in capsys.readouterr().out


def test_folders_and_mistakes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["shiftvit"])
    for words, said in ((["train", "cvt", "--help"], "Train CvT"), (["--help"], "shiftvit train [FOLDER]")):
        with pytest.raises(SystemExit):
            main(words)
        assert said in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["fly"])
    assert "invalid choice: 'fly'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "nosuch"])
    assert "train nosuch: FOLDER is one of swin, swinv2, cvt, mvitv2, segmentation" in capsys.readouterr().err
    Image.fromarray(load_digits_data()[1].images[0].permute(1, 2, 0).numpy()).save(tmp_path / "two.png")
    main(["predict", "--model", "a_swin_micro", str(tmp_path / "two.png"), "--device", "cpu", "--top", "1"])
    assert "| 2 " in capsys.readouterr().out


def test_torch_hub() -> None:
    model = torch.hub.load(str(ROOT), "a_cvt_micro", source="local", num_classes=3).eval()
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
    x = torch.randn(2, 3, 32, 32)
    loaded = torch.hub.load(str(ROOT), "from_pretrained", "a_swin_micro", source="local")
    assert torch.equal(loaded(x), from_pretrained("a_swin_micro")(x))
