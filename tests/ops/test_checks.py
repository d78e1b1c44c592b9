import numpy as np
import pytest

from keras_auxref.ops.checks import whole_number, whole_number_or_none


def test_whole_numbers_are_those_of_python_and_numpy():
    assert [whole_number("n", n) for n in (1, np.int32(7), np.uint8(3))] == [1, 7, 3]
    assert type(whole_number("n", np.int64(2))) is int
    assert whole_number_or_none("n", None) is None
    assert whole_number_or_none("n", 0, least=0) == 0


@pytest.mark.parametrize("value", [0, -1, True, 2.0, np.float32(2), "2", [2]])
def test_nothing_else_is(value):
    with pytest.raises(ValueError, match=r"`n` must be a positive integer. Expected 1, 2, 3, … Received: "):
        whole_number("n", value)
    with pytest.raises(ValueError, match=r"`n` must be None or a positive integer. Expected None, 1, 2, 3, … Received: "):
        whole_number_or_none("n", value)


def test_the_least_one_is_named():
    with pytest.raises(ValueError, match=r"`bins` must be a whole number. Expected 2, 3, 4, … Received: 1"):
        whole_number("bins", 1, least=2)
    with pytest.raises(ValueError, match="Received: None"):
        whole_number("bins", None)
