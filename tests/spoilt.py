"""Files spoilt at random, and the public functions that load them: what ``scripts/fuzz.py`` runs.

A case is made of a directory, which it fills, and of random numbers; what it returns may fail.
"""

import contextlib
import copy
import io
import json
import random
import resource
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from PIL import Image

from common import create_model, from_pretrained
from common.data.images import read_image
from common.data.preprocess import Preprocess
from common.data.sources import load_data
from common.training.checkpoints import Progress, latest_checkpoint, load_checkpoint, save_checkpoint, write_manifest
from segmentation.preprocess import ScenePreprocess

ROOT = Path(__file__).resolve().parents[1]
STATM = Path("/proc/self/statm")
MODELS = [ROOT / "swin/checkpoints/a_swin_micro", ROOT / "swinv2/checkpoints/a_swinv2_micro",
          ROOT / "cvt/checkpoints/a_cvt_micro", ROOT / "mvitv2/checkpoints/a_mvitv2_micro",
          ROOT / "segmentation/checkpoints/upernet_a_swin_micro"]  # fmt: skip
VALUES: list[Any] = [None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**30, 1e308, float("nan"), float("inf"), 0.5, "",
                     "x", "../../x", "\0", "é" * 999, "9" * 5000, [], {}, [[]], [1, 2], [0] * 99, {"a": {"b": [1]}},
                     [[[[[1]]]]], ["x", None], {"": 0}, {"size": 32}]  # fmt: skip


@contextlib.contextmanager
def little_memory(extra: int) -> Iterator[None]:
    """Address space for ``extra`` bytes more than there are now: a large allocation fails, touched or not."""
    if not STATM.exists():  # elsewhere than on Linux the files are loaded all the same, unmeasured
        yield
        return
    now = int(STATM.read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + extra, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# how files are spoilt


def spoil_bytes(rng: random.Random, content: bytes) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 4, 8, 64, 1000))
        kind = rng.choice(("flip", "cut", "drop", "insert", "splice", "fill"))
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + length]
        elif kind == "insert":
            data[at:at] = rng.randbytes(length)
        elif kind == "splice":
            start = rng.randrange(len(data) + 1)
            data[at : at + length] = data[start : start + length]
        else:
            data[at : at + length] = bytes([rng.choice((0, 255, 0x7F, 0x80, 0x22, 0x5B))]) * min(length, len(data) - at)
    return bytes(data)


def odd(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(VALUES))


def spoil_json(rng: random.Random, content: bytes) -> bytes:
    """Replace, drop or add a value anywhere; or spoil the text."""
    if rng.random() < 0.3:
        return spoil_bytes(rng, content)
    whole = json.loads(content)
    for _ in range(rng.choice((1, 1, 3))):
        value = whole
        while True:
            keys = list(value) if isinstance(value, dict) else list(range(len(value)))
            if not keys or rng.random() < 0.1:
                if isinstance(value, dict):
                    value[rng.choice(("evil", "auto_map", "", "size"))] = odd(rng)
                else:
                    value.append(odd(rng))
                break
            key = rng.choice(keys)
            if isinstance(value[key], (dict, list)) and rng.random() < 0.6:
                value = value[key]
                continue
            if rng.random() < 0.15:
                del value[key]
            else:
                value[key] = odd(rng) if rng.random() < 0.7 else _near(rng, value[key])
            break
    return json.dumps(whole).encode(errors="replace")


def _near(rng: random.Random, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return [value] * rng.randrange(70)
    return rng.choice((-value, value + 1, value * 2, value * 10**6, float(value), str(value), value // 2))


def spoil_weights(rng: random.Random, content: bytes) -> bytes:
    """The header as JSON, the whole as bytes, or the numbers alone."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    part = rng.random()
    if part < 0.4:
        header = spoil_json(rng, header)
    elif part < 0.7:
        return spoil_bytes(rng, content)
    else:
        at = rng.randrange(len(data))
        data = data[:at] + rng.randbytes(8)[: len(data) - at] + data[at + 8 :]
    return len(header).to_bytes(8, "little") + header + data


def spoil_png(content: bytes, rng: random.Random) -> bytes:
    """Chunks of a PNG with their check sums put right, so that what they hold is read."""
    chunks, at = [], 8
    while at + 8 <= len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        chunks.append([content[at + 4 : at + 8], content[at + 8 : at + 8 + length]])
        at += 12 + length
    chosen = rng.choice(chunks)
    chosen[1] = spoil_bytes(rng, chosen[1])
    parts = [struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
             for name, data in chunks]  # fmt: skip
    return content[:8] + b"".join(parts)


# what is spoilt, and how it is loaded


def config(directory: Path, rng: random.Random) -> Callable[[], Any]:
    source = _copy(rng.choice(MODELS), directory)
    _spoil(source / "config.json", rng, spoil_json)
    return lambda: from_pretrained(str(source))


def weights(directory: Path, rng: random.Random) -> Callable[[], Any]:
    source = _copy(rng.choice(MODELS[:4]), directory)
    _spoil(source / "model.safetensors", rng, spoil_weights)
    return lambda: from_pretrained(str(source))


def preprocessor(directory: Path, rng: random.Random) -> Callable[[], Any]:
    model = rng.choice(MODELS)
    path = directory / "preprocessor_config.json"
    path.write_bytes((model / path.name).read_bytes())
    _spoil(path, rng, spoil_json)
    return lambda: (ScenePreprocess if model == MODELS[4] else Preprocess).load(path)


def parquet(directory: Path, rng: random.Random) -> Callable[[], Any]:
    """The file as bytes, or a good one with odd columns, or with spoilt images."""
    pictures, labels = [samples()["PNG"][i % 2] for i in range(6)], [i % 3 for i in range(6)]
    for name in ("test", "train"):
        _write_parquet(directory / f"{name}.parquet", pictures, labels)
    train, part = directory / "train.parquet", rng.random()
    if part < 0.6:
        _spoil(train, rng, spoil_bytes)
    elif part < 0.8:
        others = [odd(rng) if rng.random() < 0.5 else label for label in labels]
        with contextlib.suppress(pa.ArrowException, TypeError, OverflowError):  # what no column can hold
            _write_parquet(train, pictures, others)
    else:
        _write_parquet(train, [spoil_bytes(rng, picture) for picture in pictures], labels)
    skip = rng.random() < 0.3

    def load() -> None:
        split = load_data(str(directory), skip)[0].prepared(Preprocess(size=(8, 8)))
        [split[i] for i in range(len(split))]

    return load


def image(kind: str, directory: Path, rng: random.Random) -> Callable[[], Any]:
    content = rng.choice(samples()[kind])
    content = spoil_png(content, rng) if kind == "PNG" and rng.random() < 0.5 else spoil_bytes(rng, content)
    path = directory / f"x.{kind.lower()}"
    path.write_bytes(content)
    return lambda: read_image(path)


def checkpoint(directory: Path, rng: random.Random) -> Callable[[], Any]:
    """Any file of a checkpoint; in half of the cases the digests are those of the spoilt file."""
    accelerator, files = run()
    path = directory / "step_00000003"
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    name = rng.choice(sorted(files))
    _spoil(path / name, rng, spoil_json if name.endswith(".json") else spoil_bytes)
    if rng.random() < 0.5:
        write_manifest(path)

    def load() -> None:
        found = latest_checkpoint(directory, report=lambda text: None)
        assert found is not None
        load_checkpoint(accelerator, found, {"recipe": "fuzz"})

    return load


KINDS: dict[str, Callable[[Path, random.Random], Callable[[], Any]]] = {
    "config": config, "preprocessor": preprocessor, "weights": weights, "parquet": parquet, "checkpoint": checkpoint,
    **{kind: lambda directory, rng, kind=kind: image(kind, directory, rng)  # type: ignore[misc]
       for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF")},
}  # fmt: skip


def _copy(model: Path, directory: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(model / name, directory / name)
    return directory


def _spoil(path: Path, rng: random.Random, how: Callable[[random.Random, bytes], bytes]) -> None:
    path.write_bytes(how(rng, path.read_bytes()))


def _write_parquet(path: Path, pictures: Sequence[bytes], labels: Sequence[Any]) -> None:
    columns = {"img": [{"bytes": picture, "path": None} for picture in pictures], "label": labels}
    pq.write_table(pa.table(columns), path)


@cache
def samples() -> dict[str, list[bytes]]:
    """Small images of each format: colour, grey, palette, transparency, 16 bits, several frames, EXIF."""
    pixels = np.random.default_rng(0).integers(0, 256, (24, 20, 4), dtype=np.uint8)
    rgb, rgba = Image.fromarray(pixels[..., :3]), Image.fromarray(pixels)
    deep, exif = Image.fromarray(pixels[..., :2].copy().view(np.uint16)[..., 0]), Image.Exif()
    exif[0x0112] = 6

    def saved(source: Image.Image, kind: str, **options: Any) -> bytes:
        buffer = io.BytesIO()
        source.save(buffer, kind, **options)
        return buffer.getvalue()

    several = {"save_all": True, "append_images": [rgb.rotate(90, expand=False)]}
    return {
        "PNG": [saved(rgb, "PNG"), saved(rgba, "PNG", exif=exif), saved(deep, "PNG"), saved(rgb.convert("P"), "PNG")],
        "JPEG": [saved(rgb, "JPEG", exif=exif), saved(rgb.convert("CMYK"), "JPEG"), saved(rgb, "JPEG", progressive=1)],
        "WEBP": [saved(rgb, "WEBP"), saved(rgba, "WEBP", lossless=True), saved(rgb, "WEBP", **several)],
        "GIF": [saved(rgb, "GIF"), saved(rgb, "GIF", **several)],
        "TIFF": [saved(rgb, "TIFF"), saved(deep, "TIFF"), saved(rgb, "TIFF", compression="tiff_lzw", **several)],
    }


@cache
def run() -> tuple[Accelerator, dict[str, bytes]]:
    """A run to resume, and the files of its checkpoint, always the same."""
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    model = create_model("swin_micro", embed_dim=8, num_heads=(1, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # no backward: a process that was forked after one can have none
    optimizer.step()
    with tempfile.TemporaryDirectory() as directory:
        path = save_checkpoint(accelerator, Path(directory), Progress(step=3, images=48), {"recipe": "fuzz"}, keep=1)
        return accelerator, {file.name: file.read_bytes() for file in path.iterdir()}
