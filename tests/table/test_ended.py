"""sys.exit() in code that should have returned is a failure, unless its code says so itself."""

import sys

import pytest

from plait.messages.ended import EndedError, to_its_end


@pytest.mark.parametrize(
    ("code", "said"), [((), r"SystemExit"), ((0,), "SystemExit: 0"), (("text",), "SystemExit: text")]
)
def test_an_end_that_would_seem_done_is_an_error_with_its_line(code: tuple[object, ...], said: str) -> None:
    def loss_fn() -> None:
        sys.exit(*code)  # type: ignore[arg-type]

    with pytest.raises(EndedError, match=rf"test_ended\.py:\d+ ended the program in loss_fn \({said}\)"), to_its_end():
        loss_fn()


def test_codes_and_exceptions_pass() -> None:
    for error in (SystemExit(3), KeyError("x")):
        with pytest.raises(type(error)) as caught, to_its_end():
            raise error
        assert caught.value is error
    with to_its_end():
        pass
