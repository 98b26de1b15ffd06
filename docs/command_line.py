"""Generated reference of the command line, for the documentation and its frozen surface.

``python -m docs.command_line`` writes it into ``docs/command-line.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from atorch_ns.errors import InputError


class Argument(NamedTuple):
    """An argument or option: how it is written, its default as text, and what it means."""

    written: str
    default: str
    text: str


class Verb(NamedTuple):
    """A verb, what it does in one sentence, its example, and what it takes."""

    name: str
    text: str
    example: str
    arguments: tuple[Argument, ...]


def verbs() -> tuple[Verb, ...]:
    """Every verb, in the order of the help."""
    import typer

    from atorch_ns.cli import app

    return tuple(_walk(typer.main.get_command(app), ""))


def verbs_as_text() -> str:
    """One line for each verb, argument and option: what scripts rely on."""
    lines = []
    for verb in verbs():
        lines.append(verb.name)
        lines += [f"  {each.written} [{each.default}]" for each in verb.arguments]
    return "\n".join(lines) + "\n"


def verbs_as_markdown() -> str:
    """A section for each verb: what it does, its example, and a table."""
    return "\n".join(_section(verb) for verb in verbs())


def _section(verb: Verb) -> str:
    rows = [
        f"| `{each.written}` | {_cell(each.text)} | {f'`{each.default}`' if each.default else ''} |"
        for each in verb.arguments
    ]
    table = ["| | | default |", "|---|---|---|", *rows, ""] if rows else []
    return "\n".join(
        [f"### {verb.name}", "", verb.text, "", "```console", f"$ {verb.example}", "```", "", *table]
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "\\<")


def _walk(command: Any, name: str) -> Iterator[Verb]:
    inner = getattr(command, "commands", None)
    if inner is not None:
        for key, each in inner.items():
            yield from _walk(each, f"{name} {key}".strip())
        return
    text, _, rest = (command.help or "").partition("Example: ")
    arguments = [_argument(each) for each in command.params if each.name != "help"]
    yield Verb(name, " ".join(text.split()), rest.strip(), tuple(arguments))


def _argument(parameter: Any) -> Argument:
    if parameter.param_type_name == "argument":
        name = parameter.metavar or parameter.name.upper()
        return Argument(name if parameter.required else f"[{name}]", "", getattr(parameter, "help", "") or "")
    names = ", ".join([*sorted(parameter.opts, key=len, reverse=True)])
    default = parameter.default
    shown = "" if default is None or default == [] else str(default)
    if parameter.is_flag:
        return Argument(names, "" if not default else "on", parameter.help or "")
    kind = "…" if parameter.multiple else ""
    return Argument(
        f"{names} {parameter.name.upper()}{kind}",
        "required" if parameter.required else shown,
        parameter.help or "",
    )


PAGE: Final = Path(__file__).parent / "command-line.md"
_BEGIN: Final = "<!-- verbs: generated -->"
_END: Final = "<!-- verbs: end -->"


def with_verbs(page: str) -> str:
    """The page with its generated part written anew.

    Raises:
        InputError: if the page lacks the marks around it.
    """
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise InputError(f"the page has no {_BEGIN} and {_END} to write between.")
    return f"{before}{_BEGIN}\n\n{verbs_as_markdown()}\n{_END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_verbs(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
