"""The demo's report: one HTML file with everything in it, and the same table as plain text."""

from __future__ import annotations

import base64
import html
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from chanlab.cli.common import table
from chanlab.cli.demo.figures import STYLES, label
from chanlab.cli.demo.training import FINE_TUNED, FROM_SCRATCH, ZERO_SHOT
from chanlab.records import Record, lookup, select

TRAINED = ("llm", "transformer", "gru")
"""Systems that are trained from the beginning, the one that is most worth a word first."""


@dataclass(frozen=True)
class Picture:
    """A PNG with its heading, its caption and what a screen reader says of it."""

    heading: str
    caption: str
    png: bytes
    alternative: str


@dataclass(frozen=True)
class Facts:
    """What the report says beside records and pictures.

    Attributes:
        title: Heading.
        lead: What was done, in a sentence or two.
        made: How it was made: command, seeds, versions, hardware, times, ...
        snr_db: SNR of the histories [dB].
        link_snr_db: SNR of the link in the table [dB].
        link_step: Step of the horizon that the link is shown at.
        notes: Remarks below the table.
    """

    title: str
    lead: str
    made: Mapping[str, str]
    snr_db: float
    link_snr_db: float | None = None
    link_step: int = 1
    notes: Sequence[str] = field(default_factory=tuple)


def rows(records: Sequence[Record], facts: Facts) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The one table: NMSE by horizon and what the link makes of it.

    Returns:
        Column headings, and for each system its name and its cells.
    """
    steps = sorted({h for r in select(records, metric="nmse_pooled") if isinstance(h := lookup(r, "horizon"), int)})
    ahead = {lookup(r, "horizon"): lookup(r, "ahead_ms") for r in select(records, metric="nmse_pooled")}
    header = ["system", *(f"+{ahead[h]:g} ms" for h in steps), "all steps"]
    at_link = {"link_snr_db": facts.link_snr_db, "horizon": facts.link_step}
    if facts.link_snr_db is not None:
        header += ["SE", "BLER"]
    names = [s for s in STYLES if select(records, system=s)]
    names += sorted({r["system"] for r in records} - set(STYLES))
    lines = []
    for name in names:
        mine = select(records, system=name)
        nmse = select(mine, metric="nmse_pooled", snr_db=facts.snr_db)
        cells = [_cell(select(nmse, horizon=h), "{:.1f}") for h in [*steps, "all"]]
        if facts.link_snr_db is not None:
            cells.append(_cell(select(mine, metric="spectral_efficiency", **at_link), "{:.2f}"))
            cells.append(_cell(select(mine, metric="bler", **at_link), "{:.2g}"))
        if any(cell != "–" for cell in cells):
            lines.append((name, cells))
    return header, lines


def text_table(records: Sequence[Record], facts: Facts) -> str:
    """The table for a terminal."""
    header, lines = rows(records, facts)
    units = f"NMSE [dB] on held-out trajectories at {facts.snr_db:g} dB"
    if facts.link_snr_db is not None:
        ahead = header[facts.link_step]
        units += f"; link at {facts.link_snr_db:g} dB, {ahead}: SE [bit/s/Hz per user], coded BLER"
    return units + "\n" + table(header, [[label(name), *cells] for name, cells in lines])


def answer(records: Sequence[Record], snr_db: float) -> str:
    """What came out, in one sentence, from the records alone."""
    overall = {r["system"]: r["value"] for r in select(records, metric="nmse_pooled", snr_db=snr_db, horizon="all")}
    learned = trained_system(list(overall))
    if learned is None:
        return ""
    others = [s for s in ("no prediction", "ar", "pad", "ray_pursuit") if s in overall]
    others += [s for s in overall if s.startswith(_network(learned)) and s != learned]
    parts = [f"{_gain(overall[other] - overall[learned])} than {_short(other)}" for other in others]
    return f"Over all horizons {_named(learned)} reaches an NMSE of {overall[learned]:.1f} dB: {', '.join(parts)}."


def trained_system(systems: Sequence[str]) -> str | None:
    """The system that the demo is about: what was fine-tuned, else what was trained."""
    tuned = next((s for s in systems if s.endswith(FINE_TUNED)), None)
    return tuned or next((s for s in TRAINED if s in systems), None)


def write_report(path: Path, records: Sequence[Record], pictures: Sequence[Picture], facts: Facts) -> None:
    """Write the report as one self-contained HTML file."""
    text = html.escape
    body = [f"<h1>{text(facts.title)}</h1>", f'<p class="lead">{text(facts.lead)}</p>']
    said = answer(records, facts.snr_db)
    if said:
        body.append(f'<p class="answer">{text(said)}</p>')
    body += ["<h2>The result</h2>", _html_table(records, facts)]
    body += [f'<p class="note">{text(note)}</p>' for note in facts.notes]
    for picture in pictures:
        data = base64.b64encode(picture.png).decode()
        body.append(
            f"<h2>{text(picture.heading)}</h2>\n"
            f'<figure><img src="data:image/png;base64,{data}" alt="{text(picture.alternative)}">'
            f"<figcaption>{text(picture.caption)}</figcaption></figure>"
        )
    made = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in facts.made.items())
    body += ["<h2>How this was made</h2>", f"<dl>{made}</dl>"]
    template = resources.files("chanlab.cli.demo").joinpath("report.html").read_text(encoding="utf-8")
    page = string.Template(template).substitute(title=text(facts.title), body="\n".join(body))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _html_table(records: Sequence[Record], facts: Facts) -> str:
    header, lines = rows(records, facts)
    links = 2 if facts.link_snr_db is not None else 0
    groups = f'<th></th><th colspan="{len(header) - 1 - links}">NMSE [dB], histories at {facts.snr_db:g} dB</th>'
    units = {"SE": "SE [bit/s/Hz]", "BLER": "coded BLER"}
    if links:
        groups += f'<th colspan="2">link at {facts.link_snr_db:g} dB, {header[facts.link_step]}</th>'
    best = trained_system([name for name, _ in lines])
    out = [f'<div class="wide"><table><thead><tr class="groups">{groups}</tr><tr>']
    out += [f"<th>{html.escape(units.get(cell, cell))}</th>" for cell in header]
    out.append("</tr></thead><tbody>")
    for name, cells in lines:
        row = "".join(f"<td>{html.escape(cell)}</td>" for cell in [label(name), *cells])
        out.append(f'<tr class="best">{row}</tr>' if name == best else f"<tr>{row}</tr>")
    out.append("</tbody></table></div>")
    return "".join(out)


def _cell(items: Sequence[Record], form: str) -> str:
    return form.format(items[-1]["value"]) if items and items[-1]["value"] is not None else "–"


def _gain(decibels: float) -> str:
    return f"{abs(decibels):.1f} dB {'better' if decibels > 0 else 'worse'}"


def _network(system: str) -> str:
    """`LearnedWiener ` of `LearnedWiener fine-tuned`; of a system that wasn't fine-tuned its whole name."""
    return system.removesuffix(FINE_TUNED)


def _named(system: str) -> str:
    return (
        f"the fine-tuned {_network(system).strip()}"
        if system.endswith(FINE_TUNED)
        else f"the {label(system)} predictor"
    )


def _short(system: str) -> str:
    ends = {ZERO_SHOT: "the same zero-shot", FROM_SCRATCH: "the same from scratch"}
    return next((said for end, said in ends.items() if system.endswith(end)), label(system))
