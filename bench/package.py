"""Makes the package importable from a clone of any folder name, installed or not."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("qwen_l40s") is None:
    root = Path(__file__).resolve().parent.parent
    spec = importlib.util.spec_from_file_location(
        "qwen_l40s", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    sys.modules["qwen_l40s"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["qwen_l40s"])
