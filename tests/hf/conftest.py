"""transformers keeps copies of the code of folders; here in a directory that goes with the tests."""

import atexit
import os
import shutil
import tempfile

os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp()
atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)
