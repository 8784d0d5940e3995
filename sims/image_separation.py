"""Images by separate source and channel coding: JPEG, JPEG 2000, WebP and AVIF with 5G LDPC and QAM, over SNR.

For each photograph, bandwidth ratio and SNR the best operating point is searched (quality, modulation and coding
scheme), then the bits are really sent. Beside it: the same codecs in whole files, with an ideal channel code (capacity,
finite length), and the cliff of a link that was set up for one SNR and meets another. Crops and photographs apart.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from chanlab.cli.common import run_script, script_parser
from chanlab.errors import UsageError

EXAMPLES = """examples:
  python sims/image_separation.py --images photos --crops 2 --photos 4
  python sims/image_separation.py --images photos --codecs avif --snr 0 10 20 --photos 0
  python sims/image_separation.py --images photos --draw out/image_separation/results.json   (the picture alone)
"""
SHORT = {"jpeg": "JPEG", "jpeg2000": "JPEG 2000", "webp": "WebP", "avif": "AVIF", "bpg": "BPG"}
COLORS = {"JPEG": "#E69F00", "JPEG 2000": "#56B4E9", "WebP": "#009E73", "AVIF": "#0072B2", "BPG": "#CC79A7"}
PHOTO = (512, 768)
CROP = 96


def parser() -> argparse.ArgumentParser:
    """The script's arguments."""
    p = script_parser(__doc__, EXAMPLES)
    p.add_argument("--images", type=Path, required=True, help="folder of photographs; see `chanlab.jscc.images`")
    p.add_argument("--split", choices=["val", "test"], default="test")
    p.add_argument("--codecs", nargs="+", choices=list(SHORT), help="all that are installed by default")
    p.add_argument("--ratios", nargs="+", default=["1/6", "1/12"], help="bandwidth ratios k/n")
    p.add_argument("--snr", type=float, nargs="+", default=[0, 2.5, 5, 7.5, 10, 12.5, 15, 17.5, 20], help="[dB]")
    p.add_argument("--cliff", type=float, nargs="*", default=[5, 10], help="SNRs a fixed link is set up for [dB]")
    p.add_argument("--crops", type=int, default=2, help="crops of 96x96 from each photograph; 0: none")
    p.add_argument("--photos", type=int, default=4, help="photographs of 512x768 at most; 0: none")
    p.add_argument(
        "--send",
        choices=["all", "best", "none"],
        default="best",
        help="which codecs' photographs are really sent; figures of the others are expectations by the table of block "
        "error rates (crops are always sent)",
    )
    p.add_argument("--speed", type=int, nargs=2, default=[4, 6], help="speed of AVIF for crops and for photographs")
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
    from chanlab.records import load_records, save_records

    if args.draw is not None:
        records = [r for path in args.draw for r in load_records(path)]
        if not records:
            raise UsageError(f"no records in {', '.join(map(str, args.draw))}.")
    else:
        records = measure(args)
        save_records(args.out / "results.json", records, replace=True)
    print_tables(records)
    save(picture(records), args.out / "image_separation.png")
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
    if args.crops < 0 or args.photos < 0 or not args.crops + args.photos:
        raise UsageError("--crops and --photos can't be negative, and not both 0.")
    records = []
    for photos in (False, True):
        if not (args.photos if photos else args.crops):
            continue
        records += sweep(
            systems(names, args, photos),
            batches(args, photos),
            ratios,
            args.snr,
            args.images.name,
            args.split,
            args.seed,
            lambda text: print(text, file=sys.stderr, flush=True),
        )
    return records


def batches(args: argparse.Namespace, photos: bool) -> Iterator[dict[str, Any]]:
    """Crops, or photographs cut to 512x768."""
    from chanlab.jscc.images import ImageDataModule

    size: dict[str, Any] = {"eval_size": PHOTO} if photos else {"eval_crop": CROP, "eval_crops": args.crops}
    left = args.photos if photos else sys.maxsize
    for batch in ImageDataModule(images=args.images, eval_batch_size=1 if photos else 32, **size).batches(args.split):
        if left > 0:
            yield {"image": batch["image"][:left], "id": batch["id"][:left]}
        left -= len(batch["image"])


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
    held = [System(f"{SHORT[n]} + LDPC", Separation(c), n in sent) for n, c in made.items()]
    fixed = held[names.index(best)].separation
    held += [System(f"{SHORT[best]} + LDPC, sent for {snr:g} dB", fixed, not photos, snr) for snr in args.cliff]
    held.append(System(f"{SHORT[best]} files + LDPC", Separation(codec(best, strip=False)), not photos))
    held.append(System(f"{SHORT[best]} + finite-length bound", fixed.with_code(NormalCode())))
    held.append(System(f"{SHORT[best]} + capacity", fixed.with_code(CapacityCode())))
    return held


def print_tables(records: Sequence[dict[str, Any]]) -> None:
    """A table for each size and ratio: PSNR, MS-SSIM and lost images over SNR."""
    from chanlab.cli.common import table
    from chanlab.cli.image_curves import lines

    for size, ratio in panels(records):
        of = {"size": size, "ratio": ratio}
        psnr, similar, outage = (lines(records, m, of) for m in ("psnr", "ms_ssim", "outage"))
        snrs = sorted({s for points in psnr.values() for s, _ in points})
        rows = []
        for system, points in psnr.items():
            cells = dict(points)
            other, lost = dict(similar[system]), dict(outage[system])
            text = [
                f"{cells[s]:.1f} {other[s]:.3f}" + (f" ({lost[s]:.0%})" if lost[s] >= 0.005 else "")
                if s in cells
                else ""
                for s in snrs
            ]
            rows.append([system, *text])
        count = next(r["n"] for r in records if of.items() <= r["condition"].items())
        print(f"\n{count} images of {size}, k/n = {ratio}: PSNR [dB], MS-SSIM (images lost)")
        print(table(["SNR [dB]", *(f"{s:g}" for s in snrs)], rows))


def panels(records: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """(size, ratio) of all records, small images and wide bands first."""
    from fractions import Fraction

    found = {(r["condition"]["size"], r["condition"]["ratio"]) for r in records}
    return sorted(found, key=lambda p: (int(p[0].split("x")[0]), -Fraction(p[1])))


def styles(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Line styles: a colour for each codec, bounds thin, the cliff dotted."""
    held: dict[str, dict[str, Any]] = {}
    markers = iter("v^<>" * len(records))
    for name in dict.fromkeys(r["system"] for r in records):
        color = next((c for codec, c in COLORS.items() if name in (f"{codec} + LDPC", f"{codec} files + LDPC")), None)
        if "sent for" in name:
            held[name] = {"color": "#D55E00", "linestyle": ":", "marker": next(markers), "linewidth": 1.2}
        elif "files" in name:
            held[name] = {"color": color, "linestyle": "--", "marker": "x", "linewidth": 1.2}
        elif color is None:
            held[name] = {"color": "#666666", "linestyle": "--" if "capacity" in name else "-.", "linewidth": 1}
        else:
            held[name] = {"color": color, "marker": "o", "linewidth": 1.6}
    return held


def picture(records: Sequence[dict[str, Any]]) -> Any:
    """PSNR above, MS-SSIM below, a column for each size and ratio."""
    from chanlab.cli.figures import new_figure
    from chanlab.cli.image_curves import draw_curves

    columns = panels(records)
    figure = new_figure(4.2 * len(columns) + 0.5, 7.5)
    grid = figure.subplots(2, len(columns), squeeze=False, sharex=True)
    for column, (size, ratio) in enumerate(columns):
        for row, metric in enumerate(("psnr", "ms_ssim")):
            title = f"{size}, k/n = {ratio}" if row == 0 else ""
            of = {"size": size, "ratio": ratio}
            draw_curves(grid[row][column], records, metric, of, styles(records), title)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


if __name__ == "__main__":
    sys.exit(main())
