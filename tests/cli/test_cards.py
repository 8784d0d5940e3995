import pytest

from chanlab.cli.cards import main, render
from chanlab.errors import UsageError
from chanlab.records import record, save_records

TABLE = "<!-- results: table rows=system columns=horizon metric=nmse snr_db=15 -->\nold\n<!-- /results -->"


@pytest.fixture
def card(tmp_path):
    made = [
        record(
            system=system,
            data="street",
            condition={"snr_db": snr, "horizon": horizon},
            metric="nmse",
            value=-horizon - snr / 10,
            deviation=0.25 if system == "llm" else None,
            unit="dB",
            command="chanlab test --config ar",
        )
        for system in ("no prediction", "llm")
        for snr in (5, 15)
        for horizon in (1, 2)
    ]
    save_records(tmp_path / "results.json", made)
    path = tmp_path / "README.md"
    path.write_text(f"# Card\n\n{TABLE}\n\nafter\n")
    return path


def test_table_is_made_from_the_records(card):
    assert main([str(card.parent)]) == 0
    text = card.read_text()
    assert "| no prediction | -2.5 | -3.5 |" in text
    assert "| llm | -2.5 ± 0.2 | -3.5 ± 0.2 |" in text
    assert "chanlab test --config ar" in text
    assert "old" not in text
    assert text.endswith("<!-- /results -->\n\nafter\n")


def test_further_fields_stand_beside_the_value(card):
    made = [
        record(system=s, metric="forward ms", value=v, unit="ms", **more)
        for s, v, more in (("a", 2, {"peer": 3.0}), ("b", 4, {}))
    ]
    save_records(card.parent / "results.json", made)
    text = render(
        "<!-- results: table rows=system columns=metric fields=value|peer unit=ms -->\n<!-- /results -->", card
    )
    assert "| system | forward [ms] | forward, peer |" in text
    assert "| a | 2.0 | 3.0 |" in text
    assert "| b | 4.0 | – |" in text


def test_cards_are_stable_and_check_says_so(card):
    assert main([str(card), "--check"]) == 1
    assert "old" in card.read_text()
    assert main([str(card)]) == 0
    assert main([str(card), "--check"]) == 0


def test_plot_is_drawn_beside_the_card(card):
    marker = "<!-- results: plot rows=system columns=horizon metric=nmse snr_db=15 file=nmse.png -->\n<!-- /results -->"
    assert "![nmse over horizon](nmse.png)" in render(marker, card)
    assert (card.parent / "nmse.png").read_bytes().startswith(b"\x89PNG")


def test_panels_and_intervals(card):
    made = [
        record(
            system=system,
            condition={"duplex": duplex, "speed": speed},
            metric="nmse",
            value=speed / 100,
            low=speed / 200,
            high=speed / 50,
            command="",
        )
        for system in ("a", "b")
        for duplex in ("tdd", "fdd")
        for speed in (1.0, 30.0)
    ]
    save_records(card.parent / "results.json", made)
    marker = (
        "<!-- results: plot rows=system columns=speed panels=duplex metric=nmse duplex=tdd|fdd system=a|b log=true -->"
    )
    render(f"{marker}\n<!-- /results -->", card)
    png = (card.parent / "nmse.png").read_bytes()
    assert int.from_bytes(png[16:20]) > 1.2 * int.from_bytes(png[20:24])  # side by side
    render(f"{marker.replace(' panels=duplex', '').replace('|fdd', '')}\n<!-- /results -->", card)
    assert (card.parent / "nmse.png").read_bytes() != png


def test_figures_of_several_kinds_beside_published_ones(card):
    """A column per metric, set and band; rows in the order asked for; the source in place of a command."""
    ours = [
        record(system="ours", split=split, condition={"duplex": duplex}, metric="nmse", value=0.1, command="measure")
        for split in ("regular", "other")
        for duplex in ("fdd", "tdd")
    ]
    ours += [
        record(system="ours", metric="parameters", value=5_591_350, command="measure"),
        record(system="ours", metric="latency", value=2.345, unit="ms", condition={"mode": "eager"}, command="measure"),
        record(system="our_other", metric="parameters", value=12, command="measure"),
    ]
    save_records(card.parent / "results.json", ours)
    published = {"system": "theirs", "split": "regular", "metric": "nmse", "unit": "", "source": "arXiv 1, table 2"}
    save_records(card.parent / "published.json", [{**published, "condition": {"duplex": "tdd"}, "value": 0.2}])
    marker = (
        "<!-- results: table rows=system columns=metric,split,duplex metric=parameters|latency|nmse split=|regular "
        "duplex=None|tdd|fdd system=theirs|our* digits=nmse:3|latency:2|parameters:1 -->\n<!-- /results -->"
    )
    lines = render(marker, card).splitlines()
    assert lines[1] == "| system | parameters | latency [ms] | nmse, regular, tdd | nmse, regular, fdd |"
    assert lines[3] == "| theirs | – | – | 0.200 | – |"
    assert lines[4] == "| ours | 5.6 M | 2.35 | 0.100 | 0.100 |"
    assert lines[5].startswith("| our_other | 12.0 |")
    assert "<sub>arXiv 1, table 2</sub>" in lines[7]
    assert "`measure`" in lines[8]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("metric=nmse", "metric=other", "no record"),
        (" snr_db=15", "", "narrow"),
        ("columns=horizon", "", "columns="),
        ("results: table", "results: pie", "table or plot"),
    ],
)
def test_markers_that_cannot_be(old, new, said, card):
    with pytest.raises(UsageError, match=said):
        render(TABLE.replace(old, new), card)
