import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from killing import complete_shards, computed, on_step, run, steps_of
from random_drops import recipe_text

from chanlab.data import writer
from chanlab.data.generate import generate
from chanlab.data.recipe import parse_recipe
from chanlab.data.store import Store
from chanlab.errors import StoreError

SAMPLES, SHARD_SIZE = 24, 6


def _text(tmp_path: Path, delay: float = 0.0) -> str:
    (tmp_path / "log").mkdir(exist_ok=True)
    return recipe_text(SAMPLES, SHARD_SIZE, log=str(tmp_path / "log"), delay=delay)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Content hash and steps of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    steps = steps_of(_text(folder), folder / "store")
    return Store(folder / "store").content_hash, steps


def _resume(text: str, out: Path, tmp_path: Path, content_hash: str) -> None:
    """Finish a killed run; nothing complete is touched, and the result is that of an undisturbed run."""
    before = complete_shards(out)
    samples = computed(tmp_path / "log", before, SHARD_SIZE)
    store = generate(parse_recipe(text), out, progress=False)
    after = complete_shards(out)
    assert before == {name: after[name] for name in before}
    assert samples == computed(tmp_path / "log", before, SHARD_SIZE)
    assert store.content_hash == content_hash
    assert store.verify().ok
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", *sorted(after)]


# A file is written in 4 steps: write, sync, rename, sync of the folder; killed before each. Files: the first manifest,
# then for each shard the shard and the manifest, then the manifest with the content hash.
EXACT = [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 14, 17, 34, 35, 36, 38, 39]


@pytest.mark.parametrize("step", EXACT)
def test_kill_exactly_between_two_steps(step, undisturbed, tmp_path):
    content_hash, steps = undisturbed
    assert len(steps) == 4 * (1 + 2 * SAMPLES // SHARD_SIZE + 1)
    text, out = _text(tmp_path), tmp_path / "store"
    assert run(text, out, kill_before=step) == -signal.SIGKILL
    _resume(text, out, tmp_path, content_hash)


def test_kills_at_random_instants(undisturbed, tmp_path):
    text, out = _text(tmp_path, delay=0.03), tmp_path / "store"
    seed = random.randrange(10**6)
    print("seed", seed)
    instants = random.Random(seed)
    kills = 0
    while kills < 8:
        before = complete_shards(out) if out.exists() else {}
        kills += run(text, out, kill_after=instants.uniform(0.0, 0.3)) == -signal.SIGKILL
        after = complete_shards(out) if out.exists() else {}
        assert before == {name: after[name] for name in before}
        if len(after) == SAMPLES // SHARD_SIZE:
            break
    out.mkdir(exist_ok=True)
    content_hash = undisturbed[0]
    _resume(text, out, tmp_path, content_hash)


def test_kill_of_the_parent_ends_its_workers(undisturbed, tmp_path):
    text, out = _text(tmp_path, delay=0.2), tmp_path / "store"
    (tmp_path / "recipe.yaml").write_text(text)
    code = (
        "from chanlab.data.generate import generate\n"
        f"if __name__ == '__main__': generate({str(tmp_path / 'recipe.yaml')!r}, {str(out)!r}, workers=2)"
    )
    (tmp_path / "main.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, str(tmp_path / "main.py")], env=environment)
    deadline = time.monotonic() + 120
    while not list(out.glob("shard-*.h5")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pids = {int(path.name.split("-")[1]) for path in (tmp_path / "log").iterdir()}
    assert process.pid not in pids
    process.kill()
    process.wait()
    _resume(text, out, tmp_path, undisturbed[0])
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_interrupt_says_what_is_complete(undisturbed, tmp_path):
    text, out = _text(tmp_path), tmp_path / "store"

    def interrupt(number, name, arguments):
        if number == 14:  # between sync and rename of the second shard
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        for step in ("_write", "_sync", "_rename", "_sync_folder"):
            patch.setattr(writer, step, getattr(writer, step))
        on_step(interrupt)
        with pytest.raises(KeyboardInterrupt, match="1 of 4 shards are complete; run the same"):
            generate(parse_recipe(text), out, progress=False)
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "shard-00000.h5"]
    _resume(text, out, tmp_path, undisturbed[0])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_failing_disk_leaves_what_is_complete(code, undisturbed, tmp_path, monkeypatch):
    text, out = _text(tmp_path), tmp_path / "store"
    syncs = 0

    def sync(descriptor):
        nonlocal syncs
        syncs += 1
        if syncs == 6:  # the third shard's
            raise OSError(code, os.strerror(code))
        os.fsync(descriptor)

    monkeypatch.setattr(writer, "_sync", sync)
    message = {errno.ENOSPC: "disk is full.*2 of 4 shards are complete", errno.EROFS: "read-only"}.get(
        code, "can't write"
    )
    with pytest.raises(StoreError, match=message):
        generate(parse_recipe(text), out, progress=False)
    monkeypatch.undo()
    assert sorted(p.name for p in out.iterdir()) == ["manifest.json", "shard-00000.h5", "shard-00001.h5"]
    with pytest.raises(StoreError, match=r"not complete \(2 of 4 shards\).*partial=True"):
        Store(out)
    assert Store(out, partial=True).num_samples == 12
    _resume(text, out, tmp_path, undisturbed[0])


def test_a_limit_on_file_size_is_a_clear_error(tmp_path):
    text, out = _text(tmp_path), tmp_path / "store"

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
        os.close(2)

    assert run(text, out, prepare=limit) == 1
    assert [path.name for path in out.iterdir()] == ["manifest.json"]


_ON_A_SMALL_DISK = """
import errno, os, subprocess, sys
from pathlib import Path
from chanlab.data.generate import generate
from chanlab.data.store import Store
from chanlab.errors import StoreError

disk, recipe = Path(sys.argv[1]), sys.argv[2]
try:
    generate(recipe, disk / "store", progress=False)
    raise SystemExit("the disk should be full")
except StoreError as error:
    print(error)
done = Store(disk / "store", partial=True).num_samples
assert not [p for p in (disk / "store").iterdir() if p.suffix == ".tmp"]
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
try:
    generate(recipe, disk / "store", progress=False)
    raise SystemExit("the disk should be read-only")
except StoreError as error:
    print(error)
assert Store(disk / "store", partial=True).links([0]).num_users == 1
subprocess.run(["mount", "-o", "remount,rw,size=1m", disk], check=True)
store = generate(recipe, disk / "store", progress=False)
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
assert generate(recipe, disk / "store", progress=False).verify().ok
print(done, store.content_hash)
"""


def test_full_and_read_only_disk(undisturbed, tmp_path):
    disk, recipe = tmp_path / "disk", tmp_path / "recipe.yaml"
    disk.mkdir()
    recipe.write_text(_text(tmp_path))
    (tmp_path / "main.py").write_text(_ON_A_SMALL_DISK)
    mount = f"mount -t tmpfs -o size=80k tmpfs {disk}"
    alone = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    try:
        subprocess.run([*alone, mount], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a mount namespace of its own to make a small disk")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = f"{mount} && exec {sys.executable} {tmp_path / 'main.py'} {disk} {recipe}"
    result = subprocess.run([*alone, command], env=environment, text=True, capture_output=True)
    assert result.returncode == 0, result.stdout + result.stderr
    full, read_only, done = result.stdout.splitlines()
    complete = int(done.split()[0]) // SHARD_SIZE
    assert 0 < complete < 4
    assert f"the disk is full. {complete} of 4 shards are complete" in full
    assert "run the same `chanlab generate` again" in full
    assert "it is read-only for this user; choose another --out folder" in read_only
    assert done.split()[1] == undisturbed[0]


def test_a_second_writer_is_told_who_the_first_is(tmp_path):
    text, out = _text(tmp_path), tmp_path / "store"
    out.mkdir()
    with writer.writer_lock(out), pytest.raises(StoreError, match=rf"another process \(pid {os.getpid()} on "):
        generate(parse_recipe(text), out, progress=False)
    generate(parse_recipe(text), out, progress=False)
