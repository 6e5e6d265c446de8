import pytest

from tests.cheap_plans import cheap_plans  # noqa: F401
from tests.schedule.report.report_browser import open_browser


@pytest.fixture(scope="module")
def browser():
    driver = open_browser()
    yield driver
    driver.quit()
