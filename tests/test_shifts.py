"""Rolls, shifts and seeds: everything else rests on their conventions."""

import pytest
import torch
from torch import Tensor

from common.models.upsample import unpool, upsample
from common.seeding import derive_seed, hashed_uniform
from common.shifts import circular_pad, circular_shift, random_shifts, roll, shift_and_crop, standard_shift

OFFSETS = torch.tensor([[1, 2], [-3, 50], [0, 0], [63, -1]])


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_roll_reads_ahead_by_the_offset_of_each_sample(layout: str) -> None:
    x = torch.randn(4, 3, 12, 10)
    expected = torch.stack([x[i].roll((-h, -w), (1, 2)) for i, (h, w) in enumerate(OFFSETS.tolist())])
    if layout == "NHWC":
        x, expected = x.permute(0, 2, 3, 1), expected.permute(0, 2, 3, 1)
    dims = (2, 3) if layout == "NCHW" else (1, 2)
    assert torch.equal(roll(x, OFFSETS, dims), expected)
    assert torch.equal(roll(x=x, offset=OFFSETS, dims=dims), expected)


def test_rolls_add_up() -> None:
    x = torch.randn(4, 2, 8, 6)
    assert torch.equal(roll(roll(x, OFFSETS), -OFFSETS), x)
    assert torch.equal(roll(roll(x, OFFSETS), OFFSETS), roll(x, 2 * OFFSETS))


@pytest.mark.parametrize(("dims", "read"), [((2, 3), "aten::gather"), ((1, 2), "aten::index_select")])
def test_gradient_of_a_roll_is_the_opposite_roll_and_never_a_scatter(dims: tuple[int, int], read: str) -> None:
    x = torch.randn(4, 2, 4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: roll(t, OFFSETS, dims), (x,))
    assert torch.autograd.gradgradcheck(lambda t: roll(t, OFFSETS, dims), (x,))
    with torch.profiler.profile() as profile:
        roll(x, OFFSETS, dims).square().sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert read in names
    assert not {name for name in names if any(way in name for way in ("index_put", "index_add", "scatter"))}


def test_roll_refuses_what_it_cannot_mean() -> None:
    with pytest.raises(ValueError, match="one .row, column. offset per sample"):
        roll(torch.zeros(4, 1, 8, 8), OFFSETS[:2])
    with pytest.raises(ValueError, match="increasing spatial dims"):
        roll(torch.zeros(4, 8, 8), OFFSETS, dims=(0, 1))


def test_circular_shift_moves_content_down_and_right() -> None:
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, 4, 1] = 1
    assert circular_shift(x, torch.tensor([[2, 1]]))[0, 0, 1, 2] == 1


def test_standard_shift_brings_in_zeros_and_loses_what_leaves() -> None:
    x = torch.arange(1.0, 10).view(1, 1, 3, 3)
    assert standard_shift(x, torch.tensor([[1, 0]]))[0, 0].tolist() == [[0, 0, 0], [1, 2, 3], [4, 5, 6]]
    assert standard_shift(x, torch.tensor([[0, -2]]))[0, 0].tolist() == [[3, 0, 0], [6, 0, 0], [9, 0, 0]]


def test_shift_and_crop_shows_real_pixels_only() -> None:
    x = torch.randn(2, 3, 12, 12)
    shift = torch.tensor([[2, -1], [0, 0]])
    moved = shift_and_crop(x, shift, (8, 8))
    assert torch.equal(moved[0], x[0, :, 0:8, 3:11])
    assert torch.equal(moved[1], x[1, :, 2:10, 2:10])
    with pytest.raises(ValueError, match="resize them larger"):
        shift_and_crop(x, shift, (16, 16))


def test_random_shifts_belong_to_the_image_not_to_the_batch() -> None:
    whole = random_shifts(torch.arange(100), (0, -3), (31, 3), 5)
    parts = [random_shifts(torch.arange(i, i + 10), (0, -3), (31, 3), 5) for i in range(0, 100, 10)]
    assert torch.equal(whole, torch.cat(parts))
    assert whole[:, 0].min() >= 0
    assert whole[:, 0].max() <= 31
    assert set(whole[:, 1].tolist()) == set(range(-3, 4))
    assert not torch.equal(whole, random_shifts(torch.arange(100), (0, -3), (31, 3), 6))


@pytest.mark.parametrize("seeds", [(), (0,), (1, 2, 3), (5, 0, 49_999), (2**31 - 1, 7)])
def test_a_derived_seed_is_hashed_as_tensors_are(seeds: tuple[int, ...]) -> None:
    uniform = hashed_uniform(torch.zeros(1, dtype=torch.long), 1, *seeds)
    assert derive_seed(*seeds) == int(uniform.item() * 2**31)


def test_hashed_numbers_stay_what_they_are() -> None:
    """Else a resumed run goes on with other images, and measured C-Cons belong to other shifts."""
    assert hashed_uniform(torch.tensor([0, 7, 2**40]), 2, 3, 1, 4).tolist() == [
        [0.9998278403469285, 0.11078407483378028],
        [0.11757026813118632, 0.04987462764538886],
        [0.8536038964770445, 0.9304954776109513],
    ]
    assert hashed_uniform(torch.tensor([5]), 1, -2, 2**63 - 1).tolist() == [[0.5218261656173977]]


def test_hashed_uniform_is_uniform_and_uncorrelated() -> None:
    u = hashed_uniform(torch.arange(20000), 4, 1, 2, 3)
    assert u.min() >= 0
    assert u.max() < 1
    assert (u.mean(0) - 0.5).abs().max() < 0.01
    assert (u.T.corrcoef() - torch.eye(4)).abs().max() < 0.03


def test_upsampling_moves_nothing_and_unpooling_keeps_places() -> None:
    x = torch.randn(1, 2, 4, 6)
    assert torch.equal(unpool(x, 3)[..., ::3, ::3], x)
    assert unpool(x, 3).count_nonzero() == x.numel()
    ramp = torch.cos(2 * torch.pi * torch.arange(16) / 16).expand(1, 1, 16, 16)
    fine = torch.cos(2 * torch.pi * (torch.arange(64) + 0.5 - 2) / 64)  # centres of fine cells on the coarse axis
    assert (upsample(ramp, 4)[0, 0, 0] - fine).abs().max() < 0.03
    assert circular_pad(x, (0, 0, 0, 0)) is x


def test_what_is_exported_leaves_no_constants_behind() -> None:
    """Else everything that is normalised or shifted later in the process has no values: it is a tensor for tracing."""

    class Shifts(torch.nn.Module):
        def forward(self, index: Tensor) -> Tensor:
            return random_shifts(index, (-91, 3), (17, 41), 5)

    index = torch.arange(4)
    exported = torch.export.export(Shifts(), (index,), strict=False).module()
    shifts = random_shifts(index, (-91, 3), (17, 41), 5)
    assert type(shifts) is Tensor
    assert torch.equal(exported(index), shifts)
    assert torch.equal(torch.export.export(Shifts(), (index,), strict=False).module()(index), shifts)
