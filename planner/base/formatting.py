"""Formats numbers with units, and layouts, as people read them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping

WIDTH = 100
"""So long are lines of text, labels aside."""

TIME_USES = {
    "compute": "operators, forward and backward",
    "recompute": "what backward recomputes, with the communication that takes",
    "communication": "reshardings of activations, and gathering parameters",
    "gradients": "reducing gradients, as far as backward does not hide it",
    "optimizer": "updating parameters",
    "bubble": "waiting for other stages of the pipeline",
    "offload": "waiting for what moves between device and host",
}
MEMORY_USES = {
    "parameters": "parameters and buffers as stored",
    "gradients": "their gradients",
    "optimizer": "the optimizer's state",
    "gathered": "parameters used in a larger layout than stored",
    "activations": "saved for backward, and the inputs",
    "temporary": "the largest operator's own",
    "stays": "parameters, gradients and optimizer state that stay there",
    "chunks": "what moves and is on the device just then",
    "beside": "activations, gathered parameters, and what operators need",
}

AGAIN = {"full": "in full", "selective": "selectively"}
GATHERED_AGAIN = {
    "resharded": "gathered again in backward, activations too",
    "gathered": "gathered again in backward",
}
"""Levels at which blocks compute nothing again."""


def again(level: str) -> str:
    """How a block recomputes at a level: ``"in full"``, ``"but for part 1"``."""
    return AGAIN.get(level, f"but for {level}")


def recomputed(counts: Mapping[str, int], of: int) -> str:
    """``"recomputed in backward: 12 in full, 4 but for part 1"``; empty where nothing is."""
    some = {level: "all" if count == of else str(count) for level, count in counts.items()}
    parts = [f"{count} {again(level)}" for level, count in some.items() if level not in GATHERED_AGAIN]
    found = [f"recomputed in backward: {', '.join(parts)}"] if parts else []
    for level in (level for level in GATHERED_AGAIN if level in some):
        found.append(GATHERED_AGAIN[level] + (f": {some[level]}" if of > 1 else ""))
    return "; ".join(found)


def by_module(names: Iterable[str]) -> str:
    """Operators, as plans name them, by module: ``"self_attn (add.Tensor, cat), mlp.up_proj (linear)"``."""
    of: dict[str, list[str]] = {}
    for name in names:
        path, _, op = name.rpartition(": ")
        of.setdefault(path, []).append(op)
    return ", ".join(f"{path} ({', '.join(ops)})" if path else ", ".join(ops) for path, ops in of.items())


def in_bytes(count: float) -> str:
    """``"28.3 MiB"``."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def in_all_bytes(count: int) -> str:
    """``"29,674,701 bytes (28.3 MiB)"``; ``"512 bytes"``."""
    return f"{count:,} bytes" + (f" ({in_bytes(count)})" if count >= 2**10 else "")


def in_seconds(seconds: float) -> str:
    """``"195.5 ms"``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    for unit, size in (("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 1e-6:.2f} us" if seconds else "0 s"


def in_duration(seconds: float) -> str:
    """``"3 h 25 min"``: the two largest units that matter, of what takes minutes or more."""
    if round(seconds) < 60:
        return in_seconds(seconds)
    for unit, size, lesser, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        count, rest = divmod(round(seconds / part) * part, size)
        if count:
            return f"{count} {unit}" + f" {rest // part} {lesser}" * bool(rest)
    raise AssertionError("a minute at least")


def in_percent(share: float) -> str:
    """``"14 %"``, ``"< 1 %"``."""
    return "< 1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


def in_shares(uses: Mapping[str, float], total: float, show: Callable[[float], str]) -> str:
    """``"compute 136.8 ms (70 %), ..."``, over as many lines as it takes; what is 0 is left out."""
    return in_lines(f"{name} {show(value)} ({in_percent(value / total)})" for name, value in uses.items() if value)


def in_lines(parts: Iterable[str]) -> str:
    """``"one, another, ..."``, over as many lines as it takes, none of which ends within a part."""
    return _filled(", ".join(parts).replace(" ", "\0").replace(",\0", ", "))


def in_paragraph(text: str, indent: str = "") -> str:
    """A text over as many lines as it takes, later ones indented; numbers stay with what they count."""
    return _filled(re.sub(r"(?<=\d) (?=[\w%])", "\0", text), indent)


def _filled(text: str, indent: str = "") -> str:
    """In lines that end at blanks, but not where ``\\0`` stands for one."""
    filled = textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return filled.replace("\0", " ")


def labelled(rows: Iterable[tuple[str, str]]) -> str:
    """Texts behind their labels, further lines below the first."""
    return "\n".join(f"  {label:<8}" + text.replace("\n", "\n" + " " * 10) for label, text in rows)


def in_count(number: int) -> str:
    """``"875 K"``, ``"8.03 B"``: three digits that matter."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


IN_EACH = ", gathering in each micro-batch"
"""What follows sizes where that is not done once a step."""


def sizes_text(sizes: Mapping[str, int]) -> str:
    """``"outer 2 x inner 4"`` from axis sizes by name."""
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def shape_text(shape: Iterable[int]) -> str:
    """``"8x512"``; ``"a scalar"``."""
    return "x".join(map(str, shape)) or "a scalar"
