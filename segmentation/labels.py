"""What the numbers in label images mean: a labelling, and those of data sets that are known by name."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.data.sources import EVALUATION_SPLITS
from common.evaluation.metrics import IGNORE_INDEX

__all__ = ["ADE20K", "CAMVID", "KNOWN", "Labelling"]


@dataclass(frozen=True)
class Labelling:
    """What the numbers in label images mean: class c is c + ``first``, ``ignore`` and 255 do not count.

    Without ``classes`` their number is found out from the labels themselves, if these are in memory. The first split of
    ``evaluated`` that is there is measured on.
    """

    classes: tuple[str, ...] | None = None
    ignore: tuple[int, ...] = ()
    first: int = 0
    evaluated: tuple[str, ...] = EVALUATION_SPLITS

    def __call__(self, stored: np.ndarray, where: str) -> Tensor:
        """(H, W) numbers of a label image -> uint8 labels, 255 for what is ignored."""
        labels = stored.astype(np.int64)
        skip = np.isin(labels, (*self.ignore, IGNORE_INDEX)) | (labels < self.first)
        labels = np.where(skip, IGNORE_INDEX, labels - self.first)
        most = len(self.classes) if self.classes is not None else IGNORE_INDEX
        wrong = labels[(labels != IGNORE_INDEX) & (labels >= most)]
        if wrong.size:
            raise ValueError(f"{where} has label {int(wrong.max()) + self.first}, but there are {most} classes, "
                             f"labelled {self.first} to {most + self.first - 1}, and {(*self.ignore, IGNORE_INDEX)} "
                             "to ignore")  # fmt: skip
        return torch.from_numpy(labels.astype(np.uint8))


CAMVID = Labelling(("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian",
                    "bicyclist"), ignore=(11,), evaluated=("test", *EVALUATION_SPLITS))  # fmt: skip
ADE20K_CLASSES = """
wall, building, sky, floor, tree, ceiling, road, bed, windowpane, grass, cabinet, sidewalk, person, earth, door,
table, mountain, plant, curtain, chair, car, water, painting, sofa, shelf, house, sea, mirror, rug, field,
armchair, seat, fence, desk, rock, wardrobe, lamp, bathtub, railing, cushion, base, box, column, signboard,
chest of drawers, counter, sand, sink, skyscraper, fireplace, refrigerator, grandstand, path, stairs, runway,
case, pool table, pillow, screen door, stairway, river, bridge, bookcase, blind, coffee table, toilet, flower,
book, hill, bench, countertop, stove, palm, kitchen island, computer, swivel chair, boat, bar, arcade machine,
hovel, bus, towel, light, truck, tower, chandelier, awning, streetlight, booth, television receiver, airplane,
dirt track, apparel, pole, land, bannister, escalator, ottoman, bottle, buffet, poster, stage, van, ship,
fountain, conveyer belt, canopy, washer, plaything, swimming pool, stool, barrel, basket, waterfall, tent, bag,
minibike, cradle, oven, ball, food, step, tank, trade name, microwave, pot, animal, bicycle, lake, dishwasher,
screen, blanket, sculpture, hood, sconce, vase, traffic light, tray, ashcan, fan, pier, crt screen, plate,
monitor, bulletin board, shower, radiator, glass, clock, flag
"""
ADE20K = Labelling(tuple(" ".join(name.split()) for name in ADE20K_CLASSES.split(",")), first=1)
"""The scene parsing benchmark: 150 classes, numbered from 1; 0 is everything else."""

KNOWN = {"camvid": CAMVID, "ade20k": ADE20K, "scene_parse_150": ADE20K, "adechallengedata2016": ADE20K}
"""Labelling by the last part of a folder's or a Hub dataset's name."""
