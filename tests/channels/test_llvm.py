"""The LLVM handed to Dr.Jit: new enough, or an error with the command that installs one."""

import subprocess
import sys
from pathlib import Path

import pytest

from chanlab.channels import llvm
from chanlab.errors import MissingDependencyError


@pytest.fixture
def libraries(monkeypatch, tmp_path):
    """Make the machine seem to hold these libraries: name -> version that the library reports (None if too old)."""

    def install(reported):
        for name in reported:
            (tmp_path / name).touch()
        monkeypatch.delenv("DRJIT_LIBLLVM_PATH", raising=False)
        monkeypatch.setattr(llvm, "_candidates", lambda: iter(sorted(tmp_path.iterdir())))
        monkeypatch.setattr(llvm, "llvm_version", lambda path: reported.get(Path(path).name))
        return tmp_path

    return install


def test_the_newest_library_of_version_16_or_more_is_used(libraries):
    folder = libraries({"libLLVM-14.so.1": None, "libLLVM-17.so.1": 17, "libLLVM.so.19.1": 19, "libLLVM-16.so": 16})
    assert llvm.find_llvm() == folder / "libLLVM.so.19.1"


def test_older_libraries_are_never_used(libraries):
    libraries({"libLLVM-14.so.1": None, "libLLVM-15.so": None})
    assert llvm.find_llvm() is None


def test_a_library_that_reports_no_version_is_passed_over_whatever_its_name(libraries):
    folder = libraries({"libLLVM.so.20.1": None, "libLLVM.so.18.1": 18})
    assert llvm.find_llvm() == folder / "libLLVM.so.18.1"


def test_a_nameless_library_is_asked_and_others_of_llvm_are_not_taken(libraries):
    folder = libraries({"libLLVM.so": 18, "libLLVMCore.so.21": 21})
    assert llvm.find_llvm() == folder / "libLLVM.so"


def test_the_variable_is_honoured_only_if_new_enough(libraries, monkeypatch):
    folder = libraries({"libLLVM-15.so": None, "libLLVM-16.so": 16, "libLLVM-19.so": 19})
    monkeypatch.setenv("DRJIT_LIBLLVM_PATH", str(folder / "libLLVM-16.so"))
    assert llvm.find_llvm() == folder / "libLLVM-16.so"
    monkeypatch.setenv("DRJIT_LIBLLVM_PATH", str(folder / "libLLVM-15.so"))
    assert llvm.find_llvm() == folder / "libLLVM-19.so"


def test_what_is_no_llvm_has_no_version(tmp_path):
    (tmp_path / "libLLVM-19.so").write_bytes(b"not a library")
    assert llvm.llvm_version(str(tmp_path / "libLLVM-19.so")) is None
    assert llvm.llvm_version(str(tmp_path / "missing.so")) is None


@pytest.mark.parametrize(("root", "command"), [(0, "apt-get install"), (1000, "sudo apt-get install")])
def test_without_llvm_and_cuda_the_error_holds_the_command(monkeypatch, root, command):
    monkeypatch.setattr("os.geteuid", lambda: root)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    assert llvm.llvm_install_command() == f"{command} -y libllvm19"


def test_import_without_llvm_and_cuda_is_an_error_that_helps():
    code = """
from chanlab.channels import llvm
llvm._candidates = lambda: iter(())
llvm._cuda_libraries_load = lambda: False
try:
    llvm.import_sionna_rt()
except llvm.MissingDependencyError as error:
    assert llvm.llvm_install_command() in str(error), error
    print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"DRJIT_LIBLLVM_PATH": "/nowhere/libLLVM-15.so", "PATH": "/usr/bin:/bin"},
        cwd=Path(llvm.__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "refused", done.stderr


def test_status_survives_a_probe_that_dies(monkeypatch):
    monkeypatch.setattr(llvm, "find_llvm", lambda: Path("/some/libLLVM-19.so"))
    monkeypatch.setattr(llvm, "llvm_version", lambda path: 19)
    aborted = subprocess.CompletedProcess([], -6, "", "In function: drjit\nLLVM ERROR")
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: aborted)
    status = llvm.rt_status()
    assert status["works"] is False
    assert "LLVM ERROR" in status["remedy"]
    assert "libllvm19" in status["remedy"] or "LLVM" in status["remedy"]


def test_missing_sionna_is_an_error_that_helps(monkeypatch):
    monkeypatch.delitem(sys.modules, "sionna.rt", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install"):
        llvm.import_sionna_rt()


@pytest.mark.rt
def test_status_of_this_machine_says_that_tracing_works():
    status = llvm.rt_status()
    assert status["works"], status
    assert status["remedy"] is None
    assert status["variant"] in (llvm.LLVM_VARIANT, llvm.CUDA_VARIANT)
    assert llvm.import_sionna_rt().__name__ == "sionna.rt"
    assert llvm.import_sionna_rt() is sys.modules["sionna.rt"]
