"""transformers keeps copies of code, and datasets of tables; here in directories that go with the tests. And PyTorch
uses one thread in each process of tests: with as many as there are cores, two processes are no faster than one."""

import atexit
import os
import shutil
import tempfile

os.environ["OMP_NUM_THREADS"] = "1"
for _name in ("HF_MODULES_CACHE", "HF_DATASETS_CACHE"):
    os.environ[_name] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ[_name], ignore_errors=True)
