"""Formulas as MathML, which browsers draw by themselves: pages need no script from another site, and none at all."""

from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml


def inline(translator: Any, node: nodes.math) -> None:
    """A formula within a line."""
    translator.body.append(latex2mathml.tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def block(translator: Any, node: nodes.math_block) -> None:
    r"""A formula of its own. One that is several, with `\qquad` between them, breaks there in a narrow window."""
    text = node.astext()
    parts = [text] if "\\begin" in text else text.split(r"\qquad")
    formulas = "".join(latex2mathml.tex2mathml(part.strip(), as_block=True) for part in parts)
    translator.body.append(f'<div class="math-block">{formulas}</div>\n')
    raise nodes.SkipNode
