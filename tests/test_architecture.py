"""Who may know whom: the contracts of pyproject.toml, and what they can't express."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def imports(path):
    """Names of modules that a file imports, anywhere in it, the dynamic `import_module("...")` included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            yield from (str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant))


def test_contracts_of_import_linter():
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_sionna_rt_is_imported_by_channels_llvm_first():
    """Importing it without a fitting libLLVM aborts the process; the tracer reaches a part of it only after that."""
    files = (ROOT / "chanlab").rglob("*.py")
    found = {
        path.relative_to(ROOT).as_posix() for path in files if any(n.startswith("sionna.rt") for n in imports(path))
    }
    assert found <= {"chanlab/channels/llvm.py", "chanlab/channels/tracer.py"}


def test_no_pickle_is_read():
    found = [path for path in (ROOT / "chanlab").rglob("*.py") if {"pickle", "joblib", "dill"} & set(imports(path))]
    assert not found
