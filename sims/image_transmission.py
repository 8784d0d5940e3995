"""Photographs sent through a channel by trained DeepJSCC codecs: quality over SNR, and what was received.

Crops and photographs apart, at each bandwidth ratio and SNR, pilots and side information counted. With --csi receivers
that estimate the channel are compared with one that knows it; separation stands beside, measured here (--separation) or
by sims/image_separation.py (--beside). What an image meets depends on (seed, image id) alone. Interrupted, the same
command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chanlab.cli.common import run_script, script_parser
from chanlab.cli.image_systems import CSI, IMAGE_CODECS
from chanlab.errors import UsageError

EXAMPLES = """examples:
  python sims/image_transmission.py --images photos --codec ours=out/jscc/ours/best.ckpt
  python sims/image_transmission.py --images photos --codec ours=ours:ours.safetensors adjscc=out/jscc/adjscc/best.ckpt \\
      --beside out/image_separation/results.json
  python sims/image_transmission.py --images photos --codec ours=out/jscc/ours/best.ckpt \\
      --channel ofdm:cdl-c,speed=10 --csi perfect lmmse ls --snr 5 10 15 20
  python sims/image_transmission.py --images photos --codec ours=out/jscc/ours/best.ckpt --photos 0 \\
      --channel slow-rayleigh --csi perfect lmmse none --separation avif

channels: awgn, slow-rayleigh, fast-rayleigh, block-rayleigh, rician, mimo, ofdm:cdl-a to ofdm:cdl-e, ofdm:STORE (a folder
that `chanlab generate` wrote), ofdm:RECIPE (a dataset recipe whose source has paths), or a YAML file with class_path and
init_args. Arguments of the classes in chanlab.jscc (and of chanlab.channels.CDL) follow the name: rician,k_factor_db=3
  block-rayleigh,coherence=16,pilots=2   mimo,num_tx=4,num_rx=4,detection=svd   ofdm:data/street,num_subcarriers=256
"""
PHOTO = (512, 768)
CROP = 96
COLORS = ("#D62728", "#7B3FA0", "#1A1A1A", "#8C564B", "#2CA02C", "#E377C2")
DASHES = {"perfect": "-", "lmmse": "--", "ls": ":", "phase": (0, (5, 1, 1, 1)), "none": "-."}


def parser() -> argparse.ArgumentParser:
    """The script's arguments."""
    p = script_parser(__doc__, EXAMPLES)
    p.add_argument("--images", type=Path, help="folder of photographs; see `chanlab.jscc.ImageDataModule`")
    p.add_argument("--split", choices=["val", "test"], default="test", help="which of them are sent (default: test)")
    p.add_argument(
        "--codec",
        nargs="+",
        default=[],
        metavar="NAME=CODEC",
        help="a checkpoint of `chanlab fit` (FILE.ckpt), or RECIPE[,argument=value...][:FILE.safetensors], by default "
        "with the weights that the recipe names",
    )
    p.add_argument("--channel", default="awgn", help="see below (default: awgn)")
    p.add_argument(
        "--csi", nargs="+", choices=CSI, default=[], help="what receivers know, compared (default: as --channel says)"
    )
    p.add_argument(
        "--ratios",
        nargs="+",
        default=["1/6"],
        help="bandwidth ratios k/n, pilots included; `own`: the codec's highest, pilots on top (default: 1/6)",
    )
    p.add_argument("--snr", type=float, nargs="+", default=[0, 2.5, 5, 7.5, 10, 12.5, 15, 17.5, 20], help="[dB]")
    p.add_argument("--crops", type=int, default=2, help="crops of 96x96 from each photograph; 0: none (default: 2)")
    p.add_argument("--photos", type=int, default=4, help="photographs of 512x768 at most; 0: none (default: 4)")
    p.add_argument(
        "--separation",
        nargs="+",
        choices=list(IMAGE_CODECS),
        default=[],
        help="image codecs that are sent through the same channel with LDPC and QAM; crops take seconds an image, "
        "photographs minutes",
    )
    p.add_argument("--beside", type=Path, nargs="+", default=[], help="records drawn beside, of separation for example")
    p.add_argument("--show", type=int, nargs="*", default=[0], help="numbers of images shown as received (default: 0)")
    p.add_argument("--show-snr", type=float, nargs="+", help="at these SNRs [dB] (default: five of --snr)")
    p.add_argument("--batch", type=int, default=16, help="crops sent at once; photographs go one by one (default: 16)")
    p.add_argument("--device", default="cpu")
    p.add_argument("--seed", type=int, default=1, help="of crops, noise and fading (default: 1)")
    p.add_argument("--out", type=Path, default=Path("out/image_transmission"), help="folder of results and pictures")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables, write records and pictures."""
    return run_script(run, parser().parse_args(argv), "image_transmission")


@dataclass(frozen=True)
class Sent:
    """A system that sends images of one size.

    Attributes:
        label: Of its records.
        csi: What the receiver knows; empty if the channel has no such choice.
        size: Index of the images.
        ratios: Bandwidth ratios that it keeps to; None: its own.
        inputs: Checksum of what its figures come from.
        measure: Records at a ratio and SNR.
        receive: An image, its id, ratio and SNR to the received one, PSNR, MS-SSIM, and whether it was lost.
    """

    label: str
    csi: str
    size: int
    ratios: tuple[Any, ...]
    inputs: str
    measure: Callable[[Any, float], list[dict[str, Any]]]
    receive: Callable[[Any, Any, Any, float], tuple[Any, float, float, bool]]


def run(args: argparse.Namespace) -> None:
    """Everything."""
    from chanlab.cli.figures import save
    from chanlab.cli.image_curves import quality_curves, quality_tables
    from chanlab.records import save_records

    check(args)
    path = args.out / "results.json"
    sizes = images(args) if args.codec or args.separation else []
    systems = [*codecs(args, sizes), *separations(args, sizes)]
    records = measure(systems, path, args)
    records += losses(records)
    if systems:
        save_records(path, records)
    shown = [named(r, records) for r in records] + beside(args, records)
    print(f"\n{quality_tables(shown)}")
    if systems:
        print(f"\n{uses_table(shown)}")
    if any(r["metric"] == "psnr_loss" for r in records):
        print(f"\n{loss_table(records)}")
    written = [path] if systems else []
    written.append(save(quality_curves(shown, styles(shown, records)), args.out / "image_transmission.png"))
    if any(r["metric"] == "psnr_loss" for r in records):
        written.append(save(loss_curves(records, args), args.out / "csi_loss.png"))
    written += [save(figure, args.out / name) for name, figure in pictures(systems, sizes, args)]
    print("written:", *written)


def check(args: argparse.Namespace) -> None:
    """Refuse what can't be asked, before anything is loaded."""
    from chanlab.jscc.codec import as_ratio

    if not (args.codec or args.separation or args.beside):
        raise UsageError("nothing to send or to draw: give --codec, --separation or --beside.")
    if (args.codec or args.separation) and args.images is None:
        raise UsageError("--images: which photographs are to be sent?")
    if args.crops < 0 or args.photos < 0 or not args.crops + args.photos or args.batch < 1:
        raise UsageError("--crops and --photos can't be negative, and not both 0; --batch is at least 1.")
    args.ratios = [None if r == "own" else as_ratio(r) for r in args.ratios]
    if args.separation and None in args.ratios:
        raise UsageError("--separation has no bandwidth ratio of its own: give --ratios such as 1/6.")
    names = [item.partition("=")[0] for item in args.codec]
    if len(set(names)) < len(names) or not all(item.partition("=")[2] for item in args.codec):
        raise UsageError(f"--codec takes NAME=CODEC with a name for each, not {' '.join(args.codec)}.")


def images(args: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """Batches of crops, and of photographs cut to 512x768."""
    from chanlab.cli.image_systems import image_batches

    found = []
    if args.crops:
        found.append(image_batches(args.images, args.split, CROP, args.crops, args.batch, args.seed))
    if args.photos:
        found.append(image_batches(args.images, args.split, PHOTO, args.photos, 1, args.seed))
    return found


def codecs(args: argparse.Namespace, sizes: Sequence[Any]) -> Iterator[Sent]:
    """Each trained codec with each receiver."""
    from chanlab.cli.image_systems import channel_name, make_codec, make_receivers
    from chanlab.jscc.evaluation import Link, digest, measured_records, size_of, stated_ratio

    receivers = make_receivers(args.channel, args.csi, args.seed) if args.codec else {}
    for item in args.codec:
        name, _, spec = item.partition("=")
        codec = make_codec(spec, args.device)
        parameters = sum(p.numel() for p in codec.parameters())
        for csi, channel in receivers.items():
            link = Link(codec, channel, args.seed, args.device)
            fitting = False
            for number, batches in enumerate(sizes):
                shape = tuple(batches[0]["image"].shape[1:])
                ratios = tuple(r for r in args.ratios if link.fits(shape, r))
                fitting |= bool(ratios)
                inputs = digest(codec, *(b["image"] for b in batches), args.channel, csi, str(args.seed))

                def at(
                    ratio: Any,
                    snr: float,
                    link: Link = link,
                    batches: Any = batches,
                    name: str = name,
                    csi: str = csi,
                    parameters: int = parameters,
                ) -> list[dict[str, Any]]:
                    shape = tuple(batches[0]["image"].shape[1:])
                    got = link.measure(batches, snr, ratio)
                    condition = {
                        "snr_db": float(snr),
                        "ratio": stated_ratio(got, shape) if ratio is None else str(ratio),
                        "size": size_of(shape),
                        "channel": channel_name(args.channel),
                        **({"csi": csi} if csi else {}),
                        **({"asked_ratio": "own"} if ratio is None else {}),
                    }
                    return measured_records(
                        got,
                        name,
                        condition,
                        data=args.images.name,
                        split=args.split,
                        seeds=[args.seed],
                        parameters=parameters,
                    )

                def one(
                    image: Any, sample: Any, ratio: Any, snr: float, link: Link = link
                ) -> tuple[Any, float, float, bool]:
                    received, got = link.send(image[None], sample[None], snr, ratio)
                    return received[0], float(got.psnr), float(got.ms_ssim), False

                if ratios:
                    yield Sent(name, csi, number, ratios, inputs, at, one)
            if not fitting:
                raise UsageError(misfit(name, codec, channel, args))


def misfit(name: str, codec: Any, channel: Any, args: argparse.Namespace) -> str:
    """Why a codec can keep to none of the ratios."""
    asked = " or ".join(map(str, args.ratios))
    text = f"{name} was built for k/n {codec.max_ratio}, and can't keep to {asked} over {args.channel}"
    if channel.uses(1000) != 1000:
        text += ", where pilots and streams change how many symbols that is"
    return f"{text}: take other --ratios, or `--ratios own`, with pilots on top."


def separations(args: argparse.Namespace, sizes: Sequence[Any]) -> Iterator[Sent]:
    """Separate source and channel coding over the same channel."""
    from chanlab.cli.image_systems import channel_name, make_receivers
    from chanlab.jscc.evaluation import digest, most_scales
    from chanlab.jscc.separation import Avif, Separation, System, find_codec, sweep
    from chanlab.metrics import ms_ssim

    receivers = make_receivers(args.channel, args.csi, args.seed) if args.separation else {}
    for codec in args.separation:
        find_codec(codec)  # what is missing is told before anything is measured
    for codec in args.separation:
        for csi, channel in receivers.items():
            if csi in ("phase", "none"):
                continue  # nothing that a demapper could work with
            for number, batches in enumerate(sizes):
                speed = 4 if min(batches[0]["image"].shape[2:]) <= CROP else 6
                made = Avif(True, speed) if codec == "avif" else codec
                separation = Separation(made, channel=channel, device=args.device)
                name = f"{IMAGE_CODECS[codec]} + LDPC"
                inputs = digest(*(b["image"] for b in batches), codec, args.channel, csi, str(args.seed))

                def at(
                    ratio: Any,
                    snr: float,
                    separation: Any = separation,
                    batches: Any = batches,
                    name: str = name,
                    csi: str = csi,
                ) -> list[dict[str, Any]]:
                    system = System(name, separation)
                    made = sweep([system], batches, [ratio], [snr], args.images.name, args.split, args.seed)
                    extra = {"channel": channel_name(args.channel), **({"csi": csi} if csi else {})}
                    return [r | {"condition": r["condition"] | extra} for r in made]

                def one(
                    image: Any, sample: Any, ratio: Any, snr: float, separation: Any = separation
                ) -> tuple[Any, float, float, bool]:
                    out = separation(image[None], ratio, snr, ids=[int(sample)], seed=args.seed)
                    similar = ms_ssim(out.images.double(), image[None].double(), most_scales(image))
                    return out.images[0], float(out.psnr_db), float(similar), bool(out.outage[0])

                yield Sent(name, csi, number, tuple(args.ratios), inputs, at, one)


def measure(systems: Sequence[Sent], path: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Records of all systems, written point by point; those that are there already are kept."""
    from chanlab.records import load_records, save_records
    from tqdm import tqdm

    known: dict[str, list[dict[str, Any]]] = {}
    for r in load_records(path):
        known.setdefault(r.get("inputs", ""), []).append(r)
    points = [(s, ratio, snr) for s in systems for ratio in s.ratios for snr in args.snr]
    records = []
    with tqdm(points, unit="point", disable=not points) as bar:
        for system, ratio, snr in bar:
            bar.set_description(f"{system.label} {system.csi}".strip())
            inputs = f"{system.inputs} {ratio or 'own'} {float(snr):g}"
            if inputs not in known:
                known[inputs] = [r | {"inputs": inputs} for r in system.measure(ratio, snr)]
                save_records(path, known[inputs])
            records += [r | {"system": system.label} for r in known[inputs]]
    return records


def losses(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What estimated channels cost each system against known ones: PSNR at an SNR, and SNR at a PSNR."""
    from chanlab.jscc.evaluation import loss
    from chanlab.records import record

    curves: dict[tuple[Any, ...], dict[float, Mapping[str, Any]]] = {}
    for r in records:
        if r["metric"] == "psnr" and "csi" in r["condition"]:
            kept = tuple((k, v) for k, v in r["condition"].items() if k not in ("csi", "snr_db"))
            curves.setdefault((r["system"], kept, r["condition"]["csi"]), {})[r["condition"]["snr_db"]] = r
    made = []
    for (system, kept, csi), points in curves.items():
        reference = curves.get((system, kept, "perfect"))
        if csi == "perfect" or reference is None:
            continue
        values = ({snr: r["value"] for snr, r in c.items()} for c in (points, reference))
        for snr, lost in loss(*values).items():
            r = points[snr]
            shared = {k: r[k] for k in ("system", "data", "split", "condition", "n", "seeds")}
            made.append(record(**shared, metric="psnr_loss", value=lost.psnr_db, unit="dB"))
            if lost.snr_db is not None:
                made.append(record(**shared, metric="snr_loss", value=lost.snr_db, unit="dB"))
    return made


def named(r: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A record whose system tells the receiver, where there are several."""
    several = len({x["condition"].get("csi") for x in records}) > 1
    csi = r["condition"].get("csi")
    return {**r, "system": f"{r['system']}, {csi} CSI" if several and csi else r["system"]}


def beside(args: argparse.Namespace, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Others' records of the same sizes and ratios; what differs in channel or images is told by their names."""
    from chanlab.cli.image_curves import LABELS, panels
    from chanlab.cli.image_systems import channel_name
    from chanlab.records import load_records

    found = []
    for path in args.beside:
        if not path.is_file():
            raise UsageError(f"--beside: there is no file {path}.")
        found += [
            r
            for r in load_records(path)
            if r["metric"] in LABELS and {"size", "ratio", "snr_db"} <= set(r["condition"])
        ]
    wanted, mine = panels(records), {(r["condition"]["size"], r["data"], r["split"], r["n"]) for r in records}
    if records:
        found = [r for r in found if (r["condition"]["size"], r["condition"]["ratio"]) in wanted]
    if not found and args.beside:
        raise UsageError(f"--beside: no record of {', '.join(map(str, args.beside))} has a size and ratio of these.")
    channel, made = channel_name(args.channel), []
    for r in found:
        other = r["condition"].get("channel", "awgn")
        notes = [other] if other != channel else []
        if records and (r["condition"]["size"], r["data"], r["split"], r["n"]) not in mine:
            notes.append(f"{r['n']} images of {r['data']}, {r['split']}")
        made.append({**r, "system": f"{r['system']} ({'; '.join(notes)})" if notes else r["system"]})
    for name in dict.fromkeys(r["system"] for r in made if r["system"].endswith(")")):
        print(f"image_transmission: measured otherwise: {name}", file=sys.stderr)
    return made


def styles(shown: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Codecs in strong colours, receivers by their dashes, separation as in sims/image_separation.py."""
    from chanlab.cli.image_curves import separation_styles

    held: dict[str, dict[str, Any]] = {}
    trained = list(dict.fromkeys(r["system"] for r in records if "parameters" in r))
    for r, name in ((r, named(r, records)["system"]) for r in records if "parameters" in r):
        color = COLORS[trained.index(r["system"]) % len(COLORS)]
        dash = DASHES.get(r["condition"].get("csi", "perfect"), "-") if name != r["system"] else "-"
        held[name] = {"color": color, "linestyle": dash, "marker": "s", "markersize": 3.5, "linewidth": 2.2}
    others = [n for n in dict.fromkeys(r["system"] for r in shown) if n not in held]
    plain = separation_styles(n.split(" (")[0].split(", ")[0] if "sent for" not in n else n for n in others)
    for name in others:
        style = plain.get(name) or plain[name.split(" (")[0].split(", ")[0]]
        known = next((d for csi, d in DASHES.items() if f", {csi} CSI" in name), None)
        held[name] = {**style, "linestyle": known} if known else style
    return held


def uses_table(shown: Sequence[Mapping[str, Any]]) -> str:
    """Channel uses of an image: all, pilots and side information; a range where they vary with the SNR."""
    from chanlab.cli.common import table
    from chanlab.cli.image_curves import lines, panels

    rows = []
    for size, ratio in panels(shown):
        values = {m: lines(shown, m, {"size": size, "ratio": ratio}) for m in ("uses", "pilot_uses", "side_uses")}
        n = 3 * int(size.split("x")[0]) * int(size.split("x")[1])
        for system, points in values["uses"].items():
            cells = []
            for metric in ("uses", "pilot_uses", "side_uses"):
                found = sorted({round(v) for _, v in values[metric].get(system, [])})
                cells.append("" if not found else "-".join(map(str, dict.fromkeys((found[0], found[-1])))))
            cells.append(f"{max(v for _, v in points) / n:.4f}")
            rows.append([f"{size}, {ratio}", system, *cells])
    return table(["channel uses of an image", "system", "all", "pilots", "side information", "k/n"], rows)


def loss_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Loss of PSNR, and of SNR in brackets, against perfect CSI."""
    from chanlab.cli.common import table
    from chanlab.records import select

    snrs = sorted({r["condition"]["snr_db"] for r in select(records, metric="psnr_loss")})
    rows: dict[tuple[str, ...], dict[tuple[str, float], float]] = {}
    for r in records:
        if r["metric"] in ("psnr_loss", "snr_loss"):
            held = r["condition"]
            key = (f"{held['size']}, {held['ratio']}", r["system"], held["csi"])
            rows.setdefault(key, {})[r["metric"], held["snr_db"]] = r["value"]
    body = []
    for key, values in rows.items():
        cells = []
        for snr in snrs:
            lost, equal = values.get(("psnr_loss", snr)), values.get(("snr_loss", snr))
            text = "" if lost is None else f"{lost:.2f}"
            cells.append(text + (f" [{equal:.2f}]" if equal is not None else ""))
        body.append([*key, *cells])
    head = ["PSNR lost against perfect CSI [dB] (SNR lost)", "system", "csi", *(f"{s:g} dB" for s in snrs)]
    return table(head, body)


def loss_curves(records: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> Any:
    """Loss of PSNR over SNR, a panel for each size and ratio."""
    from chanlab.cli.figures import new_figure, tidy
    from chanlab.cli.image_curves import lines, panels

    lost = [named(r, records) for r in records if r["metric"] == "psnr_loss"]
    held, columns = styles([], records), panels(lost)
    figure = new_figure(max(5.5, 4.2 * len(columns) + 0.5), 4)
    for axes, (size, ratio) in zip(
        figure.subplots(1, len(columns), squeeze=False, sharey=True)[0], columns, strict=True
    ):
        for system, points in lines(lost, "psnr_loss", {"size": size, "ratio": ratio}).items():
            axes.plot(
                *zip(*points, strict=True), **{"label": system, "markersize": 4, "marker": "o", **held.get(system, {})}
            )
        axes.axhline(0, color="#24292F", linewidth=0.8)
        tidy(axes, f"{size}, k/n = {ratio}", "SNR [dB]", "PSNR lost against perfect CSI [dB]")
    figure.suptitle(args.channel, fontsize=9, x=0.01, ha="left")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def pictures(systems: Sequence[Sent], sizes: Sequence[Any], args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Received images of each size: (file, figure)."""
    from chanlab.cli.received_images import Shown, received_picture
    from chanlab.jscc.evaluation import size_of

    asked = sorted(set(args.snr))
    steps = min(5, len(asked)) - 1
    snrs = args.show_snr or sorted({asked[round(i * (len(asked) - 1) / max(steps, 1))] for i in range(steps + 1)})
    several = len({s.csi for s in systems}) > 1
    for number, batches in enumerate(sizes):
        mine = [s for s in systems if s.size == number]
        flat = [(b["image"][i], b["id"][i], b["name"][i]) for b in batches for i in range(len(b["id"]))]
        for which in args.show if mine else []:
            if not 0 <= which < len(flat):
                raise UsageError(
                    f"--show {which}: there are images 0 to {len(flat) - 1} of {size_of(flat[0][0].shape)}."
                )
            image, sample, name = flat[which]
            rows = {}
            for system in mine:
                got = [system.receive(image, sample, system.ratios[0], snr) for snr in snrs]
                label = f"{system.label},\n{system.csi} CSI" if several and system.csi else system.label
                ratio = system.ratios[0]
                if len({s.ratios[0] for s in mine}) > 1:
                    label += f"\nk/n = {ratio}"
                rows[label] = [
                    Shown(x, "lost" if lost else f"{psnr:.1f} dB, {similar:.3f}") for x, psnr, similar, lost in got
                ]
            first = mine[0].ratios[0]
            at = "" if first is None or len({s.ratios[0] for s in mine}) > 1 else f", k/n = {first}"
            size = size_of(image.shape)
            title = f"{name}, {size}, {args.channel}{at}: PSNR and MS-SSIM of the whole image"
            figure = received_picture(image, rows, [f"{snr:g} dB" for snr in snrs], title)
            yield f"received_{size}_{which}.png", figure


if __name__ == "__main__":
    sys.exit(main())
