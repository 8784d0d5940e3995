"""Kill generation a thousand times and count what was lost.

    python benchmarks/faults.py --kills 1000

Every run is a forked process that is killed with SIGKILL: half of them at a random instant, half exactly before a
random step of writing a file (write, sync, rename, sync of the folder; a write is killed half way). After every kill
each complete shard must be readable, and neither be touched nor computed again by the runs that follow. The run that
ends a store must give the content hash of a run that nothing disturbed, and pass `verify`.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "data")]

from killing import complete_shards, computed, run, steps_of  # noqa: E402 - needs the path above
from random_drops import recipe_text  # noqa: E402

from chanlab.data.store import Store  # noqa: E402
from chanlab.records import record, save_records  # noqa: E402

SAMPLES, SHARD_SIZE, DELAY = 18, 6, 0.01


def main() -> int:
    """Kill, check, count, record; returns 1 if anything was lost."""
    parser = argparse.ArgumentParser(description="Kill generation and count what was lost.")
    parser.add_argument("--kills", type=int, default=1000, help="number of kills")
    parser.add_argument("--seed", type=int, default=1, help="seed of when they happen")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results.json", help="where records go")
    parser.add_argument("--folder", type=Path, help="where the stores are made; a temporary folder by default")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chanlab-faults-", dir=args.folder))
    try:
        counts = kill_many(folder, args.kills, random.Random(args.seed))
    finally:
        shutil.rmtree(folder)
    lost = {name: counts[name] for name in ("unreadable", "touched", "recomputed", "different")}
    print(
        f"{counts['kills']} kills, {counts['stores']} stores finished; "
        + ", ".join(f"{n} {k}" for k, n in lost.items())
    )
    records = [
        record(
            system="chanlab",
            data="random_drops",
            condition={"kills": counts["kills"]},
            metric=f"lost_{name}",
            value=value,
            n=counts["kills"],
            seeds=[args.seed],
        )
        for name, value in lost.items()
    ]
    save_records(args.results, records)
    return 1 if any(lost.values()) else 0


def kill_many(folder: Path, kills: int, instants: random.Random) -> Counter[str]:
    """Kill runs of one recipe until there were `kills` of them; every store is run until it is complete."""
    text, _ = new_recipe(folder / "undisturbed")
    started = time.monotonic()
    steps = len(steps_of(text, folder / "undisturbed" / "store"))
    duration = time.monotonic() - started
    want = Store(folder / "undisturbed" / "store").content_hash
    counts: Counter[str] = Counter()
    with tqdm(total=kills, unit=" kills") as bar:
        while counts["kills"] < kills:
            number = counts["stores"]
            text, log = new_recipe(folder / str(number))
            out = folder / str(number) / "store"
            out.mkdir()
            while True:
                killed = counts["kills"] < kills and kill_once(text, out, log, steps, duration, instants, counts)
                if not killed:
                    break
                bar.update()
            if run(text, out) != 0 or Store(out).content_hash != want or not Store(out).verify().ok:
                counts["different"] += 1
            counts["stores"] += 1
            shutil.rmtree(folder / str(number))
    return counts


def kill_once(
    text: str, out: Path, log: Path, steps: int, duration: float, instants: random.Random, counts: Counter[str]
) -> bool:
    """One run that is to be killed; False if it ended before."""
    shards = complete_shards(out)
    samples = computed(log, shards, SHARD_SIZE)
    if instants.random() < 0.5:
        code = run(text, out, kill_before=instants.randrange(steps))
    else:
        code = run(text, out, kill_after=instants.uniform(0.0, duration))
    try:
        now = complete_shards(out)
    except Exception as error:
        tqdm.write(f"unreadable: {error}")
        counts["unreadable"] += 1
        now = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.glob("shard-*.h5")}
    counts["touched"] += sum(now.get(name) != shards[name] for name in shards)
    counts["recomputed"] += len(computed(log, shards, SHARD_SIZE) - samples)
    counts["kills"] += code != 0
    return code != 0


def new_recipe(folder: Path) -> tuple[str, Path]:
    """A recipe whose source notes what it computes, and the folder in which it does."""
    log = folder / "log"
    log.mkdir(parents=True)
    return recipe_text(SAMPLES, SHARD_SIZE, log=str(log), delay=DELAY), log


if __name__ == "__main__":
    raise SystemExit(main())
