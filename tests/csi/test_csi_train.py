"""benchmarks/csi_train.py: runs of one budget, resumed and limited as said; what is kept is what is evaluated."""

import json
import re
import shlex
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from chanlab.csi import (
    CNN,
    LLM4CP,
    RNN,
    SOFTS,
    CSIPredictionModule,
    LearnedWiener,
    Transformer,
    load_weights,
    save_weights,
)
from chanlab.data import CSIBatch
from chanlab.data.protocol import CSI4CAST, cell_number
from chanlab.data.recipe import find_recipe
from chanlab.errors import UsageError
from chanlab.metrics import nmse
from chanlab.records import load_records, select

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import csi_train
import csi_train_grid
import csi_trainer
from csi_train_grid import Run
from csi_trainer import Trainer

TINY = ["--batch", "4", "--block-size", "2", "--val-samples", "1", "--every", "9", "--samples", "2", "--no-compile"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> str:
    """A small RNN, trained as the protocol's."""
    config = yaml.safe_load(find_recipe("models", "csi4cast_rnn").read_text())
    config["model"]["init_args"]["predictor"]["init_args"] |= {"hidden": 32, "layers": 1}
    config["model"]["init_args"]["lr"] = 5e-3
    path = tmp_path_factory.mktemp("recipes") / "small_rnn.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


@pytest.fixture(scope="module")
def grid(recipe, tmp_path_factory) -> list[str]:
    """The command of a grid that was trained once."""
    out = tmp_path_factory.mktemp("csi_train")
    command = ["--systems", recipe, "--duplex", "tdd", "fdd", "--seeds", "1", "2", "--windows", "12", "--points", "2"]
    command += [*TINY, "--antennas", "2", "--out", str(out)]
    csi_train.main(command)
    return command


@pytest.fixture
def make(recipe, tmp_path):
    """A trainer, and a run's module that it may train."""

    def build(*options: str, seed: int = 1, system: str = recipe):
        args = csi_train.arguments([*TINY, "--windows", "12", "--out", str(tmp_path), *options])
        run = Run(system, "tdd", seed)
        return Trainer(args, time.perf_counter()), run, csi_train_grid.build(run)

    return build


def out(command: list[str]) -> Path:
    return Path(command[command.index("--out") + 1])


def test_a_grid_leaves_curves_weights_and_records_over_seeds(grid):
    for name in ("tdd_1", "tdd_2", "fdd_1", "fdd_2"):
        known = json.loads((out(grid) / "runs" / f"small_rnn_{name}.json").read_text())
        trained = known["trained"]
        assert trained["complete"]
        assert (trained["windows"], trained["steps"], trained["skipped"], trained["antennas"]) == (12, 3, 0, 2)
        assert [p["windows"] for p in trained["curve"]] == [0, 8, 12]
        assert all(p["nmse"] > 0 for p in trained["curve"])
        assert trained["curve"][0]["loss"] is None
        assert all(p["loss"] > 0 for p in trained["curve"][1:])
    records = load_records(out(grid) / "results.json")
    for duplex in ("tdd", "fdd"):
        (total,) = select(
            [r for r in records if set(r["condition"]) == {"duplex"}], system="small_rnn", duplex=duplex, metric="nmse"
        )
        assert total["seeds"] == [1, 2]
        assert total["deviation"] > 0
        assert (total["training_windows"], total["bits"]) == (12, 8)
        (seen,) = select(records, metric="training_windows", duplex=duplex)
        assert (seen["value"], seen["deviation"], seen["split"]) == (12, 0, "train")
    assert len(select(records, split="regular", metric="nmse", duplex="tdd", horizon=1)) == 1
    assert (out(grid) / "learning_curves.png").stat().st_size > 5000


def test_records_are_those_of_the_kept_weights(grid):
    """Weights in eight bits, loaded into a fresh network, give the recorded figure."""
    run = Run(grid[1], "tdd", 2)
    trainer = Trainer(csi_train.arguments(grid), time.perf_counter())
    module = csi_train_grid.build(run)
    load_weights(module.predictor, out(grid) / "weights" / f"{run.name}.safetensors")
    again = trainer.evaluate(run, module.predictor)
    known = json.loads((out(grid) / "runs" / f"{run.name}.json").read_text())["records"]
    assert again[0]["value"] == pytest.approx(known[0]["value"], rel=1e-5)
    assert again[0]["condition"] == known[0]["condition"] == {"duplex": "tdd"}


def test_finished_runs_are_skipped(grid, capsys):
    before = {p: p.stat().st_mtime_ns for p in (out(grid) / "runs").iterdir()}
    csi_train.main(grid)
    assert capsys.readouterr().out.count("done before") == 4
    assert before == {p: p.stat().st_mtime_ns for p in (out(grid) / "runs").iterdir()}


def test_runs_of_another_budget_are_not_mixed_in(grid):
    other = [*grid, "--antennas", "4"]
    with pytest.raises(UsageError, match=r"another antennas.*another --out"):
        csi_train.main(other)


def test_plot_draws_and_joins_what_is_there(grid, tmp_path, capsys):
    """Runs made on several machines are put into one folder."""
    records = load_records(out(grid) / "results.json")
    (out(grid) / "learning_curves.png").unlink()
    (out(grid) / "results.json").unlink()
    csi_train.main(["--plot", "--out", str(out(grid))])
    assert load_records(out(grid) / "results.json") == records
    assert capsys.readouterr().out.strip() == str(out(grid) / "learning_curves.png")
    assert (out(grid) / "learning_curves.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UsageError, match="train first"):
        csi_train.main(["--plot", "--out", str(tmp_path)])


def test_runs_of_different_settings_are_not_joined(tmp_path):
    (tmp_path / "runs").mkdir()
    for seed, antennas in ((1, 2), (2, 4)):
        known = {"run": {}, "settings": {"antennas": antennas, "batch": 4}, "trained": {}, "records": []}
        (tmp_path / "runs" / f"rnn_tdd_{seed}.json").write_text(json.dumps(known))
    with pytest.raises(UsageError, match=r"differ in antennas: keep them"):
        csi_train.main(["--plot", "--out", str(tmp_path)])


def test_the_limit_stops_cleanly_and_the_same_command_goes_on(recipe, tmp_path, capsys):
    command = ["--systems", recipe, "--duplex", "tdd", "--seeds", "1", "--windows", "8", *TINY, "--out", str(tmp_path)]
    csi_train.main([*command, "--total-minutes", "1e-9"])
    assert "1 of 1 runs are left" in capsys.readouterr().out
    known = json.loads((tmp_path / "runs" / "small_rnn_tdd_1.json").read_text())
    assert (known["trained"]["complete"], known["records"]) == (False, [])
    assert (tmp_path / "weights" / "small_rnn_tdd_1.safetensors").is_file()
    csi_train.main(command)
    known = json.loads((tmp_path / "runs" / "small_rnn_tdd_1.json").read_text())
    assert known["trained"]["complete"]
    assert known["records"]


def test_a_run_that_could_not_be_finished_in_time_is_not_begun(recipe, tmp_path, capsys):
    command = ["--systems", recipe, "--duplex", "tdd", "--seeds", "1", "--minutes", "1", *TINY, "--out", str(tmp_path)]
    csi_train.main([*command, "--total-minutes", "0.9"])
    assert "1 of 1 runs are left" in capsys.readouterr().out
    assert not list(tmp_path.glob("runs/*"))


def test_a_trained_run_without_records_is_only_evaluated(grid, capsys):
    file = out(grid) / "runs" / "small_rnn_fdd_1.json"
    known = json.loads(file.read_text())
    file.write_text(json.dumps({**known, "records": []}))
    csi_train.main(grid)
    assert "steps" not in capsys.readouterr().out
    again = json.loads(file.read_text())
    assert again["trained"] == known["trained"]
    assert again["records"][0]["value"] == pytest.approx(known["records"][0]["value"], rel=1e-5)


def test_large_weights_are_not_kept_and_the_run_is_done(recipe, tmp_path, capsys):
    command = ["--systems", recipe, "--duplex", "tdd", "--seeds", "1", "--windows", "4", *TINY, "--out", str(tmp_path)]
    csi_train.main([*command, "--max-weights", "0.01"])
    assert not list((tmp_path / "weights").iterdir())
    capsys.readouterr()
    csi_train.main(command)
    assert "done before" in capsys.readouterr().out


def test_steps_without_finite_gradients_are_skipped_and_counted(make, monkeypatch):
    trainer, run, module = make()
    draw = csi_trainer.Batches.__next__

    def broken(batches):
        batch = draw(batches)
        if batches.step == 2:
            batch.target[:] = torch.nan
        return batch

    monkeypatch.setattr(csi_trainer.Batches, "__next__", broken)
    done = trainer.train(run, module)
    assert (done.steps, done.skipped) == (3, 1)
    assert done.curve[-1]["loss"] > 0
    assert all(p.isfinite().all() for p in module.parameters())


def test_training_lowers_the_validation_nmse(make):
    trainer, run, module = make("--windows", "100", "--points", "1", "--val-samples", "2")
    done = trainer.train(run, module)
    first, last = (point["nmse"] for point in done.curve)
    assert last < 0.95 * first
    assert not module.predictor.training


def test_a_run_depends_on_its_seed_alone(make):
    figures = []
    for seed in (1, 1, 2):
        trainer, run, module = make(seed=seed)
        figures.append(trainer.train(run, module).curve[-1]["nmse"])
    assert figures[0] == figures[1] != figures[2]


@pytest.mark.parametrize("options", [[], ["--lr", "2e-3"]])
def test_learning_rate_rises_and_falls_to_nothing_over_the_budget(options, make, monkeypatch):
    trainer, run, module = make("--windows", "400", "--points", "1", *options)
    drawn = next(csi_trainer.Batches(run, 4, 1, 2, torch.device("cpu")))
    monkeypatch.setattr(csi_trainer.Batches, "__next__", lambda batches: drawn)
    rates = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self, *a: (rates.append(self.param_groups[0]["lr"]), step(self, *a))[1]
    )
    trainer.train(run, module)
    highest = float(options[1]) if options else module.lr
    assert len(rates) == 100
    assert rates[0] < 0.05 * highest
    assert max(rates) == pytest.approx(highest, rel=0.01)
    assert rates.index(max(rates)) == pytest.approx(100 * module.warmup, abs=1)
    assert rates[-1] < 0.01 * highest


@pytest.mark.parametrize(
    ("options", "steps", "progress"),
    [(["--minutes", "2"], None, 0.25), (["--windows", "60"], None, 0.1), (["--minutes", "2"], 10, 0.2)],
)
def test_progress_is_measured_by_the_budget(options, steps, progress):
    trainer = Trainer(csi_train.arguments(options), 0.0)
    assert trainer.progress(30.0, csi_train_grid.Trained(steps=2, windows=6), steps) == pytest.approx(progress)


def test_antennas_are_drawn_anew_from_the_same_windows():
    device, run = torch.device("cpu"), Run("rnn", "tdd", 1)
    some, every = (csi_trainer.Batches(run, 3, antennas, 2, device) for antennas in (5, None))
    kept = []
    for _ in range(2):
        part, whole = next(some), next(every)
        assert part.history.shape == (3, 1, 5, 16, 300)
        assert part.target.shape == (3, 1, 5, 4, 300)
        same = (part.history[:, :, :, None] == whole.history[:, :, None]).all(-1).all(-1).all(0)[0]
        assert same.sum(1).tolist() == [1] * 5
        where = same.int().argmax(1)
        assert torch.equal(part.target, whole.target[:, :, where])
        assert torch.equal(part.noise_variance, whole.noise_variance)
        kept.append(where.tolist())
    assert kept[0] != kept[1]


def test_predictors_that_join_antennas_see_all_of_them(make, tmp_path):
    config = yaml.safe_load(find_recipe("models", "csi4cast_softs").read_text())
    config["model"]["init_args"]["predictor"]["init_args"] |= {"width": 8, "core": 4, "layers": 1}
    path = tmp_path / "small_softs.yaml"
    path.write_text(yaml.safe_dump(config))
    trainer, run, module = make("--antennas", "2", system=str(path))
    assert trainer.train(run, module, steps=1).antennas == 32


def test_one_network_learns_both_bands_at_once(recipe, tmp_path):
    config = yaml.safe_load(find_recipe("models", "learned_wiener").read_text())
    config["model"]["init_args"]["predictor"]["init_args"] |= {"dim": 16, "layers": 1}
    small = tmp_path / "small.yaml"
    small.write_text(yaml.safe_dump(config))
    command = ["--duplex", "both", "--seeds", "1", "--windows", "8", "--points", "1", *TINY, "--out", str(tmp_path)]
    csi_train.main(["--systems", str(small), *command])
    records = select(load_records(tmp_path / "results.json"), metric="nmse")
    whole = {r["condition"]["duplex"]: r["value"] for r in records if set(r["condition"]) == {"duplex"}}
    assert set(whole) == {"tdd", "fdd"}
    assert whole["tdd"] < whole["fdd"]  # the other band can't be better known
    with pytest.raises(UsageError, match="--duplex tdd fdd"):
        csi_train.main(["--systems", recipe, *command])


def test_objective_is_the_protocols_figure_without_a_floor():
    torch.manual_seed(0)
    module = CSIPredictionModule(RNN(6, hidden=4, layers=1))
    history, target = (torch.randn(3, 1, 4, n, 6, dtype=torch.complex64) for n in (16, 4))
    batch = CSIBatch(history, target, *(torch.ones(3) for _ in range(5)))
    figure = nmse(module(history), target, "per_antenna_step")
    assert csi_trainer.objective(module, batch, 0.0).item() == pytest.approx(figure.item())
    target[0, 0, 0, 0] = 0  # a fade: its ratio is bounded by the floor
    assert csi_trainer.objective(module, batch, 0.0).isinf()
    assert csi_trainer.objective(module, batch, 0.01) < 100


@pytest.mark.parametrize("system", sorted(csi_train_grid.SYSTEMS))
def test_arguments_in_fdd_are_those_that_recipes_name(system):
    text = find_recipe("models", csi_train_grid.SYSTEMS[system]).read_text()
    named = {}
    for line in re.findall(r"^# FDD: (.*)$", text, re.MULTILINE):
        words = shlex.split(line)
        given = dict(zip(words[::2], words[1::2], strict=True))
        named = {
            key.removeprefix("--model.predictor."): yaml.safe_load(value)
            for key, value in given.items()
            if key.startswith("--model.predictor.")
        }
    node = csi_train_grid.recipe(system)["model"]["init_args"]["predictor"]
    assert csi_train_grid.for_band(node, "tdd")["init_args"] == node["init_args"]
    assert csi_train_grid.for_band(node, "fdd")["init_args"] == {**node["init_args"], **named}


def test_arguments_in_fdd_hold_for_recipes_of_any_name(tmp_path):
    config = yaml.safe_load(find_recipe("models", "csi4cast_softs").read_text())
    config["model"]["init_args"]["predictor"]["init_args"] |= {"width": 8, "core": 4, "layers": 1}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    for duplex, normalised in (("tdd", True), ("fdd", False)):
        for name in (str(tmp_path / "mine.yaml"), "csi4cast_softs"):
            assert csi_train_grid.build(Run(name, duplex, 1)).predictor.instance_norm == normalised


def test_a_subset_of_cells_meets_every_speed(make):
    trainer = make("--every", "9")[0]
    speeds = {1.0, 10.0, 30.0}
    assert {cell.speed for cell in trainer.test_stream("regular", "tdd", 2).cells} == speeds
    held = trainer.validation("tdd")
    assert {CSI4CAST.cell(number).speed for number in cell_number(held.sample_id).tolist()} == speeds


def test_without_a_compiler_training_goes_on(make, monkeypatch, capsys):
    def no_compiler(forward, **options):
        def fail(*arguments):
            raise RuntimeError("no C compiler here")

        return fail

    trainer, run, module = make()
    trainer.validation("tdd")  # imports Sionna, which compiles
    monkeypatch.setattr(torch, "compile", no_compiler)
    monkeypatch.setattr(csi_trainer.Compiled, "failed", False)
    module.predictor.encoder.compilable = True
    trainer.args.compile = True
    done = trainer.train(run, module)
    assert (done.complete, done.compiled) == (True, False)
    assert "no C compiler here" in capsys.readouterr().err
    assert csi_trainer.Compiled.failed


def test_compiled_parts_are_compiled_in_training_only(make, monkeypatch):
    calls = []

    def compile_(forward, **options):
        return lambda *a: (calls.append(torch.is_grad_enabled()), forward(*a))[1]

    trainer, run, module = make()
    trainer.validation("tdd")  # imports Sionna, which compiles
    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(csi_trainer.Compiled, "failed", False)
    module.predictor.encoder.compilable = True
    trainer.args.compile = True
    assert trainer.train(run, module).compiled
    assert calls
    assert all(calls)
    assert "forward" not in vars(module.predictor.encoder)


@pytest.mark.parametrize(
    ("predictor", "count"),
    [
        (lambda: LLM4CP(12, backbone=None, layers=2, features=4, blocks=1, matched_width=16), 4),
        (lambda: CNN(levels=2), 1),
        (lambda: SOFTS(12, width=8, core=4, layers=3, feed_forward=8), 3),
        (lambda: Transformer(12, width=8, layers=2, heads=2), 2),
        (lambda: LearnedWiener(dim=16, layers=2), 3),
        (lambda: LearnedWiener(dim=16, layers=2, backbone_layers=3), 6),
        (lambda: RNN(12, hidden=4), 0),
    ],
)
def test_parts_that_are_marked_are_compiled(predictor, count):
    assert len(csi_trainer.Compiled(predictor(), True).parts) == count
    assert not csi_trainer.Compiled(predictor(), False).parts


def test_out_of_memory_halves_the_batch(make, monkeypatch, capsys):
    backward = Trainer.backward

    def small(self, module, batch):
        if len(batch.history) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return backward(self, module, batch)

    monkeypatch.setattr(Trainer, "backward", small)
    trainer, run, module = make("--windows", "2")
    done = trainer.train(run, module)
    assert (done.batch, done.steps) == (1, 2)
    assert capsys.readouterr().err.count("out of memory") == 2


def test_sets_too_small_for_intervals_are_refused_before_training(recipe, tmp_path):
    command = ["--systems", recipe, "--windows", "8", *TINY, "--samples", "1", "--out", str(tmp_path)]
    with pytest.raises(UsageError, match=r"regular.*1 m/s.*--samples"):
        csi_train.main(command)
    assert not (tmp_path / "runs").exists()


def test_check_tells_throughput(recipe, tmp_path, capsys):
    command = [
        "--check",
        "--systems",
        recipe,
        "--duplex",
        "tdd",
        "fdd",
        *TINY,
        "--antennas",
        "2",
        "--out",
        str(tmp_path),
    ]
    csi_train.main(command)
    shown = capsys.readouterr().out
    header = next(line for line in shown.splitlines() if "windows/s" in line)
    for name in ("small_rnn_tdd_1", "small_rnn_fdd_1"):
        row = next(line for line in shown.splitlines() if line.startswith(f"{name} "))
        columns = re.split(r"\s{2,}", row)
        cells = dict(zip(re.split(r"\s{2,}", header), columns, strict=True))
        assert cells["batch"] == "4 x 2"
        assert float(cells["windows/s"]) > 0
        assert 0 < float(cells["loss"]) < 3
        assert cells["skipped"] == "0"
    assert re.search(r"takes about \d+\.\d minutes", shown)
    assert not list(tmp_path.glob("**/*.safetensors"))


def test_work_of_the_rnn_is_twice_its_weights_for_each_snapshot_and_thrice_in_training():
    """Encoder and recurrent layers run on 16 snapshots and 3 predictions, the decoder on 4 predictions."""
    torch.manual_seed(0)
    predictor = RNN(300, hidden=200, layers=2)
    parts = [sum(p.numel() for p in m.parameters() if p.ndim > 1) for m in predictor.children()]
    multiplications = 3 * (19 * (parts[0] + parts[1]) + 4 * parts[2])
    multiplications -= 16 * parts[0]  # nobody asks for the gradient of the history
    found = csi_train.gflop(CSIPredictionModule(predictor), 0.01)
    assert found == pytest.approx(2 * 32 * multiplications / 1e9, rel=0.01)


def test_trained_part_of_llm4cp_fits_in_three_megabytes(tmp_path):
    """In eight bits, sized for the protocol; the ablation trains as many parameters as the language model's variant."""
    predictor = LLM4CP(300, backbone=None)
    assert sum(p.numel() for p in predictor.parameters()) == pytest.approx(2.05e6, rel=0.01)
    save_weights(predictor, tmp_path / "weights.safetensors", 8)
    assert (tmp_path / "weights.safetensors").stat().st_size < 3e6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--minutes", "1", "--windows", "10"], "two budgets"),
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--lr", "-1"], "--lr must be above 0"),
        (["--val-samples", "0"], "--val-samples must be above 0"),
        (["--sets", "regular", "robustness", "--samples", "1", "2", "3"], "one for each"),
    ],
)
def test_arguments_that_contradict_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        csi_train.arguments(options)
