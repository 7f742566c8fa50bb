"""Lines that a pass kept, moved, took away and added."""

from hypothesis import given
from hypothesis import strategies as st

from zero_fx.text_diff import compare, diff

LINES = st.lists(st.sampled_from(["%1: f32[2] = neg(%0)", "%2: f32[2] = exp(%1)", "%3: f32[2] = t(%9)", "return %3"]), max_size=30)


@given(LINES, LINES)
def test_kept_lines_are_equal_and_in_order_and_the_rest_is_told(old, new):
    found = compare(old, new)
    for i, j in (*found.kept, *found.moved):
        assert old[i] == new[j]
    for pairs in (found.kept, found.kept + found.moved):
        assert len({i for i, _ in pairs}) == len({j for _, j in pairs}) == len(pairs)
    assert list(found.kept) == sorted(found.kept) and all(a[1] < b[1] for a, b in zip(found.kept, found.kept[1:]))
    rows = diff("\n".join(old), "\n".join(new), context=100).splitlines()
    if old != new:
        assert [row[2:] for row in rows if row[0] in " -"] == old and [row[2:] for row in rows if row[0] in " +"] == new


def test_a_text_equals_itself_numbered_anew():
    assert diff("%1: f32[2] = neg(%0)\nreturn %1", "%7: f32[2] = neg(%6)\nreturn %7") == ""


def test_what_moved_is_known():
    found = compare(["a", "b", "c", "gather"], ["gather", "a", "b", "c"])
    assert found.kept == ((0, 1), (1, 2), (2, 3)) and found.moved == ((3, 0),)
    assert found.blocks() == [(0, 1, 3)]


def test_what_is_left_out_is_marked():
    old = [f"line {chr(97 + i)}" for i in range(20)]
    new = [*old[:3], "new", *old[4:15], *old[16:]]
    assert diff("\n".join(old), "\n".join(new)).splitlines() == [
        "  line c", "- line d", "+ new", "  line e", "...", "  line o", "- line p", "  line q",
    ]  # fmt: skip


def test_a_long_text_takes_little_time():
    """Three thousand blocks of equal lines, of which each one loses a line: quadratic for difflib."""
    block = ["%1: f32[2] = neg(%0)", "%2: f32[2] = exp(%1)", "%3: f32[2] = wait(%2)"]
    found = compare(block * 3000, block[:2] * 3000)
    assert len(found.kept) == 6000
