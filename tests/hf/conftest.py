"""transformers keeps copies of code, and datasets of tables; here in directories that go with the tests."""

import atexit
import os
import shutil
import tempfile

for _name in ("HF_MODULES_CACHE", "HF_DATASETS_CACHE"):
    os.environ[_name] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ[_name], ignore_errors=True)
