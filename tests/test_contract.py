"""The contract of the operators is a table that can be asked."""

import pytest

from npu.contract import CHIPS, DEFAULT, INFERENCE, LIMITS, TRAINING, Profile


def test_the_default_is_a2_with_a_current_release_and_a3_is_the_same() -> None:
    assert Profile() == DEFAULT == Profile("A2", "8.5")
    assert [limit.value for limit in Profile("A3")] == [limit.value for limit in DEFAULT]


def test_every_row_names_its_source_and_is_found_by_its_name() -> None:
    for limit in LIMITS:
        assert limit.source
        assert DEFAULT[limit.operator, limit.name] is limit
        assert limit.name in str(limit)
        assert limit.source in str(limit)


def test_unknown_combinations_are_refused_with_what_is_known() -> None:
    with pytest.raises(
        ValueError, match=r"^`chip`: 'A9'\. Known are A2, A3, 950, 310P\. .*\n`cann`: '7\.0'\. Known are 8\.3"
    ):
        Profile("A9", "7.0")
    for chip in set(CHIPS) - {"A2", "A3"}:
        for operator in (INFERENCE, TRAINING):
            with pytest.raises(NotImplementedError, match=rf"^{operator} on {chip}: .* Plans are made for A2, A3\."):
                Profile(chip).limits(operator)


def test_a_name_that_is_no_row() -> None:
    with pytest.raises(KeyError, match=r"no limit called 'most_luck'. It has dtypes, widths"):
        DEFAULT[INFERENCE, "most_luck"]
    with pytest.raises(TypeError, match=r"dtypes of npu_fusion_attention is .* not a number"):
        _ = DEFAULT[TRAINING, "dtypes"].number
