"""What holds for all tests?"""

import os

from hypothesis import Phase, settings

# The tests' tensors are tiny: a second thread would only wait, and for long on a busy machine
os.environ.setdefault("OMP_NUM_THREADS", "1")

# For those who ask only whether a test fails: `pytest --hypothesis-profile=no_shrink`
settings.register_profile(
    "no_shrink", phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False, print_blob=False
)
