"""A test's additions to a table are removed after the test."""

import pytest


@pytest.fixture(autouse=True)
def _tables(tables_as_they_were: None) -> None:
    pass
