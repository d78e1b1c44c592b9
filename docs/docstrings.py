"""From docstrings of this package to reStructuredText.

A docstring of `keras_auxref` is readable as plain text. What reStructuredText would spoil is an indented formula between
paragraphs, which it takes for a quotation, and a Markdown table.
"""

import inspect
import re
from typing import Any

_HEADER = re.compile(r"^(Args|Attributes|Call arguments|Raises|Returns):\s*$")


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """The hook of autodoc: changes the lines of a docstring in place."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # an empty comment: napoleon takes what comes before a colon in the first line for a type
    lines[:] = literal_formulas(escaped_bars(list_tables(joined_names(examples(lines)))))


def signature(app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None) -> Any:
    """The signature of a class is that of `__init__`. Keras' `__new__`, which autodoc would show, takes anything."""
    if what != "class" or signature != "(*args, **kwargs)":
        return None
    parameters = list(inspect.signature(obj.__init__).parameters.values())[1:]
    return str(inspect.Signature([parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters])), None


def skip(app: Any, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Leaves out the fields of named tuples, which their class describes."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None


def examples(lines: list[str]) -> list[str]:
    """`Example:` stands directly above a doctest, which reStructuredText would take for one paragraph with it."""
    result: list[str] = []
    for line in lines:
        result += [".. rubric:: Example", ""] if line == "Example:" else [line]
    return result


def joined_names(lines: list[str]) -> list[str]:
    """A list of arguments that share one description goes over several lines, and napoleon wants it in one."""
    result: list[str] = []
    for line in lines:
        if result and re.fullmatch(r"    (\w+, )*\w+,", result[-1]):
            result[-1] += f" {line.strip()}"
        else:
            result.append(line)
    return result


def escaped_bars(lines: list[str]) -> list[str]:
    """|x| is an absolute value, and in reStructuredText a substitution. Doctests, formulas and code stay as they are."""
    result: list[str] = []
    in_doctest = False
    for line in lines:
        in_doctest = bool(line.strip()) and (in_doctest or line.lstrip().startswith(">>>"))
        parts = line.split("`")
        result.append(line if in_doctest else "`".join(_escape_outside(parts)))
    return result


def _escape_outside(parts: list[str]) -> list[str]:
    """Every second part lies between backticks."""
    return [part.replace("|", "\\|") if place % 2 == 0 else part for place, part in enumerate(parts)]


def literal_formulas(lines: list[str]) -> list[str]:
    """Indented blocks after an empty line, outside sections such as Args, become literal blocks of the class `formula`."""
    result: list[str] = []
    in_section = in_formula = False
    for number, line in enumerate(lines):
        indented = line.startswith("    ")
        if line and not line[0].isspace():
            in_section = bool(_HEADER.match(line))
        starts = indented and not in_section and not in_formula and number > 0 and not lines[number - 1].strip()
        # A formula may hold empty lines: it ends with the first line that stands at the left.
        in_formula = starts or (in_formula and (indented or not line.strip()))
        if starts:
            result += [".. code-block:: text", "   :class: formula", ""]
        result.append(line.replace("\\|", "|") if in_formula else line)
    return result


def list_tables(lines: list[str]) -> list[str]:
    """Markdown tables become `list-table`s."""
    result: list[str] = []
    rows: list[list[str]] = []
    for line in [*lines, ""]:
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
                rows.append(cells)
            continue
        if rows:
            result += [".. list-table::", "   :header-rows: 1", ""]
            for cells in rows:
                result += [f"   {'* -' if column == 0 else '  -'} {cell}".rstrip() for column, cell in enumerate(cells)]
            rows = []
        result.append(line)
    return result[:-1]
