"""What a test adds to a table is gone when the test is over."""

import pytest


@pytest.fixture(autouse=True)
def _tables(tables_as_they_were: None) -> None:
    pass
