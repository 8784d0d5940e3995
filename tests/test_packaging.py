"""A built wheel works outside the checkout: the command, the recipes, and nothing but `chanlab` at top level."""

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves folders behind: not in the checkout
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "chanlab", "datasets", "models"):
        (source / name).symlink_to(ROOT / name)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", folder, source)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_only_chanlab_and_every_recipe(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
    assert {name.split("/")[0] for name in names} == {"chanlab", info}
    assert zipfile.ZipFile(wheel).read(f"{info}/top_level.txt").split() == [b"chanlab"]
    recipes = [*ROOT.glob("datasets/*.yaml"), *ROOT.glob("models/**/*.yaml"), *ROOT.glob("models/**/*.safetensors")]
    assert recipes
    assert {f"chanlab/_recipes/{path.relative_to(ROOT).as_posix()}" for path in recipes} <= set(names)
    kernels = [path.name for path in (ROOT / "chanlab" / "rf" / "kernels").iterdir()]
    assert {f"chanlab/rf/kernels/{name}" for name in kernels} <= set(names)
    assert {"chanlab/py.typed", "chanlab/cli/demo/report.html", f"{info}/licenses/LICENSE"} <= set(names)


def test_wheel_works_outside_the_checkout(wheel, tmp_path):
    environment = tmp_path / "venv"
    venv.create(environment, symlinks=True)  # pip comes from here; what chanlab depends on, too
    site = Path(run(environment / "bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel)
    (site / "outside.pth").write_text(sysconfig.get_path("purelib"))
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    inside = {"cwd": tmp_path, "env": variables}

    where = run(environment / "bin/python", "-c", "import chanlab; print(chanlab.__file__)", **inside)
    assert Path(where.strip()).is_relative_to(site)
    assert "generate" in run(environment / "bin/python", "-m", "chanlab", "--help", **inside)
    said = run(environment / "bin/python", "-m", "chanlab", "generate", "two_ray", "--out", "x", "--dry-run", **inside)
    assert "1000 users" in said


def test_versions_agree():
    import chanlab

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == chanlab.__version__
    assert f"version: {chanlab.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_constraints_satisfy_every_requirement():
    from packaging.requirements import Requirement

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {name.lower().replace("_", "-"): v for name, _, v in (x.partition("==") for x in lines if "==" in x)}
    assert not any("+" in version for version in pinned.values()), "local versions would exclude other builds"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras["llm"], *extras["viz"], *extras["dev"]]:
        requirement = Requirement(text)
        if requirement.name == "chanlab":
            continue
        version = pinned.get(requirement.name.lower().replace("_", "-"))
        assert version is not None, f"{text} is not pinned in constraints.txt"
        assert requirement.specifier.contains(version, prereleases=True), (text, version)
