"""Posts workflows to ComfyUI servers, follows them and fetches their results."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fleet import Fleet, JobError, Result

__all__ = ["Fleet", "JobError", "Result"]


def __getattr__(name: str) -> Any:
    """Imports aiohttp only where it is used."""
    if name not in __all__:
        raise AttributeError(name)
    from . import fleet

    return getattr(fleet, name)
