from dataclasses import replace

import pytest
from random_drops import RandomDrops, recipe_text

from chanlab.data.recipe import build_source, find_recipe, load_recipe, parse_recipe
from chanlab.errors import UsageError


def test_recipe_keeps_its_text_and_values():
    text = recipe_text(samples=40, shard_size=8, seed=3)
    recipe = parse_recipe(text)
    assert (recipe.name, recipe.seed, recipe.samples, recipe.num_shards) == ("random_drops", 3, 40, 5)
    assert recipe.text == text == recipe.to_yaml()
    assert recipe.source["init_args"]["carrier"] == 3.5e9  # YAML 1.1 reads 3.5e9 as text
    assert recipe.shard_range(4) == range(32, 40)


def test_changed_recipe_writes_its_own_yaml():
    recipe = replace(parse_recipe(recipe_text()), samples=7)
    assert parse_recipe(recipe.to_yaml()) == recipe


def test_comments_and_order_are_no_difference_but_values_are():
    recipe = parse_recipe(recipe_text())
    assert recipe.differences(parse_recipe("# other\n" + recipe.to_yaml())) == []
    other = parse_recipe(recipe_text(seed=2, anchors=5))
    assert recipe.differences(other) == ["seed", "source.init_args.anchors"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("samples: 40", "sample: 40"), r"unknown key sample; known keys are name, seed, samples, source, shard_size"),
        (("samples: 40\n", ""), r"samples missing"),
        (("samples: 40", "samples: many"), r"samples must be of type int, not 'many'"),
        (("samples: 40", "samples: 0"), r"samples must be at least 1"),
        (("seed: 1", "seed: -1"), r"seed must be at least 0"),
        (("seed: 1", "seed: 1\nseed: 2"), r"key given twice: \['seed'\]"),
        (("  class_path: random_drops.RandomDrops\n", ""), r"source takes class_path and init_args"),
        (("name:", "name: ]"), r"is not valid YAML"),
    ],
)
def test_errors_name_the_key(change, message):
    with pytest.raises(UsageError, match=message):
        parse_recipe(recipe_text().replace(*change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("num_paths: 6", "num_pats: 6"), r"has no argument num_pats; it takes carrier, num_paths, anchors, group"),
        (("num_paths: 6", "num_paths: six"), r"num_paths"),
        (("RandomDrops", "Random"), r"can't be imported.*package.module.Class"),
        (("random_drops.RandomDrops", "no_such_package.X"), r"can't be imported"),
        (("random_drops.RandomDrops", "pathlib.Path"), r"num_paths|carrier|Source"),
    ],
)
def test_errors_of_the_source(change, message):
    with pytest.raises(UsageError, match=message):
        build_source(parse_recipe(recipe_text().replace(*change)))


def test_source_is_built_from_typed_arguments():
    source = build_source(parse_recipe(recipe_text(anchors=4)))
    assert isinstance(source, RandomDrops)
    assert (source.anchors, source.num_paths, source.carrier) == (4, 6, 3.5e9)


def test_shards_hold_whole_groups():
    with pytest.raises(UsageError, match="use 9"):
        build_source(parse_recipe(recipe_text(shard_size=8, group=3)))


def test_recipes_are_found_by_short_name_and_by_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "mine.yaml").write_text(recipe_text())
    (tmp_path / "models" / "csi").mkdir(parents=True)
    (tmp_path / "models" / "csi" / "net.yaml").write_text("{}")
    assert load_recipe("mine") == load_recipe(tmp_path / "datasets" / "mine.yaml") == load_recipe("datasets/mine.yaml")
    assert find_recipe("models", "csi/net") == find_recipe("models", "net")
    with pytest.raises(UsageError, match=r"no recipe named other.*known datasets are .*mine"):
        load_recipe("other")
    with pytest.raises(UsageError, match="no recipe file"):
        load_recipe("other.yaml")


def test_a_short_name_that_fits_two_recipes_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("csi", "jscc"):
        (tmp_path / "models" / folder).mkdir(parents=True)
        (tmp_path / "models" / folder / "a_net.yaml").write_text("{}")
    with pytest.raises(UsageError, match="csi/a_net, jscc/a_net"):
        find_recipe("models", "a_net")
    assert find_recipe("models", "jscc/a_net").parent.name == "jscc"
