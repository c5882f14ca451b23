"""The buffers of one shape of a pass, which all its blocks use."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ...spec import RowFormat
from ..attention_8bit import Heads
from ..reference import Modulation, QuantizedRows, Tokens, storage_of
from .products import Rows

if TYPE_CHECKING:
    from .workspace import Workspace

SCALES_AT_ONCE = 4  # fp32 in 16 bytes


class Shape:
    """The buffers of one shape, and the launches between products.

    Attributes:
        rows: What the first layers of attention and of the MLP read.
        mixed: What attention's last layers read.
        activated: What the MLP's last layers read.
        branch: (rows, D), what attention or MLP gives.
    """

    def __init__(self, workspace: Workspace, tokens: Tokens, x: torch.Tensor, inner: int) -> None:
        # Which has this one: in a circle the buffers would wait for Python's collector.
        self._workspace = weakref.proxy(workspace)
        self.ops, self.tokens = workspace.ops, tokens
        self.like, self.width, self.inner = x.new_empty(0), x.shape[1], inner
        widest = max(3 * self.width, inner)
        # q, k and v are read before the MLP's hidden rows are written.
        self.wide = workspace.take("wide", (tokens.rows, widest), self.like).flatten()
        self.branch = workspace.take("branch", (tokens.rows, self.width), self.like)
        # A row of h is written after the same row of the branch has been read.
        self.rows, self.mixed = Rows(self.branch), Rows()
        self.activated = Rows(self.cut_wide(inner))
        self._norms: dict[tuple, Callable[..., None]] = {}

    def cut_wide(self, columns: int, index: int = 0) -> torch.Tensor:
        """(rows, columns) of the widest buffer, the `index`-th of them."""
        size = self.tokens.rows * columns
        return self.wide[index * size : (index + 1) * size].view(self.tokens.rows, columns)

    def quantized(self, rows: Rows, columns: int, format: RowFormat) -> QuantizedRows:
        """Where rows of a format go: all share one buffer, as each is read before the next."""
        found = rows.quantized.get(format)
        if found is None:
            tokens = self.tokens
            # Joint order has text first too, where there is one item.
            cut = tokens.text_rows if rows is not self.mixed or tokens.batch == 1 else tokens.rows
            gap = -cut % SCALES_AT_ONCE if cut < tokens.rows else 0
            take = self._workspace.take
            values = take(str(format), (tokens.rows, columns), self._of(storage_of(format)))
            scale = take(f"{format} scale", (tokens.rows + gap, 1), self._of(torch.float32))
            found = rows.quantized[format] = QuantizedRows(values, scale, cut)
        return found

    def decoded(self, stream: str, n: int, k: int) -> torch.Tensor:
        """(N, K) of int8, where one weight of a stream at a time is decoded: the text's products
        may run beside the image's.
        """
        most = (self.inner, self.width)
        whole = self._workspace.take(f"decoded {stream}", most, self._of(torch.int8))
        return whole.flatten()[: n * k].view(n, k)

    def take(self, name: str, columns: int) -> torch.Tensor:
        """A buffer of the workspace for all rows."""
        return self._workspace.take(name, (self.tokens.rows, columns), self.like)

    def norm(
        self,
        x: torch.Tensor,
        gates: Modulation | None,
        norms: Modulation | None,
        eps: float,
        format: RowFormat | None = None,
        plain: bool = False,
    ) -> None:
        """Residual and norm, in one kernel; into `rows`, quantized where there is a format, and
        `plain` as well where that is asked for.
        """
        key = format, plain, gates is not None, norms is not None, eps, (norms or gates).text.dtype
        launch = self._norms.get(key)
        if launch is None:
            out = None
            if norms is not None:
                out = self.branch
                if format is not None:
                    out = self.quantized(self.rows, self.width, format)
            branch = None if gates is None else self.branch
            launch = self._norms[key] = self.ops.prepare_norm(
                x,
                branch,
                gates,
                norms,
                self.tokens,
                eps,
                format,
                out,
                self.branch if plain and format is not None else None,
            )
        launch(x, gates, norms)

    def heads_8bit(self, form: str, like: torch.Tensor) -> Heads:
        """Where 8-bit attention has its operands, for heads like these."""
        size = sum(Heads.sizes(form, like.shape))
        memory = self._workspace.take(form, (size,), self._of(torch.uint8))
        return Heads.of(form, like.shape, memory)

    def _of(self, dtype: torch.dtype) -> torch.Tensor:
        return self.like.new_empty(0, dtype=dtype)
