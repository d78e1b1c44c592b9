"""Formulas as MathML, which browsers draw by themselves: pages need no script from another site, and none at all."""

from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml


def inline(translator: Any, node: nodes.math) -> None:
    """A formula within a line."""
    translator.body.append(latex2mathml.tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def block(translator: Any, node: nodes.math_block) -> None:
    """A formula of its own."""
    translator.body.append(f'<div class="math-block">{latex2mathml.tex2mathml(node.astext(), as_block=True)}</div>\n')
    raise nodes.SkipNode
