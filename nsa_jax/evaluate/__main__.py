"""python -m nsa_jax.evaluate"""

import sys

from nsa_jax.evaluate.command import main

sys.exit(main())
