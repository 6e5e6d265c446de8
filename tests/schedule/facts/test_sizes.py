import pytest

from penstock.schedule.facts.errors import BudgetError
from penstock.schedule.facts.sizes import format_budget, format_size, format_time, parse_size


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (7, 7),
        ("7", 7),
        ("32MiB", 32 << 20),
        ("8GB", 8 * 10**9),
        ("1.5 kib", 1536),
        ("8G", 8 << 30),
        ("8g", 8 << 30),
        ("8Gi", 8 << 30),
        ("8GiB", 8 << 30),
        ("512m", 512 << 20),
        ("1e9", 10**9),
        (1e9, 10**9),
        ("1.5GB", 1_500_000_000),
        ("2e3 MB", 2 * 10**9),
        ("50%", 500),
        ("12.5%", 125),
        ("100%", 1000),
    ],
)
def test_sizes_as_users_write_them(size, nbytes):
    assert parse_size(size, total=1000) == nbytes


@pytest.mark.parametrize(
    "size", [0, -1, "0", "0%", "-5MiB", "", "many", "5 furlongs", "1e-3", "1e999", True, None, "nan"]
)
def test_what_is_no_budget_is_refused(size):
    with pytest.raises(BudgetError, match="budget"):
        parse_size(size, total=1000)


@pytest.mark.parametrize(
    ("size", "total", "words"),
    [
        ("0.5", 1000, "budget '0.5' is a fraction, not a number of bytes: write '50%'"),
        (0.125, 1000, "budget '0.125' is a fraction, not a number of bytes: write '12.5%'"),
        ("0.5", None, "budget '0.5' is a fraction, not a number of bytes: write bytes, '32MiB' or '8GB'"),
        (
            "1.5",
            1000,
            "budget '1.5' is a fraction, not a number of bytes: write bytes, '32MiB', '8GB' or '50%'",
        ),
    ],
)
def test_a_fraction_is_refused_as_what_it_is(size, total, words):
    with pytest.raises(BudgetError) as caught:
        parse_size(size, total=total)
    assert str(caught.value) == words


def test_a_percentage_needs_a_total():
    with pytest.raises(BudgetError, match="percentage"):
        parse_size("5%")
    for wrong in ("many", "5 furlongs"):
        with pytest.raises(BudgetError) as caught:
            parse_size(wrong)
        assert "%" not in str(caught.value)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (640, "640 B"), (1536, "1.50 KiB"), (3 << 29, "1.50 GiB"), (1 << 41, "2.00 TiB")],
)
def test_sizes_for_people(nbytes, text):
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("typed", "total", "text"),
    [
        ("16MB", 0, "16 MB (15.26 MiB)"),
        ("1.5GB", 0, "1.5 GB (1.40 GiB)"),
        ("8GB", 0, "8 GB (7.45 GiB)"),
        ("16MiB", 0, "16.00 MiB"),
        ("2.5 GiB", 0, "2.50 GiB"),
        ("50%", 20_976_896, "50% (10.00 MiB)"),
        ("33%", 20_976_896, "33% (6.60 MiB)"),
        ("100%", 20_976_896, "100% (20.01 MiB)"),
        ("16MB", 20_976_896, "16 MB (15.26 MiB)"),
        ("12345678", 20_976_896, "11.77 MiB"),
        ("640", 0, "640 B"),
    ],
)
def test_a_budget_is_repeated_as_it_was_typed(typed, total, text):
    assert format_budget(parse_size(typed, total=total or None), total) == text


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1530, "1.53 us"),
        (1.53e6, "1.53 ms"),
        (2e9, "2 s"),
        (999.6e9, "1000 s"),
        (12_345e9, "12345 s"),
    ],
)
def test_times_for_people(ns, text):
    assert format_time(ns) == text


@pytest.mark.parametrize("nbytes", [1, 1023, 1025, 4_280_432, 2**20 - 1, 2**30 + 1, 3 * 2**40 + 7])
def test_a_least_size_is_enough_when_it_is_given_back(nbytes):
    assert nbytes <= parse_size(format_size(nbytes, up=True)) <= nbytes * 1.01 + 11
