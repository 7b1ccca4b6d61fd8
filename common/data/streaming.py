"""Streamed training data: a dataset of the Hub (or a folder of parquet files), read during training, never as a whole.

Sharding over processes and workers and shuffling are those of the library ``datasets``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..models.hub import is_hub_id
from .images import decode_image
from .preprocess import Preprocess
from .sources import (
    EVALUATION_SPLITS,
    IMAGE_COLUMNS,
    KNOWN,
    LABEL_COLUMNS,
    find_column,
    from_dataset,
    import_datasets,
    load_hub_split,
    load_split,
    parquet_files,
    read_labels,
    stored_bytes,
)
from .splits import Split, same_classes

__all__ = ["Stream", "endless", "load_stream"]

BUFFER = 10_000  # images among which a stream is shuffled


class Stream(IterableDataset, Split):
    """Images of a streamed dataset, as ``Encoded`` gives them: (image (3, h, w) uint8, label, index).

    A process reads its own shards, shuffled by (seed, epoch) within a buffer; ``count`` is that of the whole data set.
    """

    def __init__(self, dataset: Any, count: int, name: str, skip_broken: bool = False) -> None:
        import datasets

        self.dataset, self.count, self.name, self.skip_broken = dataset, count, name, skip_broken
        have = list(dataset.features)
        self.image, self.label = (find_column(have, wanted, name) for wanted in (IMAGE_COLUMNS, LABEL_COLUMNS))
        self.dataset = dataset.cast_column(self.image, datasets.Image(decode=False))
        feature = dataset.features[self.label]
        if not isinstance(feature, datasets.ClassLabel):
            raise ValueError(f"{name}: a stream must name its classes, but {self.label!r} is {feature}: cast the "
                             "column to ClassLabel, or read the data without --streaming")  # fmt: skip
        self.classes = tuple(feature.names)
        self.rank, self.world, self.epoch = 0, 1, 0
        self.preprocess: Preprocess | None = None

    def __len__(self) -> int:
        return self.count

    def prepared(self, preprocess: Preprocess, seed: int = 0) -> "Stream":
        self.preprocess = preprocess
        self.dataset = self.dataset.shuffle(seed=seed, buffer_size=min(BUFFER, self.count))
        return self

    def shard(self, rank: int, world: int) -> "Stream":
        from datasets.distributed import split_dataset_by_node

        self.rank, self.world = rank, world
        self.dataset = split_dataset_by_node(self.dataset, rank, world)
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, int, int]]:
        assert self.preprocess is not None, "a stream needs prepared(preprocess) before it is read"
        self.dataset.set_epoch(self.epoch)
        worker = torch.utils.data.get_worker_info()
        me, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for position, row in enumerate(self.dataset):
            index = (position * workers + me) * self.world + self.rank  # not the row's own: a stream has no numbers
            try:
                pixels = decode_image(stored_bytes(row[self.image]))
                label = int(read_labels([row[self.label]], self.classes, f"column {self.label!r}")[0])
            except Exception as error:
                if self.skip_broken:
                    continue
                raise ValueError(f"image {index} of the stream {self.name}, or its label, is not readable ({error}): "
                                 "use --skip_broken to go on without it") from None  # fmt: skip
            yield self.preprocess.on_canvas(pixels), label, index

    def peek(self, count: int) -> Iterator[np.ndarray]:
        """None: a stream is not read out of turn."""
        return iter(())

    def head(self, count: int | None) -> "Stream":
        if count is not None:
            self.dataset, self.count = self.dataset.take(count), min(count, self.count)
        return self


def load_stream(name: str, skip_broken: bool = False) -> tuple[Stream, Split]:
    """The training split as a stream and the evaluation split as it is, of a Hub dataset or a parquet folder."""
    datasets = import_datasets(name)
    folder = Path(name)
    if name and folder.is_dir():
        import pyarrow.parquet as pq

        files = parquet_files(folder, "train")
        if not files:
            raise FileNotFoundError(f"{folder} has no train.parquet to stream: leave out --streaming")
        paths = [str(file) for file in files]
        train = datasets.load_dataset("parquet", data_files={"train": paths}, split="train", streaming=True)
        count = sum(pq.read_metadata(file).num_rows for file in files)
        stream = Stream(train, count, name, skip_broken)
        return same_classes(stream, load_split(folder, EVALUATION_SPLITS, skip_broken), name)
    if not is_hub_id(name):  # the Hub would be asked for it, again and again
        raise FileNotFoundError(f"{name!r} is no data to stream: give a folder of parquet files, or a Hub id "
                                "'owner/name', or leave out --streaming")  # fmt: skip
    repository, _, revision = name.partition("@")
    train = datasets.load_dataset(repository, revision=revision or None, split="train", streaming=True)
    known = KNOWN.get(repository, (None,))[0]
    count = known or (train.info.splits["train"].num_examples if train.info.splits else None)
    if not count:
        raise ValueError(f"{name} does not say how many training images it has: read it without --streaming")
    test, evaluation = load_hub_split(name, EVALUATION_SPLITS)
    stream = Stream(train, count, name, skip_broken)
    return same_classes(stream, from_dataset(test, f"{name} ({evaluation})", skip_broken), name)


def endless(loader: DataLoader) -> Iterator[Any]:
    """The batches of a stream, again and again; each worker of each process makes batches of its own."""
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ValueError(f"no worker of a process finds {loader.batch_size} readable images in its part of the "
                             "stream: choose fewer --dataloader_num_workers or a smaller --batch_size, or leave out "
                             "--streaming")  # fmt: skip
