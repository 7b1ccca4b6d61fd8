"""Files from strangers: whatever a repository holds, it is refused by a clear error, runs nothing and takes no memory.

Who loads a model from the Hub loads what somebody else uploaded. If one of these fails, a download can run code, fill
the memory, or end in a message that does not say what is wrong with the file.
"""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import randomize
from safetensors.torch import load_file, save_file
from spoilt import STATM, little_memory

from common import create_model, from_pretrained
from common.evaluation.evaluate import load_for_evaluation
from common.models.weights import load_weights
from segmentation.evaluation import load_for_evaluation as load_segmenter

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = 2**28  # bytes that refusing a file may take


def refused(source: Path, message: str, load: Callable[..., Any] = from_pretrained, *arguments: Any) -> None:
    with little_memory(ALLOWED), pytest.raises(ValueError, match=message) as error:
        load(str(source), *arguments)
    assert len(str(error.value)) - len(str(source)) < 500


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "swin" / "checkpoints" / "a_swin_micro", tmp_path / "model"))


@pytest.fixture
def segmenter(tmp_path: Path) -> Path:
    source = ROOT / "segmentation" / "checkpoints" / "upernet_a_swin_micro"
    return Path(shutil.copytree(source, tmp_path / "segmenter"))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "executed"


class Hostile:
    """Unpickling it leaves a trace."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return Path.touch, (self.marker,)


def test_the_guard_itself_notices_a_large_allocation() -> None:
    """Otherwise the tests below would promise more than they measure."""
    if not STATM.exists():
        pytest.skip("address space is limited through /proc, which this system does not have")
    with little_memory(ALLOWED), pytest.raises((MemoryError, RuntimeError)):
        torch.empty(4 * ALLOWED, dtype=torch.uint8)


# weights


def header(entries: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def claim(shape: list[int], end: int) -> dict[str, Any]:
    return {"norm.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}


BROKEN = {
    "empty": b"",
    "a few bytes": b"\x10\0\0",
    "a header of 2^60 bytes": (2**60).to_bytes(8, "little") + b"{}",
    "a header of 2^64 - 1 bytes": b"\xff" * 8 + b"{}",
    "a header longer than the file": (100).to_bytes(8, "little") + b"{}",
    "a header that is no JSON": (4).to_bytes(8, "little") + b"????",
    "a tensor of 4 TB in no bytes": header(claim([10**12], 4 * 10**12)),
    "a tensor of 4 TB in 16 bytes": header(claim([10**12], 16), b"\0" * 16),
    "a shape that overflows": header(claim([2**40, 2**40], 16), b"\0" * 16),
    "a negative shape": header(claim([-4], 16), b"\0" * 16),
    "bytes that no tensor claims": header(claim([4], 16), b"\0" * 4096),
    "offsets that run backwards": header({"norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}),
    "an unknown dtype": header({"norm.weight": {"dtype": "PY", "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 16),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_broken_weights_are_refused(content: bytes, saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(content)
    refused(saved, "model.safetensors is not a whole safetensors file")
    with (
        little_memory(ALLOWED),
        pytest.raises(ValueError, match="not a whole safetensors file"),
    ):  # as fine-tuning loads them
        load_weights(create_model("a_swin_micro"), saved / "model.safetensors", may_differ="head.")


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_truncated_weights_are_refused(share: float, saved: Path) -> None:
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    refused(saved, "not a whole safetensors file")


def test_a_header_beyond_all_bounds_is_not_parsed(saved: Path) -> None:
    with (saved / "model.safetensors").open("wb") as file:
        file.write((2**30).to_bytes(8, "little"))
        file.truncate(2**30 + 8)  # as large as it says, and no bytes on the disk
    refused(saved, "the header claims 1,073,741,824")


def test_pickles_by_the_name_of_safetensors_are_not_unpickled(saved: Path, marker: Path) -> None:
    path = saved / "model.safetensors"
    for protocol in (2, 5):
        path.write_bytes(pickle.dumps(Hostile(marker), protocol))
        refused(saved, "it is a pickle, which is never loaded")
    torch.save({"norm.weight": Hostile(marker)}, path)  # torch's own zip of pickles
    refused(saved, "it is a pickle, which is never loaded")
    assert not marker.exists()
    pickle.loads(pickle.dumps(Hostile(marker)))
    assert marker.exists()  # it would have left its trace


def test_missing_extra_misshapen_and_mistyped_tensors_are_named(saved: Path) -> None:
    path = saved / "model.safetensors"
    state = load_file(path)
    for change, message in (
        ({"norm.weight": None}, "missing norm.weight"),
        ({"layers.9.evil": torch.zeros(1)}, "unexpected layers.9.evil"),
        ({"norm.weight": torch.zeros(95)}, r"norm.weight has shape \(95,\), expected \(96,\)"),
        ({"norm.weight": torch.zeros(96, 1)}, r"norm.weight has shape \(96, 1\), expected \(96,\)"),
        ({"norm.weight": torch.zeros(96, dtype=torch.int64)}, "norm.weight holds torch.int64, expected torch.float32"),
    ):
        save_file({k: v for k, v in (state | change).items() if v is not None}, path)
        refused(saved, message)


# config.json

ABSURD: dict[str, tuple[dict[str, Any], str]] = {
    "a path as type": ({"model_type": "../x"}, "neither paths nor code"),
    "an absolute path": ({"model_type": "/etc/passwd"}, "neither paths nor code"),
    "a function as type": ({"model_type": "os.system"}, "model_type is 'os.system', expected one of"),
    "code as type": ({"model_type": "__import__('os').system('true')"}, "neither paths nor code"),
    "an object as type": ({"model_type": {"swin": 1}}, "model_type is dict, expected the name of a model"),
    "no type": ({"model_type": None}, "model_type is NoneType, expected the name of a model"),
    "a class": ({"auto_map": {"AutoModel": "modeling.Evil"}}, r"unknown keys \['auto_map'\]"),
    "classes": ({"architectures": ["Evil"]}, r"unknown keys \['architectures'\]"),
    "code as an argument": ({"score": "lambda: 0"}, "neither paths nor code"),
    "a choice that is none": ({"score": "evil"}, "unknown score 'evil': choose one of"),
    "anchors that are none": ({"anchors": ["token", "everything"]}, r"unknown anchors \['everything'\]"),
    "10^9 blocks": ({"depths": [10**9, 2]}, "numbers beyond 65,536 are refused"),
    "1,000 blocks": ({"depths": [500, 500]}, "more than 512 blocks are refused"),
    "65 stages": ({"depths": [1] * 65}, "more than 64 entries"),
    "an image of 10^9 px": ({"img_size": 10**9}, "img_size is 1000000000: numbers beyond 4,096"),
    "an image of 8,192 px": ({"img_size": [32, 8192]}, "numbers beyond 4,096"),
    "10^18 channels": ({"embed_dim": 10**18}, "numbers beyond 65,536"),
    "65,536 channels": ({"embed_dim": 65536}, r"head.fc.weight has shape \(10, 96\), expected \(10, 131072\)"),
    "65,536 classes": ({"num_classes": 65536}, "id2label has 10 names for 65536 classes"),
    "names that are none": ({"id2label": {str(i): i for i in range(10)}}, "0' is not a class name"),
    "names that move the cursor": ({"id2label": {str(i): "\x1b[2J" for i in range(10)}}, "is not a class name"),
    "names of a megabyte": ({"id2label": {str(i): "x" * 10_000 for i in range(10)}}, "is not a class name"),
    "names without order": ({"id2label": ["a"] * 10}, "must name the classes by their numbers"),
    "names with a gap": ({"id2label": {str(i): "a" for i in range(1, 11)}}, "must name the classes by their numbers"),
    "negative channels": ({"embed_dim": -48}, "describes no Swin"),
    "no heads": ({"num_heads": [0, 0]}, "0 heads do not divide the 48 channels of stage 0"),
    "no patch": ({"patch_size": 0}, "describes no Swin"),
    "no stages": ({"depths": []}, "describes no Swin"),
    "NaN": ({"drop_rate": float("nan")}, "drop_rate is nan"),
    "infinity": ({"mlp_ratio": float("inf")}, "mlp_ratio is inf"),
    "text for a number": ({"embed_dim": "48"}, "embed_dim is '48', expected int"),
    "truth for a number": ({"embed_dim": True}, "embed_dim is True, expected int"),
    "a number for truth": ({"adaptive": 1}, "adaptive is 1, expected bool"),
    "an object for a number": ({"embed_dim": {"value": 48}}, "embed_dim is .*, expected int"),
    "lists of lists of lists": ({"depths": [[[2]], 2]}, "nested too deeply"),
}


@pytest.mark.parametrize(("change", "message"), ABSURD.values(), ids=ABSURD.keys())
def test_configs_hold_plain_arguments_within_bounds(change: dict[str, Any], message: str, saved: Path) -> None:
    path = saved / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(saved, message)


def test_tables_that_no_weights_account_for_are_refused(tmp_path: Path) -> None:
    """SwinV2 stores nothing that depends on its window: the weights of a micro model fit windows that take 34 GB."""
    source = Path(shutil.copytree(ROOT / "swinv2" / "checkpoints" / "a_swinv2_micro", tmp_path / "model"))
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"img_size": 2048, "window_size": 256}))
    refused(source, "bytes of tables besides the weights")


def test_a_segmenter_builds_no_backbone_but_ours(segmenter: Path) -> None:
    path = segmenter / "config.json"
    config = json.loads(path.read_text())
    for change, message in (
        ({"backbone": "../../evil"}, "neither paths nor code"),
        ({"backbone": "os.system"}, "unknown model 'os.system'"),
        ({"backbone": "a_swin_micro"}, "give the default's name"),
        ({"backbone_args": {"depths": [10**9, 2]}}, "numbers beyond 65,536"),
        ({"backbone_args": {"depths": [400, 400]}}, "more than 512 blocks"),
        ({"backbone_args": {"evil": 1}}, "describes no UperNet.*evil"),
        ({"backbone_args": {"a": {"b": {"c": 1}}}}, "nested too deeply"),
        ({"backbone_args": "swin"}, "backbone_args is 'swin', expected"),
        ({"channels": 65536}, "has shape"),
        ({"pool_scales": [1] * 60}, "missing decode_head"),
    ):
        path.write_text(json.dumps(config | change))
        refused(segmenter, message)


NOT_JSON = {
    "text": b"model_type = swin",
    "cut": b'{"model_type": "sw',
    "binary": bytes(range(256)),
    "a list": b"[1, 2]",
    "nested 100,000 times": b'{"depths": ' + b"[" * 100_000,
    "a number of 10,000 digits": b'{"img_size": ' + b"9" * 10_000 + b"}",
    "empty": b"",
}


@pytest.mark.parametrize("content", NOT_JSON.values(), ids=NOT_JSON.keys())
@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_what_is_no_json_object_is_refused(name: str, content: bytes, saved: Path) -> None:
    (saved / name).write_bytes(content)
    refused(saved, "is not valid JSON|must hold a JSON object", load_for_evaluation, 10)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_a_gigabyte_of_json_is_not_read(name: str, saved: Path) -> None:
    with (saved / name).open("r+b") as file:
        file.truncate(2**30)
    refused(saved, "more than 1,048,576 bytes", load_for_evaluation, 10)


def test_a_pickled_config_is_not_unpickled(saved: Path, marker: Path) -> None:
    (saved / "config.json").write_bytes(pickle.dumps(Hostile(marker)))
    refused(saved, "is not valid JSON")
    assert not marker.exists()


# preprocessor_config.json


@pytest.mark.parametrize(("change", "message"), [
    ({"image_processor_type": "Evil"}, "unknown keys"),
    ({"auto_map": {"AutoImageProcessor": "evil.Evil"}}, "unknown keys"),
    ({"size": [10**9, 10**9]}, "size is 1000000000: numbers beyond 4,096"),
    ({"resize": 65536}, "resize is 65536: numbers beyond 4,096"),
    ({"mean": [float("nan")] * 3}, "mean is nan"),
    ({"size": [[[32]]]}, "nested too deeply"),
    ({"size": ["../x", 32]}, "neither paths nor code"),
    ({"size": 32}, "size is 32, expected tuple"),
    ({"size": "32"}, "size is 32, expected tuple"),
    ({"size": [32]}, "size is .*expected tuple"),
    ({"size": [0, 32]}, r"size is \(0, 32\), expected .*positive"),
    ({"size": [32.5, 32]}, "size is .*expected tuple"),
    ({"size": None}, "size is None, expected tuple"),
    ({"resize": -1}, "resize is -1, expected"),
    ({"resize": {"shortest_edge": 32}}, "resize is .*shortest_edge.*expected"),
    ({"mean": [0.5] * 4}, r"mean is \(0.5, 0.5, 0.5, 0.5\), expected tuple"),
    ({"mean": ["a", "b", "c"]}, "mean is .*expected tuple"),
    ({"std": 0.5}, "std is 0.5, expected tuple"),
    ({"std": [0.5, 0.5, 0.0]}, "std is .*positive"),
    ({f"key{i}": 0 for i in range(999)}, "unknown keys"),
])  # fmt: skip
def test_preprocessing_is_refused_where_it_is_absurd(change: dict[str, Any], message: str, saved: Path,
                                                     segmenter: Path) -> None:  # fmt: skip
    for source, load, classes in ((saved, load_for_evaluation, 10), (segmenter, load_segmenter, 11)):
        path = source / "preprocessor_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        refused(source, message, load, classes)


def test_a_canvas_smaller_than_its_crop_is_refused(saved: Path) -> None:
    """Else images are cropped from where they are not."""
    path = saved / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"resize": 16}))
    refused(saved, r"resize is 16, expected null or at least the size \(32, 32\)", load_for_evaluation, 10)


# arguments that no file brings


@pytest.mark.parametrize(("name", "heads"), [("swin_micro", (2, 5)), ("swinv2_micro", (3, 4)),
                                             ("cvt_micro", (1, 3, 4)), ("mvitv2_micro", 3)])  # fmt: skip
def test_heads_that_do_not_divide_the_width_are_named(name: str, heads: Any) -> None:
    """Else a model fails from deep inside at its first image, or is built with other heads than were asked for."""
    for kind in (name, f"a_{name}"):
        with pytest.raises(ValueError, match=r"num_heads \(.*heads do not divide the \d+ channels of stage \d; choose"):
            create_model(kind, num_heads=heads)
    if isinstance(heads, tuple):
        with pytest.raises(ValueError, match="must have one entry for each of"):
            create_model(name, num_heads=heads[:1])


# and yet


@pytest.mark.parametrize(
    "name", ["a_swin_micro", "swinv2_micro", "a_cvt_micro", "a_mvitv2_micro", "upernet_a_swinv2_micro"]
)
def test_good_files_still_load_in_as_little_memory(name: str, tmp_path: Path) -> None:
    """Also with arguments that are not the defaults: bounds that refuse what people save are no use."""
    extra: dict[str, Any] = {"num_classes": 21_841} if name == "a_swin_micro" else {}
    extra |= {"drop_path_rate": (0.0, 0.0, 0.1)} if name == "a_cvt_micro" else {}
    extra |= {"backbone_args": {"depths": (2, 4), "sketch": 0}} if name.startswith("upernet") else {}
    model = randomize(create_model(name, **extra)).eval()
    model.save_pretrained(tmp_path)
    with little_memory(ALLOWED):
        loaded = from_pretrained(str(tmp_path))
    assert loaded.config == model.config
    x = torch.randn(2, 3, *model.img_size)  # type: ignore[misc]
    assert torch.equal(loaded(x), model(x))
