"""Images by separate source and channel coding: JPEG, JPEG 2000, WebP and AVIF with 5G LDPC and QAM, over SNR.

For each photograph, bandwidth ratio and SNR the best operating point is searched (quality, modulation and coding
scheme), then the bits are really sent. Beside it: the same codecs in whole files, with an ideal channel code (capacity,
finite length), and the cliff of a link that was set up for one SNR and meets another. Images of 96x96 and of 512x768.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chanlab.cli.common import run_script, script_parser
from chanlab.cli.image_systems import IMAGE_CODECS, add_small, image_batches
from chanlab.errors import UsageError

EXAMPLES = """examples:
  python sims/image_separation.py --images photos --photos 4
  python sims/image_separation.py --images photos --codecs avif --snr 0 10 20 --photos 0
  python sims/image_separation.py --images photos --draw out/image_separation/results.json   (the picture alone)
"""
PHOTO = (512, 768)
SMALL = 96


def parser() -> argparse.ArgumentParser:
    """The script's arguments."""
    p = script_parser(__doc__, EXAMPLES)
    p.add_argument("--images", type=Path, required=True, help="folder of photographs; see `chanlab.jscc.images`")
    p.add_argument("--split", choices=["val", "test"], default="test")
    p.add_argument("--codecs", nargs="+", choices=list(IMAGE_CODECS), help="all that are installed by default")
    p.add_argument("--ratios", nargs="+", default=["1/6", "1/12"], help="bandwidth ratios k/n")
    p.add_argument("--snr", type=float, nargs="+", default=[0, 2.5, 5, 7.5, 10, 12.5, 15, 17.5, 20], help="[dB]")
    p.add_argument("--cliff", type=float, nargs="*", default=[5, 10], help="SNRs a fixed link is set up for [dB]")
    add_small(p)
    p.add_argument("--photos", type=int, default=4, help="photographs of 512x768 at most; 0: none")
    p.add_argument(
        "--send",
        choices=["all", "best", "none"],
        default="best",
        help="which codecs' photographs are really sent; figures of the others are expectations by the table of block "
        "error rates (images of 96x96 are always sent)",
    )
    p.add_argument("--speed", type=int, nargs=2, default=[4, 6], help="speed of AVIF at 96x96 and at 512x768")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--draw", type=Path, nargs="+", help="draw these records, measure nothing")
    p.add_argument("--out", type=Path, default=Path("out/image_separation"), help="folder of results and picture")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write records and a picture."""
    return run_script(run, parser().parse_args(argv), "image_separation")


def run(args: argparse.Namespace) -> None:
    """Both sizes."""
    from chanlab.cli.figures import save
    from chanlab.cli.image_curves import quality_curves, quality_tables, separation_styles
    from chanlab.records import load_records, save_records

    if args.draw is not None:
        records = [r for path in args.draw for r in load_records(path)]
        if not records:
            raise UsageError(f"no records in {', '.join(map(str, args.draw))}.")
    else:
        records = measure(args)
        save_records(args.out / "results.json", records, replace=True)
    print(f"\n{quality_tables(records)}")
    styles = separation_styles(dict.fromkeys(r["system"] for r in records))
    save(quality_curves(records, styles), args.out / "image_separation.png")
    print("written:", *([] if args.draw else [args.out / "results.json"]), args.out / "image_separation.png")


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Records of all systems."""
    from fractions import Fraction

    from chanlab.jscc.separation import available_codecs, find_codec, sweep

    names = args.codecs or available_codecs()
    for name in names:
        find_codec(name)  # what is missing is told before anything is measured
    try:
        ratios = [Fraction(r) for r in args.ratios]
    except ValueError as error:
        raise UsageError(f"--ratios are fractions like 1/6: {error}.") from error
    if args.crops < 1 or args.photos < 0 or (args.small == "none" and not args.photos):
        raise UsageError("--crops is at least 1; --photos is at least 0, or 1 with --small none.")
    records = []
    for photos in (False, True):
        if not args.photos if photos else args.small == "none":
            continue
        records += sweep(
            systems(names, args, photos),
            image_batches(args.images, args.split, *which(args, photos), args.seed),
            ratios,
            args.snr,
            f"{args.images.name}, crops" if not photos and args.small == "crops" else args.images.name,
            args.split,
            args.seed,
            lambda text: print(text, file=sys.stderr, flush=True),
        )
    return records


def which(args: argparse.Namespace, photos: bool) -> tuple[tuple[int, int] | int, int | None, int]:
    """Size, number and batch size of images of 96x96, or of photographs of 512x768, as `image_batches` takes them."""
    if photos:
        return PHOTO, args.photos, 1
    return (SMALL, args.crops, 32) if args.small == "crops" else ((SMALL, SMALL), None, 32)


def systems(names: Sequence[str], args: argparse.Namespace, photos: bool) -> list[Any]:
    """What is compared: each codec over LDPC; the best one also in whole files, on bounds and at the cliff."""
    from chanlab.jscc.separation import Avif, CapacityCode, NormalCode, Separation, System, find_codec

    def codec(name: str, strip: bool = True) -> Any:
        if name == "avif":
            return Avif(strip, args.speed[photos])
        found: Any = find_codec(name)
        found.strip = strip
        return found

    made = {n: codec(n) for n in names}
    best = "avif" if "avif" in names else names[-1]
    sent = [n for n in names if not photos or args.send == "all" or (args.send == "best" and n == best)]
    held = [System(f"{IMAGE_CODECS[n]} + LDPC", Separation(c), n in sent) for n, c in made.items()]
    fixed = held[names.index(best)].separation
    held += [System(f"{IMAGE_CODECS[best]} + LDPC, sent for {snr:g} dB", fixed, not photos, snr) for snr in args.cliff]
    held.append(System(f"{IMAGE_CODECS[best]} files + LDPC", Separation(codec(best, strip=False)), not photos))
    held.append(System(f"{IMAGE_CODECS[best]} + finite-length bound", fixed.with_code(NormalCode())))
    held.append(System(f"{IMAGE_CODECS[best]} + capacity", fixed.with_code(CapacityCode())))
    return held


if __name__ == "__main__":
    sys.exit(main())
