"""`python -m qwen_l40s ...` when installed, `python path/to/this/folder ...` from any clone."""

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def _package_from_folder() -> None:
    """Makes the folder importable as `qwen_l40s`; a clone's own name may be `my-pack.v2`."""
    # Not resolved: a link in custom_nodes tells which ComfyUI this is for.
    root = Path(os.path.abspath(__file__)).parent
    # Python put the folder itself first on sys.path; there our `cli` or `tools` would shadow other
    # people's modules.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != root.resolve()]
    spec = spec_from_file_location(
        "qwen_l40s", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    module = module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules["qwen_l40s"] = module
    spec.loader.exec_module(module)  # type: ignore[union-attr]


if __name__ == "__main__":
    if not __package__:
        _package_from_folder()
    from qwen_l40s.cli import main

    sys.exit(main())
