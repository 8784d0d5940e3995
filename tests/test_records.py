import json

import pytest

from chanlab.errors import UsageError
from chanlab.records import FIELDS, key, load_records, over_seeds, record, save_records, select


def make(system="ar", value=0.5, **more):
    more.setdefault("condition", {"snr_db": 15, "horizon": 1})
    return record(
        system=system, data="street", split="test", metric="nmse_pooled", value=value, n=10, seeds=[1], **more
    )


def test_record_has_every_field_in_order():
    made = make(peer=0.4, ratio=1.25)
    assert tuple(made)[: len(FIELDS)] == FIELDS
    assert made["ratio"] == 1.25
    assert "cores" in made["hardware"]
    json.dumps(made)


def test_newer_record_replaces_the_older(tmp_path):
    path = tmp_path / "deep" / "results.json"
    save_records(path, [make(value=0.5), make("pad", 0.2)])
    items = save_records(path, [make(value=0.25)])
    assert items == load_records(path)
    assert [item["value"] for item in items] == [0.25, 0.2]
    assert len(select(items, system="pad", snr_db=15)) == 1
    assert select(items, horizon=3) == []
    assert len(save_records(path, [make()], replace=True)) == 1
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]


def test_key_ignores_the_order_of_conditions():
    assert key(make(condition={"a": 1, "b": 2})) == key(make(condition={"b": 2, "a": 1}))


def test_runs_over_seeds_become_mean_and_deviation():
    runs = [make(value=v) | {"seeds": [s], "low": v - 1} for s, v in ((1, 1.0), (2, 2.0), (3, 6.0))]
    joined, other = over_seeds([*runs, make("pad", 0.2)])
    assert joined["value"] == pytest.approx(3.0)
    assert joined["deviation"] == pytest.approx(7**0.5)
    assert joined["seeds"] == [1, 2, 3]
    assert joined["n"] == 30
    assert "low" not in joined
    assert other["value"] == 0.2
    assert tuple(joined)[: len(FIELDS)] == FIELDS


def test_not_a_number_is_null():
    assert make(value=float("nan"))["value"] is None


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"system": "ar"}]'])
def test_broken_file_is_the_users_error(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(UsageError, match=r"results\.json"):
        load_records(tmp_path / "results.json")
