"""The canonical anchor: every shifted copy of an image becomes one array, on every device by the same integers."""

import pytest
import torch
from conftest import awkward_images, interpreted, launches
from torch import Tensor

from common import kernels
from common.anchors import Canonical
from common.ops.canonical import read, residue
from common.shifts import roll

SIZES = [(7, 7), (12, 12), (16, 16), (9, 20)]


def hard_images(height: int, width: int) -> dict[str, Tensor]:
    """Images (1, 3, H, W) with few colours, equal rows, or equal objects that are not arranged symmetrically."""
    generator = torch.Generator().manual_seed(height + width)
    noise = torch.rand(1, 3, height, width, generator=generator)
    mask = (noise[:, :1] < 0.5).float()
    i, j = torch.arange(height)[:, None], torch.arange(width)
    steps = torch.randint(2, (height,), generator=generator) * 2 - 1

    def grey(rows: Tensor) -> Tensor:
        return rows.float().expand(1, 3, height, width)

    def pixels(*places: tuple[int, int]) -> Tensor:
        image = torch.zeros(1, 3, height, width)
        for h, w in places:
            image[..., h, w] = 1
        return image

    def sheared(row: Tensor, steps: Tensor) -> Tensor:
        return grey(torch.stack([row.roll(int(step)) for step in steps]))

    return {
        "one pixel": pixels((2, 3)),
        "two pixels": pixels((0, 0), (3, 5)),
        "two pixels half a height apart": pixels((0, 0), (height // 2, 2)),  # all rows repeat, the image does not
        "two pixels half a width apart": pixels((0, 0), (2, width // 2)),
        "four pixels": pixels((0, 0), (height // 4, 1), (height // 2, 0), (3 * height // 4, 5)),
        "permutation": grey(j == torch.randperm(max(height, width), generator=generator)[:height, None]),
        "one row, sheared at random": sheared(noise[0, 0, 0], steps * 3),
        "one row, sheared evenly": sheared(noise[0, 0, 0], i[:, 0] * 2),
        "zigzag": sheared(j < width // 2, steps.cumsum(0)),
        "diagonal stripes": grey((i + j) % 4 < 2),
        "ramp": grey(j / width),
        "low contrast": 0.5 + 0.002 * noise,
        "0 or 1": grey(mask[0, 0]),
        "-1 or 1": grey(2 * mask[0, 0] - 1),
        "0 or 255": grey(255 * mask[0, 0]),
        "whole numbers": (noise * 256).floor(),
        "yellow or blue": torch.cat([mask, mask, 1 - mask], 1),
        "only blue": torch.cat([0 * mask, 0 * mask, mask], 1),
        "point reflection": noise + noise.flip(2, 3),
    }  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_shifted_copy_becomes_one_array(size: tuple[int, int]) -> None:
    """At every shift there is. Lost otherwise: bit-identical outputs, for images like these."""
    canonical = Canonical()
    shifts = torch.cartesian_prod(torch.arange(size[0]), torch.arange(size[1]))
    for name, x in hard_images(*size).items():
        placed = canonical(roll(x.expand(len(shifts), -1, -1, -1), shifts))[0]
        assert torch.equal(placed, placed[:1].expand_as(placed)), name
        assert len(set(read(x).flatten().tolist())) > 1, f"{name} is read as one colour"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_any_precision_and_awkward_images(dtype: torch.dtype) -> None:
    canonical = Canonical()
    images = {**awkward_images(56), "noise": torch.randn(1, 3, 56, 56)}
    for name, x in images.items():
        x = x.to(dtype)
        reference, offset = canonical(x)
        assert torch.equal(roll(x, offset), reference)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(canonical.offset(x), offset)
        for shift in [(1, 0), (0, 1), (3, 2), (-17, 40), (28, 28), (55, 1)]:
            moved = roll(x, torch.tensor([shift]))
            assert torch.equal(canonical(moved)[0], reference), f"{name} at {shift}"


def test_any_size_but_one_that_is_too_large() -> None:
    canonical = Canonical(max_side=64)
    x = torch.randn(2, 1, 30, 52)
    assert torch.equal(canonical(x.roll((7, -9), (2, 3)))[0], canonical(x)[0])
    with pytest.raises(ValueError, match="canonical=False"):
        canonical(torch.zeros(1, 1, 65, 64))
    with pytest.raises(ValueError, match="max_side=4096"):
        Canonical(max_side=4096)


def test_what_is_not_finite_counts_as_zero() -> None:
    """Lost otherwise: an index out of range on a device, which ends the process."""
    x = torch.randn(1, 3, 8, 8)
    broken = x.clone()
    broken[0, :, 2, 3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    x[0, :, 2, 3] = 0
    assert torch.equal(read(broken), read(x))
    assert Canonical().offset(torch.full((1, 3, 8, 8), float("nan"))).tolist() == [[0, 0]]


def test_remainders_are_exact_as_far_as_they_say() -> None:
    """Up to the largest sums: else another device would choose another place."""
    t = torch.arange(-(2**18), 2**18 + 1)
    assert torch.equal(residue(t.float()).long(), t % 2039)


def by_definition(x: Tensor) -> list[int]:
    """The place of one image (1, C, H, W), in whole numbers of 64 bits."""
    g, least = read(x)[0].long(), torch.iinfo(torch.int64).min
    y, z = (kernel[:side].long() for kernel, side in zip(Canonical().kernel, g.shape, strict=True))
    d = g.sum(1)
    step = d - d.roll(1)
    seen = torch.stack([(d * y.roll(h)).sum() for h in range(len(y))])
    best = torch.where(step == step.max(), seen, least)
    rows = (best == best.max()).nonzero().flatten().tolist()
    s = torch.stack([(g * y.roll(h)[:, None]).sum(0) for h in rows])  # of the best rows, as a rule one
    step = s - s.roll(1, 1)
    scores = torch.stack([(s * z.roll(w)).sum(1) for w in range(len(z))], 1)
    row, column = divmod(int(torch.where(step == step.max(), scores, least).argmax()), len(z))
    return [rows[row], column]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_places_are_those_of_the_definition(size: tuple[int, int]) -> None:
    """Lost otherwise: the same place on another device, or from a kernel, for images that are hard to place."""
    images = hard_images(*size)
    faint = torch.full((1, 1, *size), 1019 / 1024)  # is read as 0, and what is a step brighter as 1: small sums
    faint[..., torch.tensor([1, 1, 3, 3]), torch.tensor([1, 3, 1, 3])] = 1020 / 1024
    for name, x in {**images, "faint": faint}.items():
        assert Canonical().offset(x).tolist() == [by_definition(x)], name


def test_images_without_a_look_at_their_values() -> None:
    """Under vmap, where all rows count, not only those that are the best. Lost otherwise: gradients of each sample."""
    x, canonical = torch.cat(list(hard_images(9, 20).values())), Canonical()
    assert torch.equal(torch.func.vmap(lambda image: canonical.offset(image[None])[0])(x), canonical.offset(x))


@pytest.mark.parametrize("side", [5, 2048])
def test_scores_are_those_of_whole_numbers(side: int) -> None:
    """Of the largest there are, in 64 bits. Lost otherwise: the last bits of a score, and what they decide."""
    x = torch.full((1, 1, side, side), 2038 / 1024)
    x[..., torch.tensor([0, 0, 2, 2]), torch.tensor([0, 2, 0, 2])] = 0
    canonical = Canonical()
    g, (y, z) = read(x)[0].long(), canonical.kernel[:, :side].long()
    d, least = g.sum(1), torch.iinfo(torch.int64).min
    seen = torch.stack([(d * y.roll(h)).sum() for h in range(side)])
    rows = d - d.roll(1) == (d - d.roll(1)).max()
    assert rows.nonzero().flatten().tolist() == [1, 3]  # which two sums tell apart
    row = int(torch.where(rows, seen, least).argmax())
    s = (g * y.roll(row)[:, None]).sum(0)
    columns = s - s.roll(1) == (s - s.roll(1)).max()
    assert columns.nonzero().flatten().tolist() == [1, 3]
    scores = torch.stack([(s * z.roll(w)).sum() for w in range(side)])
    assert int(scores.max()).bit_length() == {5: 42, 2048: 60}[side]  # a float64 holds 53
    assert canonical.offset(x).tolist() == [[row, int(torch.where(columns, scores, least).argmax())]]


def both(monkeypatch: pytest.MonkeyPatch, x: Tensor) -> tuple[Tensor, Tensor]:
    """Offsets with kernels, and without."""
    canonical = Canonical()
    assert kernels.fits_canonical_kernel(x)
    fast = canonical.offset(x)
    monkeypatch.setattr(kernels.base, "ENABLED", False)
    return fast, canonical.offset(x)


@interpreted
@pytest.mark.parametrize(("size", "tile"), [
    ((7, 7), 256), ((9, 20), 256), ((20, 7), 256), ((8, 24), 16), ((24, 9), 16),
])  # fmt: skip
def test_offsets_of_hard_images(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], tile: int) -> None:
    """Also as of large images, which are read a tile at a time, and a row in parts."""
    monkeypatch.setitem(kernels.canonical.TILES, "side", tile)
    monkeypatch.setitem(kernels.canonical.TILES, "read", 4 * tile if tile == 256 else tile)
    images = list(hard_images(*size).values())[:: 1 if tile == 256 else 3]
    fast, plain = both(monkeypatch, torch.cat(images))
    assert torch.equal(fast, plain)
    assert len(fast.unique(dim=0)) > len(images) // 2


@interpreted
def test_images_that_repeat_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of a flat image, two of a checkerboard, all of one that is sheared, none of one that has a place of its
    own, though most of it is flat. Lost otherwise: time, for black, or for all images."""
    i, j = torch.arange(12)[:, None], torch.arange(10)
    images = {"flat": 0 * (i + j), "checkerboard": (i + j) % 2, "sheared": (j + i * i) % 10 < 3,
              "block": (i > 8) & (j > 5)}  # fmt: skip
    counts, sums = dict.fromkeys(images, 0), kernels.canonical._hash  # the first finds the rows
    for name, image in images.items():

        def counted(*args: object, name: str = name) -> object:
            counts[name] += 1
            return sums(*args)

        monkeypatch.setattr(kernels.canonical, "_hash", counted)
        Canonical().offset(image.float().expand(1, 3, 12, 10))
    assert counts == {"flat": 2, "checkerboard": 3, "sheared": 13, "block": 0}


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_offsets_of_any_layout(monkeypatch: pytest.MonkeyPatch, channels: int, dtype: torch.dtype) -> None:
    x = (50 * torch.randn(3, channels, 24, 20)).to(dtype)[:, :, ::2]
    x[0, 0, 1, 1] = float("nan")
    x[1, 0, 2, 2] = float("inf")
    fast, plain = both(monkeypatch, x)
    assert torch.equal(fast, plain)
    monkeypatch.setattr(kernels.base, "ENABLED", True)
    assert torch.equal(both(monkeypatch, x.contiguous(memory_format=torch.channels_last))[0], fast)


@interpreted
@pytest.mark.parametrize(("channels", "dtype"), [(3, torch.float32), (4, torch.float16), (5, torch.float16)], ids=str)
def test_images_are_packed_as_they_are_read(monkeypatch: pytest.MonkeyPatch, channels: int, dtype: torch.dtype) -> None:
    """To the bit, in any layout, and what is not finite stays so, though it counts as zero for the offset."""
    x = torch.randn(3, channels, 24, 20)[:, :, ::2]
    x[0, -1, 1, 1], x[1, 0, 2, 2], x[2, 0, 3, 3] = float("nan"), float("inf"), -1e30
    launched = launches(monkeypatch, "image_conv", "pixels")
    for image in (x, x.contiguous(), x.contiguous(memory_format=torch.channels_last)):
        offset, packed, _ = Canonical().place(image, dtype)
        assert launched == (["_image_pixels"] if channels == 5 else [])
        want = kernels.packed(image, dtype)
        assert packed.dtype == dtype
        assert packed.shape == want.shape
        assert packed.stride() == want.stride()
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        room = packed.stride(3)
        whole = (t.as_strided((3, 12, 20, room), (*t.stride()[::2], room, 1)).contiguous() for t in (packed, want))
        assert torch.equal(*(t.view(bits) for t in whole))
        assert torch.equal(offset, Canonical().offset(image))
        launched.clear()
    assert Canonical().place(packed, dtype)[1] is packed
    assert not launched


@interpreted
@pytest.mark.as_on_gpu("weights")
@pytest.mark.parametrize(("size", "rows"), [((12, 20), 4), ((7, 130), 6)])
def test_weights_are_mixed_meanwhile(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], rows: int) -> None:
    """By programs beside those that choose: the same combinations, and the same places."""
    x, projection = torch.randn(3, 3, *size), torch.randn(rows, 64)[:, :24]
    weight, bias, canonical = torch.randn(24, 75), torch.randn(24), Canonical()
    launched = launches(monkeypatch, "canonical", "sketching")
    offset, _, sketched = canonical.place(x, torch.float16, [projection, weight, bias])
    assert launched == ["_read", "_choose"]
    assert torch.equal(offset, canonical.offset(x))
    assert sketched is not None
    for one, other in zip(sketched, kernels.sketched(projection, weight, bias), strict=True):
        assert torch.equal(one, other)
    assert torch.allclose(sketched[0], projection @ weight, atol=1e-4)
    assert torch.allclose(sketched[1], projection @ bias, atol=1e-4)


@interpreted
def test_offsets_of_hard_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rounding falls another way if taken another way: ties, what is a step below them, and what is huge."""
    below = 0.5 - 2.0**-25
    ties = [128.0, 128.5, 384.0, 256 * below, below / 1024, *((k + 0.5) / 1024 for k in (0, 1, 2, 3, 131071))]
    huge = [2.0**30 + 128, *(2.0**31 + 256 * k for k in (1, 2, 3)), 2.0**33, 3e38, 1e-40, float("inf")]
    numbers = torch.tensor([sign * number for number in ties + huge for sign in (1, -1)] + [float("nan")])
    choice = torch.randint(len(numbers), (8, 3, 12, 20))
    choice[-1] = numbers.tolist().index(2.0**31 + 256)  # the lowest level in every channel
    choice[-1, :, 5, 7] = 0
    fast, plain = both(monkeypatch, numbers[choice])
    assert torch.equal(fast, plain)
    assert len(fast.unique(dim=0)) > 5
