"""How fast training crops come out of a folder of photographs, against decoding a photograph for each crop.

    python benchmarks/images.py data/photos

`ImageDataModule` decodes once and cuts crops where the learner computes; the peer is what loaders of image folders do:
a worker opens a photograph, decodes it, cuts one crop and hands it over. Both give float32 batches of as many crops,
from the same photographs in the same shares; they take turns, and the median over the rounds counts. Records go to
datasets/results.json; `make cards` renews the card.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from chanlab.jscc import ImageDataModule
from chanlab.jscc.image_files import ImageCollection
from chanlab.records import record, save_records

ROOT = Path(__file__).resolve().parents[1]


class DecodeEach(Dataset[Tensor]):
    """A random crop per item, from a photograph decoded for it.

    Args:
        collection: The photographs.
        picture: Index of each item's photograph.
        crop: Side of the crops.
    """

    def __init__(self, collection: ImageCollection, picture: list[int], crop: int) -> None:
        self.collection = collection
        self.picture = picture
        self.crop = crop

    def __len__(self) -> int:
        return len(self.picture)

    def __getitem__(self, index: int) -> Tensor:
        """Float32 `[3, crop, crop]` in [0, 1]."""
        photograph = self.collection.read(self.picture[index])
        top, left = (int(torch.randint(side - self.crop + 1, ())) for side in photograph.shape[:2])
        cut = torch.from_numpy(photograph[top : top + self.crop, left : left + self.crop].copy())
        return cut.permute(2, 0, 1).float().div_(255)


def decoded_each(data: ImageDataModule, crop: int, workers: int, device: str) -> Iterator[Tensor]:
    """Batches of the peer on a device."""
    collection = data.collection("train")
    indices = collection.indices("train")
    picture = data.crops("train").picture[torch.randperm(len(data.crops("train")))].tolist()
    items = DecodeEach(collection, [indices[i] for i in picture], crop)
    loader = DataLoader(items, data.batch_size, num_workers=workers, pin_memory=device != "cpu")
    for batch in loader:
        yield batch.to(device, non_blocking=True)


def speed(batches: Iterator[Tensor], seconds: float, device: str) -> float:
    """Crops per second, from the second batch on."""
    next(batches)
    count, start = 0, time.perf_counter()
    for batch in batches:
        count += len(batch)
        if time.perf_counter() - start > seconds:
            break
    if device != "cpu":
        torch.cuda.synchronize()
    return count / (time.perf_counter() - start)


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description="Training crops per second.")
    parser.add_argument("images", type=Path, help="folder of photographs")
    parser.add_argument("--crop", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2, help="processes of the peer")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    data = ImageDataModule(args.images, batch_size=args.batch_size, crop=args.crop, crops_per_epoch=2**20)
    start = time.perf_counter()
    data.crops("train")
    decoding = time.perf_counter() - start
    found: dict[str, list[float]] = {"chanlab": [], "decoding each": []}
    for _ in range(args.rounds):
        ours = (batch["image"] for batch in data.batches("train", args.device))
        found["chanlab"].append(speed(ours, args.seconds, args.device))
        theirs = decoded_each(data, args.crop, args.workers, args.device)
        found["decoding each"].append(speed(theirs, args.seconds, args.device))
    condition = {"crop": args.crop, "batch_size": args.batch_size, "device": args.device}
    records = [
        record(
            system=name,
            data="photos",
            split="train",
            condition=condition,
            metric="crops_per_second",
            value=statistics.median(values),
            n=args.rounds,
            unit="1/s",
        )
        for name, values in found.items()
    ]
    save_records(ROOT / "datasets" / "results.json", records)
    for item in records:
        print(f"{item['system']:14} {item['value']:10.0f} crops/s on {args.device}")
    print(f"decoding once: {decoding:.1f} s")


if __name__ == "__main__":
    main()
