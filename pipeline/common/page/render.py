"""Templates of pages: what is put into them is escaped, and cleaned of what may not be shown."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from pipeline.common.page.words import clean

if TYPE_CHECKING:
    from jinja2 import Environment

_COMMON = "pipeline.common.page"


def render(name: str, package: str = _COMMON, **values: Any) -> Markup:
    """A template of a package, filled in.

    Args:
        name: of the file in the package's folder `templates`.
        package: by default this one, whose templates those of other packages can use.
        values: by name. Text is escaped unless it is `Markup`, which only our own code makes.
    """
    return Markup(_environment(package).get_template(name).render(values))


def macro(name: str, *values: Any) -> Markup:
    """A macro of `parts.html`, filled in."""
    found: Markup = getattr(_environment(_COMMON).get_template("parts.html").module, name)(*values)
    return found


@cache
def _environment(package: str) -> Environment:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    loaders = [PackageLoader(each, "templates") for each in dict.fromkeys((package, _COMMON))]
    return Environment(
        loader=ChoiceLoader(loaders),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _shown(value: Any) -> Any:
    return value if isinstance(value, Markup) or not isinstance(value, str) else clean(value)
