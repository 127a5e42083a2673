from dataclasses import dataclass

import pytest

from dovetail.blocks.options import check_network, check_options
from dovetail.errors import UserError


@dataclass(frozen=True)
class Options:
    size: float


@pytest.mark.parametrize(
    ("kind", "fits", "refused", "wanted"),
    [
        ("positive", 0.1, 0, "more than 0"),
        ("non_negative", 0, -1, "0 or more"),
        ("at_least_one", 1, 0, "1 or more"),
        ("fraction", 1, 1.5, "0 to 1"),
        ("fraction", 0, -0.5, "0 to 1"),
        ("inner_fraction", 0.5, 0, "more than 0 and less than 1"),
        ("inner_fraction", 0.5, 1, "more than 0 and less than 1"),
    ],
)
def test_an_option_out_of_its_range_is_refused(kind, fits, refused, wanted):
    check_options(Options(fits), **{kind: ("size",)})
    with pytest.raises(UserError, match=f"^--size is {refused}: give {wanted}\\.$"):
        check_options(Options(refused), **{kind: ("size",)})


def test_a_network_without_units_or_with_an_unknown_activation_is_refused():
    check_network((64, 64), "relu")
    with pytest.raises(UserError, match="--hidden-sizes"):
        check_network((64, 0), "relu")
    with pytest.raises(UserError, match="softrelu"):
        check_network((64,), "softrelu")
