"""The class genie on the cells of CSI-4CAST: how far linear prediction gets when a channel's statistics are known.

The genie knows the model, the delay spread, the user's velocity (as a vector) and the SNR, and predicts with the linear
minimum mean square error; `chanlab.csi.class_genie` says how. It is a reference, not a limit: the channels aren't
Gaussian, and the mean of ratios isn't the error that it minimises. Beside it stand two that know the same and use less:
each beam by itself, and each port by itself. They see the samples that predictors are tested on (split `test`).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chanlab.cli.common import run_script, script_parser
from chanlab.errors import UsageError

EXAMPLES = """examples:
  python sims/csi_genie.py --samples 4                              (all 27 cells, some 20 minutes on two cores)
  python sims/csi_genie.py --samples 20 --systems all --device cuda
  python sims/csi_genie.py --protocol csi4cast_sionna2              (Doppler shifts as TR 38.901 has them)
"""
SYSTEMS = {"all": "class genie", "beam": "class genie, each beam alone", "port": "class genie, each port alone"}
"""What is used together, and the name of the row."""

PUBLISHED = {
    "regular": {"tdd": 0.1246, "fdd": 0.2692},
    "generalization": {"tdd": 0.2598, "fdd": 0.6392},
}
"""Mean over all cells of a set of the best published system (arXiv 2510.12996; RNN in the last, else CSI-4CAST)."""


def parser() -> argparse.ArgumentParser:
    """The script's arguments."""
    p = script_parser(__doc__, EXAMPLES)
    p.add_argument("--protocol", default="csi4cast", help="csi4cast (default) or csi4cast_sionna2")
    p.add_argument("--cells", choices=["regular", "generalization"], default="regular")
    p.add_argument("--models", default="", help="only cells of these CDL models, e.g. AD (default: all)")
    p.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    p.add_argument("--samples", type=int, default=8, help="samples of each cell, each with a velocity of its own")
    p.add_argument("--device", default="cpu")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--out", type=Path, default=Path("out/csi_genie"), help="folder of results and picture")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate, print a table, write records and a picture."""
    return run_script(run, parser().parse_args(argv), "csi_genie")


def run(args: argparse.Namespace) -> None:
    """The genies on every sample, cell and SNR."""
    from chanlab.cli.figures import save
    from chanlab.csi import protocol_records
    from chanlab.data.protocol import find_protocol
    from chanlab.records import save_records

    if args.samples < 2:
        raise UsageError("--samples must be at least 2: a bootstrap needs two realisations.")
    results = evaluate(args)
    records = protocol_records(results, args.protocol, args.cells, seeds=[args.seed])
    records += [r for result in results for r in cell_records(result, args)]
    for duplex in ("tdd", "fdd"):
        print(text_table([r for r in results if r.duplex == duplex]), end="\n\n")
    args.out.mkdir(parents=True, exist_ok=True)
    written = [args.out / "results.json", args.out / "csi_genie.png"]
    save_records(written[0], records, replace=True)
    # What is published is a mean over the whole set, on the published data's channels: no part compares with it.
    whole = args.protocol == "csi4cast" and results[0].cells == find_protocol(args.protocol).set_cells(args.cells)
    save(picture(results, PUBLISHED[args.cells] if whole else {}), written[1])
    print("written:", *written)


def evaluate(args: argparse.Namespace) -> list[Any]:
    """A `ProtocolResult` for each system and band."""
    import torch
    from tqdm import tqdm

    from chanlab.channels import subcarrier_frequencies
    from chanlab.csi import ProtocolResult, ray_class
    from chanlab.data import StreamedCSI
    from chanlab.data.protocol import find_protocol
    from chanlab.data.streamed import SampleRequest, cell_channels
    from chanlab.metrics import nmse_terms

    stream = StreamedCSI(
        args.protocol,
        "test",
        cells=args.cells,
        duplex="both",
        conditions=find_protocol(args.protocol).conditions["regular"],
        seed=args.seed,
        block_size=64,
    )
    p = stream.protocol
    grid = subcarrier_frequencies(p.fft_size, p.subcarrier_spacing).double()
    lower, upper = grid[: p.num_subcarriers], grid[p.band_distance :]
    times = torch.arange(p.history + p.horizons, dtype=torch.float64) * p.interval
    cells = tuple(cell for cell in stream.cells if not args.models or cell.model in args.models)
    if not cells:
        raise UsageError(f"there is no cell of the models {args.models!r}.")
    stream.cells = cells
    ids = stream.ids(args.samples).view(len(cells), args.samples)
    shape = (3, len(cells), len(stream.conditions), args.samples, p.horizons)
    tables = {(s, d): torch.zeros(shape, dtype=torch.float64) for s in args.systems for d in ("tdd", "fdd")}
    for i, row in enumerate(tqdm(ids, unit="cell")):
        rays = ray_class(cell_channels(p, cells[i]))
        velocities = stream.velocities(row, args.device)
        for j in range(args.samples):
            genies = Genies(rays, velocities[j].cpu(), times, args.systems, p.columns, p.rows)
            for k, condition in enumerate(stream.conditions):
                batch = stream.batch(SampleRequest(row[j : j + 1], k, "test"), args.device)
                for system in args.systems:
                    genie = genies.at(
                        system, 10 ** (-condition.level / 10), lower, torch.cat([lower, upper]), p.history
                    )
                    predicted = genie.to(args.device)(batch.history)
                    for duplex, band in (("tdd", slice(0, len(lower))), ("fdd", slice(len(lower), None))):
                        error, power = nmse_terms(predicted[..., band], batch.target[..., band], dim=-1)
                        terms = (error / power).mean((1, 2)), error.sum((1, 2)), power.sum((1, 2))
                        tables[system, duplex][:, i, k, j] = torch.cat(terms).cpu()
    return [
        ProtocolResult(SYSTEMS[system], duplex, cells, stream.conditions, *table)
        for (system, duplex), table in tables.items()
    ]


class Genies:
    """The genies for one velocity; what doesn't depend on the SNR is computed once."""

    def __init__(self, rays: Any, velocity: Any, times: Any, systems: Sequence[str], columns: int, rows: int) -> None:
        import torch

        dft = {n: torch.exp(-2j * math.pi * torch.outer(torch.arange(n), torch.arange(n)).double() / n) for n in (2, 4)}
        dft = {n: x / math.sqrt(n) for n, x in dft.items()}
        self.rays = rays
        self.transforms = {
            "beam": torch.kron(dft[2], torch.kron(dft[columns], dft[rows])),
            "port": torch.eye(2 * columns * rows, dtype=torch.complex128),
        }
        self.modes = rays.modes(velocity, times) if "all" in systems else None
        self.portwise = {
            system: [rays.through(line[None]).modes(velocity, times) for line in transform]
            for system, transform in self.transforms.items()
            if system in systems
        }

    def at(self, system: str, variance: float, frequencies: Any, targets: Any, history: int) -> Any:
        """The genie of this name for a noise variance."""
        from chanlab.csi import ClassGenie, PortwiseGenie

        common = (self.rays.delay, frequencies, targets, history, variance)
        if system == "all":
            return ClassGenie(self.modes, *common)
        return PortwiseGenie(self.transforms[system], self.portwise[system], *common)


def cell_records(result: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for each cell and SNR, mean over ratios and pooled."""
    from chanlab.records import record

    return [
        record(
            system=result.system,
            data=args.protocol,
            split=args.cells,
            condition={
                "duplex": result.duplex,
                "model": cell.model,
                "delay_spread_ns": round(cell.delay_spread * 1e9),
                "speed": cell.speed,
                "snr_db": condition.snr_db,
            },
            metric=metric,
            value=float(result.nmse(reduction)[i, k].mean()),
            n=args.samples,
            seeds=[args.seed],
        )
        for i, cell in enumerate(result.cells)
        for k, condition in enumerate(result.conditions)
        for metric, reduction in (("nmse", "per_antenna_step"), ("nmse_pooled", "pooled"))
    ]


def text_table(results: Sequence[Any]) -> str:
    """A row per cell: each system's mean over SNR, and the pooled one."""
    from chanlab.cli.common import table

    heads = [results[0].duplex.upper()]
    for result in results:
        heads += [result.system.removeprefix("class genie, "), "pooled"]
    rows = []
    for i, cell in enumerate(results[0].cells):
        row = [str(cell)]
        for result in results:
            row += [f"{result.nmse(name)[i].mean():.4f}" for name in ("per_antenna_step", "pooled")]
        rows.append(row)
    means = ["mean of all"]
    for result in results:
        means += [f"{result.nmse(name).mean():.4f}" for name in ("per_antenna_step", "pooled")]
    return table(heads, [*rows, means])


def picture(results: Sequence[Any], published: Mapping[str, float]) -> Any:
    """NMSE over SNR for each speed, a panel per band; with published means by band, if any compare."""
    from chanlab.cli.figures import new_figure, tidy

    figure = new_figure(10, 4.2)
    styles = dict(zip(SYSTEMS.values(), ("-", "--", ":"), strict=True))
    for axes, duplex in zip(figure.subplots(1, 2, sharey=True), ("tdd", "fdd"), strict=True):
        for result in (r for r in results if r.duplex == duplex):
            speeds = sorted({cell.speed for cell in result.cells})
            for color, speed in enumerate(speeds):
                chosen = [i for i, cell in enumerate(result.cells) if cell.speed == speed]
                values = result.nmse()[chosen].mean((0, 2))
                levels = [condition.snr_db for condition in result.conditions]
                name = f"{speed:g} m/s, {result.system.removeprefix('class genie, ')}"
                axes.plot(levels, values, styles[result.system], color=f"C{color}", marker=".", label=name)
        if duplex in published:
            axes.axhline(published[duplex], color="gray", linewidth=1)
            axes.text(25, 1.1 * published[duplex], "best published, mean of all", fontsize=7, color="gray", ha="right")
        axes.set_yscale("log")
        tidy(axes, f"Known statistics, {duplex.upper()}", "SNR of the history [dB]", "NMSE per antenna and step, mean")
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


if __name__ == "__main__":
    sys.exit(main())
