"""For the tests of the intake."""

import pytest
from support.intakes import ONE_GROUP, make_intake, make_offers

from areal_rloo.intake.intake import Intake


@pytest.fixture
def intake() -> Intake:
    """Groups of two, batches of one group, no staleness."""
    return make_intake(make_offers(), *ONE_GROUP)
