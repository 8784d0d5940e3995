"""Everything static is in pyproject.toml; this only ships the recipes and weights that live beside the package.

`datasets/*.yaml`, `models/**/*.yaml` and `models/**/*.safetensors` go into wheels as `chanlab/_recipes/datasets` and
`chanlab/_recipes/models`, so that they are found by their short names outside a checkout. Editable installs read the
checkout itself.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).absolute().parent


class BuildWithRecipes(build_py):
    """`build_py` that copies the recipes below the package."""

    def recipes(self) -> dict[str, str]:
        """Where each recipe goes, and where it comes from (relative to the root, as setuptools wants it)."""
        found = (ROOT.glob(pattern) for pattern in ("datasets/*.yaml", "models/**/*.yaml", "models/**/*.safetensors"))
        sources = [path for paths in found for path in paths]
        relative = sorted(path.relative_to(ROOT).as_posix() for path in sources)
        return {str(Path(self.build_lib, "chanlab", "_recipes", path)): path for path in relative}

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for target, source in self.recipes().items():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, *self.recipes()]

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *self.recipes().values()]


setup(cmdclass={"build_py": BuildWithRecipes})
