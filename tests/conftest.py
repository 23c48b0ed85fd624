"""What holds for all tests?"""

import os

# The tests' tensors are tiny: a second thread would only wait, and for long on a busy machine
os.environ.setdefault("OMP_NUM_THREADS", "1")
