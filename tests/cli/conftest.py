import pytest

from chanlab.cli.main import main


@pytest.fixture(scope="session")
def two_ray(tmp_path_factory):
    """A small store of the two_ray recipe, made by the command line; not to be changed."""
    path = tmp_path_factory.mktemp("cli") / "two_ray"
    assert main(["generate", "two_ray", "--out", str(path), "--samples", "40", "--quiet"]) == 0
    return path
