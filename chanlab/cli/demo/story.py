"""What the demo tells of its results: records, pictures with captions, and how all of it was made."""

from __future__ import annotations

import datetime

import numpy as np

from chanlab import records as rec
from chanlab.cli.common import bytes_text
from chanlab.cli.demo import figures, report
from chanlab.cli.demo.journal import Journal
from chanlab.cli.demo.stages import Settings, timing
from chanlab.cli.demo.training import Training, network, trainings
from chanlab.cli.figures import png
from chanlab.data.store import Store
from chanlab.data.verify import info
from chanlab.records import Record, lookup, select


def conclude(settings: Settings, journal: Journal, store: Store, records: list[Record]) -> str:
    """Write results.json and report.html; returns what is printed: the table and where things are."""
    rec.save_records(settings.out / "results.json", records, replace=True)
    traced = store.recipe.source["class_path"].endswith("SceneSource")
    scene = "a ray-traced scene" if traced else "a scene in closed form"
    facts = report.Facts(
        title="From a street to a link",
        lead=(
            f"{store.num_samples} users moved through {scene} ({store.recipe.name}, {store.carrier / 1e9:g} GHz). "
            f"{_learning(settings)} On trajectories held out the predictors are judged by their error, and by what a "
            "base station gains that precodes with them."
        ),
        made=_made(settings, journal, store),
        snr_db=settings.snr_db,
        link_snr_db=settings.table_snr_db,
        link_step=settings.link_step,
        notes=_notes(settings, records),
    )
    path = settings.out / "report.html"
    report.write_report(path, records, _pictures(settings, store, records), facts)
    said = report.answer(records, settings.snr_db)
    where = f"report   {path}\nfigures  {settings.out / 'results.json'}\nstore    {settings.store}"
    return f"\n{report.text_table(records, facts)}\n\n{said}\n\n{where}"


def _made(settings: Settings, journal: Journal, store: Store) -> dict[str, str]:
    card = info(settings.store)
    judged = records_hardware(journal)
    made = {
        "command": rec.this_command(),
        **{run.stage: str(journal.facts(run.stage).get("command", "")) for run in _runs(settings)},
        "data": f"{store.recipe.name}, seed {store.recipe.seed}, {bytes_text(card['size'])}",
        "content of the store": store.content_hash,
        "seed of training": str(settings.seed),
        "time": timing(settings, journal),
        "hardware": judged[0] if judged else rec.hardware(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions(store).items()),
        "commit": rec.commit() or "",
        "date": datetime.date.today().isoformat(),
    }
    return {name: value for name, value in made.items() if value}


def records_hardware(journal: Journal) -> list[str]:
    """The hardware that the records were measured on."""
    return sorted({str(r["hardware"]) for r in journal.facts("judgement").get("records", [])})


def versions(store: Store) -> dict[str, str]:
    """Versions of what the results depend on."""
    from importlib import metadata

    found = dict(store.versions)
    for name in ("torch", "lightning", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _runs(settings: Settings) -> tuple[Training, ...]:
    return trainings(settings.model, settings.training)


def _learning(settings: Settings) -> str:
    """What was learnt, in a sentence."""
    runs = _runs(settings)
    if len(runs) == 1:
        return "A predictor learned from some of them how channels go on."
    return (
        f"{network(runs[0].recipe)}, a predictor that comes with weights from other channels, was trained a little "
        "further on some of them, and beside it the same network from scratch."
    )


def _notes(settings: Settings, records: list[Record]) -> tuple[str, ...]:
    windows = next((r["n"] for r in records if r["metric"] == "nmse_pooled"), 0)
    notes = [
        f"NMSE: pooled over {windows} windows, antennas and subcarriers; targets carry no noise. 0 dB is an error as "
        "large as the channel itself.",
        f"Link: {settings.users} users at once, regularised zero forcing from the CSI of the row, OFDM, 16-QAM, 5G "
        "LDPC of rate 1/2, through sionna.phy. No prediction means that the last snapshot is used: outdated CSI.",
    ]
    runs = _runs(settings)
    if len(runs) > 1:
        steps = max((lookup(r, "step") for r in select(records, split="val")), default=0)
        batch = runs[0].recipe["data"]["init_args"].get("batch_size")
        notes.append(
            f"Zero-shot: the shipped weights, which have never seen this scene. Fine-tuned and from scratch: {steps} "
            f"steps of {batch} windows each, the same windows in the same order; of each run the weights that did best "
            "in validation."
        )
    return tuple(notes)


def _pictures(settings: Settings, store: Store, records: list[Record]) -> list[report.Picture]:
    sample = _typical(store)
    ahead = settings.link_step
    return [
        report.Picture(
            "The scene and its users",
            f"From above: buildings in grey, trajectories by split. In green the paths of test user {sample}, stronger "
            "ones stronger; dotted stretches have more bounces than are drawn.",
            png(figures.scene_figure(store, sample)),
            "Map of the scene with buildings, trajectories, transmitter and the propagation paths of one user",
        ),
        report.Picture(
            "One channel over time and frequency",
            "The same user moves, and its channel fades: power between the first pair of antennas. Predicting means "
            "to go on with this picture to the right.",
            png(figures.channel_figure(store, sample)),
            "Power of one channel over time and frequency",
        ),
        report.Picture(
            "How far ahead a channel can be known",
            "Error of each system by how far ahead it predicts; bands are 95 % intervals over trajectories. Lower is "
            "better.",
            png(figures.nmse_figure(records, settings.snr_db)),
            "NMSE over prediction horizon for each system",
        ),
        *_learning_pictures(settings, records),
        report.Picture(
            "What the prediction is worth on a link",
            f"Left: spectral efficiency; right: share of code blocks lost. The precoder is computed from each system's "
            f"CSI for step {ahead} of the horizon. Points without any lost block are not drawn.",
            png(figures.link_figure(records, ahead)),
            "Spectral efficiency and block error rate over SNR for each system",
        ),
    ]


def _learning_pictures(settings: Settings, records: list[Record]) -> list[report.Picture]:
    if not select(records, metric="nmse_per_sample", split="val"):
        return []
    heading, caption = "How it was learnt", "Error on the validation trajectories while the predictor learns."
    if len(_runs(settings)) > 1:
        heading = "From shipped weights and from scratch"
        caption = (
            "Error on the validation trajectories, averaged over windows, while the same network learns from the same "
            "windows: once from the shipped weights, whose first point is what they know without having seen the "
            "scene, once from random ones."
        )
    picture = png(figures.learning_figure(records))
    return [report.Picture(heading, caption, picture, "NMSE in validation over steps of training for each run")]


def _typical(store: Store) -> int:
    """The test user with the most paths: it shows best what a scene does."""
    ids = store.splits["test"][:200]
    links = store.links(ids)
    return int(ids[np.asarray(links.paths.mask.sum((-1, -2))).argmax()])
