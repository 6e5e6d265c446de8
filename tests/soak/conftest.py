from tests.cheap_plans import cheap_plans  # noqa: F401
