"""Photographs sent through a channel by trained DeepJSCC codecs: quality over SNR, and what was received.

Images of 96x96 and of 512x768, at each bandwidth ratio and SNR, pilots and side information counted. With --csi,
receivers that estimate the channel are compared with one that knows it; separation stands beside, measured here
(--separation) or by sims/image_separation.py (--beside). What an image meets depends on (seed, image id) alone.
Interrupted, the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from chanlab.cli.common import run_script, script_parser
from chanlab.cli.image_systems import CSI, IMAGE_CODECS, add_small
from chanlab.errors import UsageError

EXAMPLES = """examples:
  python sims/image_transmission.py --images photos --codec ours=out/jscc/ours/best.ckpt
  python sims/image_transmission.py --images photos --beside out/image_separation/results.json \\
      --codec ours=ours:ours.safetensors adjscc=out/jscc/adjscc/best.ckpt
  python sims/image_transmission.py --images photos --codec ours=out/jscc/ours/best.ckpt \\
      --channel ofdm:cdl-c,speed=10 --csi perfect lmmse ls --snr 5 10 15 20
  python sims/image_transmission.py --images photos --codec ours=out/jscc/ours/best.ckpt --photos 0 \\
      --channel slow-rayleigh --csi perfect lmmse none --separation avif

channels: awgn, slow-rayleigh, fast-rayleigh, block-rayleigh, rician, mimo, ofdm:cdl-a to ofdm:cdl-e, ofdm:STORE (a
folder that `chanlab generate` wrote), ofdm:RECIPE (a dataset recipe whose source has paths), or a YAML file with
class_path and init_args. Arguments of the classes in chanlab.jscc (and of chanlab.channels.CDL) follow the name:
  rician,k_factor_db=3   block-rayleigh,coherence=16,pilots=2   mimo,num_tx=4,num_rx=4,detection=svd
  ofdm:cdl-d,speed=[0,3],delay_spread=100e-9   ofdm:data/street_canyon,num_subcarriers=256
"""
PHOTO = (512, 768)
SMALL = 96


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
    add_small(p)
    p.add_argument("--photos", type=int, default=4, help="photographs of 512x768 at most; 0: none (default: 4)")
    p.add_argument(
        "--separation",
        nargs="+",
        choices=list(IMAGE_CODECS),
        default=[],
        help="image codecs that are sent through the same channel with LDPC and QAM; 96x96 take seconds an image, "
        "photographs minutes",
    )
    p.add_argument("--beside", type=Path, nargs="+", default=[], help="records drawn beside, of separation for example")
    p.add_argument("--show", type=int, nargs="*", default=[0], help="numbers of images shown as received (default: 0)")
    p.add_argument("--show-snr", type=float, nargs="+", help="at these SNRs [dB] (default: five of --snr)")
    p.add_argument("--batch", type=int, default=16, help="images of 96x96 sent at once, of others one (default: 16)")
    p.add_argument("--device", default="cpu")
    p.add_argument("--seed", type=int, default=1, help="of crops, noise and fading (default: 1)")
    p.add_argument("--out", type=Path, default=Path("out/image_transmission"), help="folder of results and pictures")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables, write records and pictures."""
    return run_script(run, parser().parse_args(argv), "image_transmission")


def run(args: argparse.Namespace) -> None:
    """Everything."""
    from chanlab.cli.figures import save
    from chanlab.cli.image_curves import quality_curves, quality_tables
    from chanlab.cli.image_report import (
        beside,
        loss_curves,
        loss_table,
        transmission_styles,
        uses_table,
        with_receivers,
    )
    from chanlab.cli.image_senders import measure_all
    from chanlab.cli.image_systems import channel_name
    from chanlab.jscc.evaluation import loss_records
    from chanlab.records import save_records

    check(args)
    path = args.out / "results.json"
    made = senders(args)
    records = measure_all(made, args.snr, path)
    losses = loss_records(records)
    everything = with_receivers(records + losses)
    shown, lost = everything[: len(records)], everything[len(records) :]
    shown += beside(args.beside, shown, channel_name(args.channel))
    styles = transmission_styles(shown)
    print(f"\n{quality_tables(shown)}")
    written = [save(quality_curves(shown, styles), args.out / "image_transmission.png")]
    if made:
        written.append(path)
        save_records(path, records + losses)
        print(f"\n{uses_table(shown)}")
    if losses:
        print(f"\n{loss_table(losses)}")
        written.append(save(loss_curves(lost, styles, args.channel), args.out / "csi_loss.png"))
    written += [save(figure, args.out / name) for name, figure in pictures(made, args)]
    print("written:", *written)


def check(args: argparse.Namespace) -> None:
    """Refuse what can't be asked, before anything is loaded."""
    from chanlab.jscc.codec import as_ratio

    if not (args.codec or args.separation or args.beside):
        raise UsageError("nothing to send or to draw: give --codec, --separation or --beside.")
    if (args.codec or args.separation) and args.images is None:
        raise UsageError("--images: which photographs are to be sent?")
    if args.crops < 1 or args.photos < 0 or args.batch < 1 or (args.small == "none" and not args.photos):
        raise UsageError("--crops and --batch are at least 1; --photos is at least 0, or 1 with --small none.")
    args.ratios = [None if r == "own" else as_ratio(r) for r in args.ratios]
    if args.separation and None in args.ratios:
        raise UsageError("--separation has no bandwidth ratio of its own: give --ratios such as 1/6.")
    names = [item.partition("=")[0] for item in args.codec]
    if len(set(names)) < len(names) or not all(all(item.partition("=")) for item in args.codec):
        raise UsageError(f"--codec takes NAME=CODEC with a name for each, not {' '.join(args.codec)}.")


def senders(args: argparse.Namespace) -> list[Any]:
    """Each trained codec, and separation, with each receiver and size of images."""
    from chanlab.cli.image_senders import Images, SeparationSender, codec_senders
    from chanlab.cli.image_systems import image_batches, make_codec, make_receivers
    from chanlab.jscc.separation import find_codec

    if not (args.codec or args.separation):
        return []
    codecs = {name: make_codec(spec, args.device) for name, _, spec in (c.partition("=") for c in args.codec)}
    for codec in args.separation:
        find_codec(codec)  # what is missing is told before anything is measured
    receivers = make_receivers(args.channel, args.csi, args.seed)
    data = args.images.name
    small = {
        "shrunk": [((SMALL, SMALL), None, args.batch, data)],
        "crops": [(SMALL, args.crops, args.batch, f"{data}, crops")],
        "none": [],
    }
    sizes = [*small[args.small], *([(PHOTO, args.photos, 1, data)] if args.photos else [])]
    images = [
        Images(image_batches(args.images, args.split, *size, args.seed), name, args.split) for *size, name in sizes
    ]
    made = codec_senders(codecs, images, args.channel, receivers, args.ratios, args.seed, args.device)
    return made + [
        SeparationSender(codec, i, args.channel, csi, built, args.ratios, args.seed, args.device)
        for codec in args.separation
        for csi, built in receivers.items()
        if csi not in ("phase", "none")  # nothing that a demapper could work with
        for i in images
    ]


def pictures(made: Sequence[Any], args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Received images of each size: (file, figure)."""
    from chanlab.cli.image_report import RECEIVERS
    from chanlab.cli.received_images import Shown, received_picture

    asked = sorted(set(args.snr))
    steps = max(1, min(5, len(asked)) - 1)
    snrs = args.show_snr or sorted({asked[round(i * (len(asked) - 1) / steps)] for i in range(steps + 1)})
    several = len({sender.csi for sender in made}) > 1
    for images in dict.fromkeys(sender.images for sender in made):
        mine = [sender for sender in made if sender.images is images]
        mixed = len({sender.ratios[0] for sender in mine}) > 1
        for which in args.show:
            if not 0 <= which < len(images):
                raise UsageError(f"--show {which}: there are images 0 to {len(images) - 1} of {images.size}.")
            rows = {}
            for sender in mine:
                got = [sender.receive(which, sender.ratios[0], snr) for snr in snrs]
                label = f"{sender.name},\n{RECEIVERS[sender.csi]}" if several and sender.csi else sender.name
                label += f"\nk/n = {sender.ratios[0]}" if mixed and sender.ratios[0] else ""
                rows[label] = [Shown(a.image, "lost" if a.lost else f"{a.psnr:.1f} dB, {a.ms_ssim:.3f}") for a in got]
            image, _, name = images[which]
            at = "" if mixed or mine[0].ratios[0] is None else f", k/n = {mine[0].ratios[0]}"
            title = f"{name}, {images.size}, {args.channel}{at}: PSNR and MS-SSIM of the whole image"
            figure = received_picture(image, rows, [f"{snr:g} dB" for snr in snrs], title)
            yield f"received_{images.size}_{which}.png", figure


if __name__ == "__main__":
    sys.exit(main())
