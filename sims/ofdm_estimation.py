"""What a receiver's channel estimate costs an image on an OFDM link: effective SNR against perfect knowledge.

An image's symbols cross channels of 3GPP models, of closed forms or of stores; pilots fill every fourth OFDM symbol and
are counted. The effective SNR is that of the AWGN channel on which linear MMSE makes the same mean square error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chanlab.cli.common import run_script, script_parser
from chanlab.errors import UsageError

EXAMPLES = """examples:
  python sims/ofdm_estimation.py                                    (a minute on a CPU)
  python sims/ofdm_estimation.py --stores data/street_canyon --split test --spacing 240e3
"""
ESTIMATES = {"lmmse": "LMMSE, statistics from the pilots", "ls": "LS, linear in time"}


def parser() -> argparse.ArgumentParser:
    """The script's arguments."""
    p = script_parser(__doc__, EXAMPLES)
    p.add_argument("--stores", type=Path, nargs="*", default=[], help="stores whose channels are taken too")
    p.add_argument("--split", default="test", help="split of the stores")
    p.add_argument("--snr-db", type=float, nargs="+", default=[5.0, 10.0, 15.0, 20.0])
    p.add_argument("--samples", type=int, default=128, help="channels of each kind")
    p.add_argument("--symbols", type=int, default=4608, help="of an image: 96 x 96 pixels at k/n = 1/6 by default")
    p.add_argument("--subcarriers", type=int, default=64)
    p.add_argument("--spacing", type=float, default=30e3, help="of subcarriers [Hz]")
    p.add_argument("--pilot-period", type=int, default=4, help="OFDM symbols, one of them pilots")
    p.add_argument("--device", default="cpu")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--out", type=Path, default=Path("out/ofdm_estimation"), help="folder of results and picture")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, print a table, write records and a picture."""
    return run_script(run, parser().parse_args(argv), "ofdm_estimation")


def run(args: argparse.Namespace) -> None:
    """All channels, SNRs and receivers."""
    from chanlab.cli.common import table
    from chanlab.cli.figures import save
    from chanlab.records import save_records

    if args.samples < 1 or args.symbols < 1:
        raise UsageError("--samples and --symbols must be at least 1.")
    records = evaluate(args)
    rows = [
        [
            f"{r['data']}, {r['condition']['snr_db']:g} dB",
            r["system"],
            f"{r['effective_snr_db']:.2f}",
            f"{r['value']:.2f}",
            f"{r['percentile_90']:.2f}",
        ]
        for r in records
    ]
    print(table(["channel", "estimate", "effective SNR [dB]", "loss [dB]", "90th percentile"], rows))
    uses = records[0]["uses"]
    print(f"Channel uses with any receiver: {uses} for {args.symbols} symbols, {uses - args.symbols} of them pilots.")
    args.out.mkdir(parents=True, exist_ok=True)
    written = [args.out / "results.json", args.out / "ofdm_estimation.png"]
    save_records(written[0], records, replace=True)
    save(picture(records, args), written[1])
    print("written:", *written)


def channels(args: argparse.Namespace) -> dict[str, Any]:
    """Channels by name."""
    from chanlab.channels import CDL, PlanarArray
    from chanlab.jscc import ModelRealisations, SourceRealisations, StoreRealisations

    block = 64
    samples = -(-args.samples // block) * block

    def cdl(profile: Any, spread: float, speed: tuple[float, float]) -> ModelRealisations:
        model = CDL(profile, spread, speed, 3.5e9, PlanarArray(), PlanarArray(), block=block)
        return ModelRealisations(model, samples, args.seed)

    found: dict[str, Any] = {
        "CDL-D 100 ns, 0-15 m/s": cdl("D", 100e-9, (0.0, 15.0)),
        "CDL-C 300 ns, 0-30 m/s": cdl("C", 300e-9, (0.0, 30.0)),
        "CDL-C 1 µs, 30 m/s": cdl("C", 1e-6, (30.0, 30.0)),
        "two rays": SourceRealisations("two_ray", samples, args.seed),
    }
    for path in args.stores:
        stored = StoreRealisations(path, args.split, seed=args.seed)
        found[f"{stored.store.recipe.name}, split {args.split}"] = stored
    return found


def evaluate(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Effective SNR of each estimate, and what it loses."""
    import torch
    from tqdm import tqdm

    from chanlab.data import counter
    from chanlab.jscc import OFDMLink, normalise_power
    from chanlab.records import record

    keys = counter.keys(torch.arange(args.samples), args.seed).to(args.device)
    symbols = normalise_power(counter.complex_normal(counter.keys(keys, "symbols"), (args.symbols,)))
    records = []
    for name, realisations in tqdm(channels(args).items(), unit="channel"):
        for snr_db in args.snr_db:
            effective = {}
            for csi in ("perfect", *ESTIMATES):
                link = OFDMLink(realisations, args.subcarriers, args.spacing, args.pilot_period, csi)  # type: ignore[arg-type]
                with torch.inference_mode():
                    error = (link.eval()(symbols, snr_db, keys).symbols - symbols).abs().square().mean(1)
                effective[csi] = 10 * torch.log10(1 / error.clamp(max=0.999) - 1)
            for csi, system in ESTIMATES.items():
                loss = effective["perfect"] - effective[csi]
                records.append(
                    record(
                        system=system,
                        data=name,
                        condition={"snr_db": snr_db, "spacing": args.spacing, "pilot_period": args.pilot_period},
                        metric="effective_snr_loss",
                        value=float(loss.mean()),
                        deviation=float(loss.std()),
                        unit="dB",
                        n=args.samples,
                        seeds=[args.seed],
                        percentile_90=float(loss.quantile(0.9)),
                        effective_snr_db=float(effective[csi].mean()),
                        uses=link.uses(args.symbols),
                    )
                )
    return records


def picture(records: Sequence[dict[str, Any]], args: argparse.Namespace) -> Any:
    """Loss over SNR, a panel for each estimate: the mean, and up to the 90th percentile of channels."""
    from chanlab.cli.figures import new_figure, tidy

    figure = new_figure(9, 3.6)
    names = list(dict.fromkeys(r["data"] for r in records))
    highest = 1.1 * max(1.5, *(r["percentile_90"] for r in records))
    for axes, system in zip(figure.subplots(1, 2, sharey=True), ESTIMATES.values(), strict=True):
        for name in names:
            mine = [r for r in records if r["data"] == name and r["system"] == system]
            snr = [r["condition"]["snr_db"] for r in mine]
            axes.plot(snr, [r["value"] for r in mine], marker="o", markersize=4, linewidth=1.4, label=name)
            axes.fill_between(snr, [r["value"] for r in mine], [r["percentile_90"] for r in mine], alpha=0.12)
        axes.axhline(1.5, color="#24292F", linewidth=0.9, linestyle="--")
        axes.annotate("1.5 dB", (args.snr_db[0], 1.5), xytext=(2, 3), textcoords="offset points", fontsize=8)
        tidy(axes, system, "SNR at the receive port [dB]", "loss of effective SNR [dB]")
        axes.set_ylim(0, highest)
    figure.legend(*axes.get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside lower center", ncols=3)
    return figure


if __name__ == "__main__":
    sys.exit(main())
