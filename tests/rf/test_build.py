"""Compiling the kernels: on first use, ahead of time, and what is said when it can't be."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chanlab.errors import ChanlabError, MissingDependencyError, UsageError
from chanlab.rf import build

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A folder of sources of its own, with a tiny one, and an empty cache."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "three.h").write_text("#define THREE 3\n")
    (folder / "tiny.cpp").write_text('#include "three.h"\nextern "C" int tiny() { return THREE; }\n')
    monkeypatch.setattr(build, "KERNELS", folder)
    monkeypatch.setenv("CHANLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CHANLAB_KERNELS", raising=False)
    build.library.cache_clear()
    yield folder
    build.library.cache_clear()


def test_first_use_compiles_and_the_next_does_not(kernels, capfd):
    assert build.library("tiny.cpp").tiny() == 3
    said = capfd.readouterr().err
    assert "compiling tiny.cpp" in said
    assert "compiled in" in said
    build.library.cache_clear()
    assert build.library("tiny.cpp").tiny() == 3
    assert "compiling" not in capfd.readouterr().err


def test_a_changed_header_or_option_compiles_anew(kernels, monkeypatch):
    first = build.build(kernels / "tiny.cpp")
    (kernels / "three.h").write_text("#define THREE 4\n")
    second = build.build(kernels / "tiny.cpp")
    assert first != second
    assert build.library("tiny.cpp").tiny() == 4
    monkeypatch.setenv("CHANLAB_MARCH", "x86-64" if "x86" in os.uname().machine else "armv8-a")
    assert build.build(kernels / "tiny.cpp") not in (first, second)


def test_at_once_one_compiles_and_none_sees_half(kernels, capfd):
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build.build(kernels / "tiny.cpp"), range(4)))
    assert len(paths) == 1
    assert capfd.readouterr().err.count("compiling") == 1
    assert not [path for path in build.cache_folder().iterdir() if path.suffix not in (".so", ".lock")]


def test_errors_of_the_compiler_are_shown_whole(kernels):
    (kernels / "tiny.cpp").write_text("int first = undeclared_one;\nint second = undeclared_two;\n")
    with pytest.raises(ChanlabError, match=r"(?s)undeclared_one.*undeclared_two"):
        build.build(kernels / "tiny.cpp")
    assert not list(build.cache_folder().glob("*.so"))


@pytest.mark.parametrize(("kind", "remedy"), [("cpu", "apt-get install g"), ("cuda", "CUDA_HOME")])
def test_a_missing_compiler_is_named_with_the_remedy(kernels, monkeypatch, tmp_path, kind, remedy):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    for name in ("CXX", "CUDACXX", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MissingDependencyError, match=remedy):
        build.find_compiler(kind)


def test_ahead_of_time_needs_no_compiler_later(kernels, monkeypatch, tmp_path):
    assert build.main(["cpu", "--out", str(tmp_path / "ahead")]) == 0
    monkeypatch.setenv("CHANLAB_KERNELS", str(tmp_path / "ahead"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.library("tiny.cpp").tiny() == 3
    assert not build.cache_folder().exists()


def test_command_builds_every_cpu_source(tmp_path):
    environment = {**os.environ, "CHANLAB_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "chanlab.rf.build", "cpu"], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == len(build.sources("cpu")) >= 1
    assert all(Path(path).is_relative_to(tmp_path) for path in done.stdout.split())


def test_an_unknown_kind_is_a_users_mistake(capsys):
    assert build.main(["tpu"]) == UsageError.exit_code
    assert "tpu" in capsys.readouterr().err


@pytest.mark.slow
def test_cuda_sources_compile_without_a_gpu(tmp_path):
    try:
        nvcc = build.find_compiler("cuda")
    except MissingDependencyError as error:
        pytest.skip(str(error))
    assert shutil.which(nvcc)
    assert build.sources("cuda")
    launchers = {
        "coherent": {"coherent_forward", "coherent_backward"},
        "sphere": {"sphere_cuda_lists", "sphere_cuda_composite", "sphere_cuda_backward"},
        "sphere_sort": {"sphere_sort_keys"},
    }
    built = {path.name.rpartition("-")[0]: path for path in build.build_all(["cuda"], tmp_path)}
    assert built.keys() == launchers.keys()
    for name, path in built.items():
        symbols = subprocess.run(["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True)
        assert launchers[name] <= set(symbols.stdout.split())
