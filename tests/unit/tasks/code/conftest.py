"""Skip what needs a sandbox on kernels without one."""

import pytest

from areal_rloo.errors import PreflightError
from areal_rloo.tasks.tools.landlock import landlock_version


@pytest.fixture(scope="session")
def sandbox() -> None:
    try:
        landlock_version()
    except PreflightError as error:
        pytest.skip(str(error))
