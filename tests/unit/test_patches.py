"""Values that are put into a namespace leave it in turn."""

import pytest

from qwen_l40s.optimizations.patches import ABSENT, patched


class Wrapped:
    over = False

    def leave(self):
        self.over = True


def test_values_leave_in_turn_and_what_wraps_one_stays():
    first, second, alone, own = Wrapped(), Wrapped(), Wrapped(), {"forward": 1}
    pair = [(own, "forward", first), (own, "forward", second)]
    with pytest.raises(ZeroDivisionError), patched(pair):
        assert own["forward"] is second
        raise ZeroDivisionError
    assert own == {"forward": 1} and first.over and second.over
    with patched((own, name, alone) for name in ("forward", "new")):
        own["forward"] = "of another extension"
    assert own == {"forward": "of another extension"} and alone.over
    assert ABSENT not in own.values()
