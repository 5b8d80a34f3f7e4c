"""Values of command lines: read one by one, so that all that is wrong is told at once."""

from __future__ import annotations

from typing import Any, Callable, Dict, List

__all__ = ["FlagReader"]


class FlagReader:
    """Converts the texts of flags and keeps a fault for each that cannot be.

    Parameters
    ----------
    texts : dict of str
        By the names that argparse gives them; None where a flag was left out.

    Attributes
    ----------
    faults : list of str
        Each names flag, value and what is allowed.
    """

    def __init__(self, texts: Dict[str, Any]) -> None:
        self._texts = texts
        self.faults: List[str] = []

    def get(self, name: str, convert: Callable[[str], Any], kind: str, default: Any = None) -> Any:
        """Return the value; `default` where there is none, or none that is `kind`.

        Without a `kind` the fault is what `convert` says.
        """
        text = self._texts[name]
        if text is None:
            return default
        try:
            return convert(text)
        except (ValueError, OverflowError) as error:
            said = f" {text!r} must be {kind}" if kind else f": {error}"
            self.faults.append(f"{_flag(name)}{said}")
            return default

    def need(self, name: str, convert: Callable[[str], Any], kind: str, default: Any) -> Any:
        """Return what cannot be left out; `default` only keeps the reading of the others going."""
        if self._texts[name] is None:
            self.faults.append(f"{_flag(name)} is missing: give {kind}")
        return self.get(name, convert, kind, default)


def _flag(name: str) -> str:
    return "-n" if name == "n" else "--" + name.replace("_", "-")
