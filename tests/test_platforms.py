"""Systems, terminals and Pythons other than those we work on, as far as they can be imitated here."""

import io
import sys

import pytest

import shiftvit


def test_what_a_terminal_cannot_write_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe of Windows takes the letters of one alphabet: a run ended at the name of its data."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="cp1252"))
    shiftvit.run(lambda: print("datos/año/猫", flush=True))
    assert written.getvalue().split() == [b"datos/a\xf1o/\\u732b"]
