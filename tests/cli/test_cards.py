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


def test_cards_are_stable_and_check_says_so(card):
    assert main([str(card), "--check"]) == 1
    assert "old" in card.read_text()
    assert main([str(card)]) == 0
    assert main([str(card), "--check"]) == 0


def test_plot_is_drawn_beside_the_card(card):
    marker = "<!-- results: plot rows=system columns=horizon metric=nmse snr_db=15 file=nmse.png -->\n<!-- /results -->"
    assert "![nmse over horizon](nmse.png)" in render(marker, card)
    assert (card.parent / "nmse.png").read_bytes().startswith(b"\x89PNG")


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
