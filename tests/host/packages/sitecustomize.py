"""Python reads this at its start: what ComfyUI's own Python lacks (pytest, diffusers) is taken from
the environment of this project, after everything of its own.
"""

import os
import sys

sys.path.extend(os.environ["QWEN_L40S_PACKAGES"].split(os.pathsep))
