"""Texts for messages: figures, counts, errors, signals, types, near names; light to import."""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
import signal
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

_MOST_MATCHES: Final = 3
_AS_CLOSE: Final = 0.08
"""Largest distance below the best similarity ratio at which a match is equally good."""


def near_matches(name: str, known: Iterable[str]) -> list[str]:
    """The known names most similar to ``name``, ignoring case. At most three, nearest first.

    Only names nearly as close as the best: ``"H100-80G"`` means one device, not every one with 80.

    Example:
        >>> near_matches("H100-80G", ["H100-80GB", "A100-80GB"])
        ['H100-80GB']
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=_MOST_MATCHES)
    ratios = [difflib.SequenceMatcher(None, name.lower(), text).ratio() for text in close]
    return [
        by_lower[text] for text, ratio in zip(close, ratios, strict=True) if ratio >= ratios[0] - _AS_CLOSE
    ]


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """A sentence with the near matches, to follow another: ``" Did you mean 'x' or 'y'?"``.

    Args:
        name: the unknown name.
        known: names that exist.
        otherwise: the sentence where no name is near; empty for none.
    """
    near = near_matches(name, known)
    sentence = f"Did you mean {' or '.join(map(repr, near))}?" if near else otherwise
    return f" {sentence}" if sentence else ""


def with_period(text: str) -> str:
    """The text with one full stop, for messages that may already end with one."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def clip_text(text: str, num_chars: int) -> str:
    """The text, cut and ended by ``...`` if it has more than ``num_chars`` characters."""
    return text if len(text) <= num_chars else f"{text[: num_chars - 3]}..."


def first_few(texts: Sequence[str], number: int = 5, separator: str = ", ") -> str:
    """The first texts, joined, with how many are left out: ``"a, b, and 3 more"``."""
    more = [f"and {len(texts) - number} more"] if len(texts) > number else []
    return separator.join([*texts[:number], *more])


def count_noun(number: int, noun: str, plural: str = "") -> str:
    """A number and its noun: ``"1 rank"``, ``"2 ranks"``."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def error_text(error: BaseException, max_characters: int | None = None) -> str:
    """An exception with its message, if it has one: ``"ValueError: no corpus"``, ``"SystemExit"``.

    Args:
        error: the exception.
        max_characters: length above which the message is cut.
    """
    name, text = type(error).__name__, str(error).strip()
    if max_characters is not None:
        text = clip_text(text, max_characters)
    return f"{name}: {text}" if text else name


def error_line(error: BaseException) -> str:
    """An exception with the first line of its message, without a full stop, to stand inside a sentence."""
    first = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def signal_text(number: int) -> str:
    """A signal by its name: ``"SIGKILL"``; ``"signal 40"`` for one without a name."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def with_article(value: object) -> str:
    """The value's type with its article: ``"an int"``, ``"a Tensor"``."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in tuple('aeiou') else 'a'} {name}"


UNKNOWN = "–"
"""Stands for a figure that is not known."""

_SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
_BYTES = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
_COUNTS = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))


def seconds_text(seconds: float | None) -> str:
    """A time with three digits and its unit; whole seconds from two minutes on.

    Example:
        >>> seconds_text(0.04213), seconds_text(95), seconds_text(None)
        ('42.1 ms', '95.0 s', '–')
    """
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds >= 120:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
    return _format_scaled(seconds, _SECONDS) if seconds else "0 s"


def bytes_text(num_bytes: float | None) -> str:
    """Bytes with three digits and a binary unit.

    Example:
        >>> bytes_text(3.1 * 2**30), bytes_text(0)
        ('3.10 GiB', '0 B')
    """
    return UNKNOWN if num_bytes is None or not math.isfinite(num_bytes) else _format_scaled(num_bytes, _BYTES)


def range_text(value: float, interval: tuple[float, float], text: Callable[[float], str]) -> str:
    """The interval of a figure, without a unit if it equals the figure's: ``"2.60–3.50"``; empty for none.

    Example:
        >>> range_text(2.9, (2.6, 3.5), seconds_text), range_text(0.98, (0.9, 1.2), seconds_text)
        ('2.60–3.50', '900 ms–1.20 s')
    """
    if interval[0] == interval[1]:
        return ""
    texts = [text(each).split(" ") for each in (value, *interval)]
    same = all(len(words) == 2 and words[1] == texts[0][1] for words in texts)
    return "–".join(words[0] if same else " ".join(words) for words in texts[1:])


def interval_text(
    value: float | None, interval: tuple[float, float] | None, text: Callable[[float | None], str]
) -> str:
    """A figure with its interval: ``"2.90 s (2.60–3.50)"``."""
    within = "" if value is None or interval is None else range_text(value, interval, text)
    return f"{text(value)} ({within})" if within else text(value)


def count_text(count: float | None, unit: str = "") -> str:
    """A count with three digits and a decimal prefix.

    Example:
        >>> count_text(8.03e9), count_text(184.4e12, "FLOP")
        ('8.03 G', '184 TFLOP')
    """
    if count is None or not math.isfinite(count):
        return UNKNOWN
    return (_format_scaled(count, _COUNTS) + unit).strip()


def percent_text(share: float | None) -> str:
    """A share of one as per cent.

    Example:
        >>> percent_text(0.043), percent_text(-0.31)
        ('4.3%', '-31%')
    """
    if share is None or not math.isfinite(share):
        return UNKNOWN
    return f"{100 * share:.{1 if abs(share) < 0.1 else 0}f}%"


def change_text(share: float | None) -> str:
    """A relative change with its sign.

    Example:
        >>> change_text(0.31), change_text(-0.052)
        ('+31%', '-5.2%')
    """
    return f"{'+' if share is not None and share > 0 else ''}{percent_text(share)}"


def number_text(value: float | None, digits: int = 2) -> str:
    """A plain number."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def factor_text(factor: float) -> str:
    """A factor with three digits and its sign: ``"1.50×"``."""
    return f"{factor:.{2 if factor < 10 else 1 if factor < 100 else 0}f}×"


def compared_text(speedup: float | None, other: str = "") -> str:
    """Comparison of a step with another one, as a factor that is never below one.

    Args:
        speedup: the other's time over this one's.
        other: name of the other, as ``"the baseline ddp"``.

    Example:
        >>> compared_text(1.5), compared_text(0.18), compared_text(1.001)
        ('1.50× as fast', '5.56× as long', 'equally fast')
        >>> compared_text(0.18, "the baseline ddp")
        '5.56× as long as the baseline ddp'
    """
    if speedup is None or not math.isfinite(speedup) or speedup <= 0:
        return UNKNOWN
    if abs(speedup - 1) < 0.005:
        return f"as fast as {other}" if other else "equally fast"
    if speedup > 1:
        return f"{factor_text(speedup)} as fast{f' as {other}' if other else ''}"
    return f"{factor_text(1 / speedup)} as long{f' as {other}' if other else ''}"


def measured_text(seconds: float | None, spread: float | None) -> str:
    """A measured time with its standard error, both in one unit and to the same digit.

    Example:
        >>> measured_text(0.04, 332e-6), measured_text(0.04, 2e-6), measured_text(0.04, None)
        ('40.0 ms ±0.3 ms', '40.0 ms ±<0.1 ms', '40.0 ms')
    """
    value = seconds_text(seconds)
    if seconds is None or value == UNKNOWN or spread is None or not math.isfinite(spread):
        return value
    if abs(seconds) >= 120:
        return f"{value} ±{max(round(spread), 1)} s"
    number, unit = value.split(" ")
    digits = len(number.partition(".")[2])
    scaled_spread, least = spread / dict(_SECONDS)[unit], 10.0**-digits
    below = "<" if 0 < scaled_spread < least / 2 else ""
    return f"{value} ±{below}{least if below else scaled_spread:.{digits}f} {unit}"


def _format_scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    # Half a unit of the third digit below the next unit would be written as 1000 of this one.
    name, size = next((unit for unit in units if abs(value) >= 0.9995 * unit[1]), units[-1])
    number = value / size
    whole = name == "B" or (not name and value == int(value))
    digits = 0 if whole else max(0, 3 - len(str(int(abs(number) + 1e-9))))
    return f"{number:.{digits}f} {name}"


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of an exception outside this package, its methods, torch and standard library."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if not is_library(frame.filename)), None)


def is_library(file: str) -> bool:
    """Returns whether a source file belongs to this package, its methods, torch or the standard library."""
    in_stdlib = file.startswith(sysconfig.get_paths()["stdlib"] + os.sep) and "site-packages" not in file
    ours = Path(__file__).parent
    torch = importlib.util.find_spec("torch")
    folders = [
        str(ours),
        str(ours.parent / "opt_lib"),
        *(torch.submodule_search_locations or () if torch else ()),
    ]
    return in_stdlib or file.startswith(("<", *(f"{folder}{os.sep}" for folder in folders)))
