"""The rows of the table of flags."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.cli.flags import FLAGS, NotGiven, comma_list


def test_flags_of_two_words_have_both_spellings_and_a_variable() -> None:
    flag = next(flag for flag in FLAGS if flag.dest == "nproc_per_node")
    assert flag.spellings == ("--nproc-per-node", "--nproc_per_node")
    assert flag.env == "PET_NPROC_PER_NODE"


def test_our_flags_have_variables_of_ours() -> None:
    others = {"BOOTSEER_CACHE_DIR": "BOOTSEER_KEEP_CACHE_DIR"}  # where hot imports are remembered
    names = ["BOOTSEER_" + flag.dest.upper() for flag in FLAGS if flag.ours]
    assert {flag.env for flag in FLAGS if flag.ours} == {others.get(name, name) for name in names}


def test_no_spelling_occurs_twice() -> None:
    spellings = [name for flag in FLAGS for name in flag.spellings]
    assert len(spellings) == len(set(spellings))


def test_a_doubled_comma_is_a_comma() -> None:
    assert comma_list("a,,b,c") == ["a,b", "c"]


@given(
    st.lists(
        st.text(alphabet="ab, ", min_size=1).filter(lambda t: not t.startswith(",") and t[-1] != ","), min_size=1
    )
)
def test_comma_lists_come_back(items: list[str]) -> None:
    assert comma_list(",".join(item.replace(",", ",,") for item in items)) == items


def test_not_given_is_its_number() -> None:
    assert NotGiven(0) == 0 and not isinstance(0, NotGiven)
