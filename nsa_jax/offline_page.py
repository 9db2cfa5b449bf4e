"""Pages of one file: data and parts of HTML put into a template. The run report and the exploration page share it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Colours of both themes, the script that sets the theme before anything is painted, and elements all pages have.
_SHARED = {"base_style": "offline_page.css", "theme": "offline_page.js"}


def embed(value: Any) -> str:
    """JSON for a script element. No text in it can end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def fill_template(template: str, parts: Mapping[str, str]) -> str:
    """A template with its {{names}} replaced by parts, or by the styles and scripts that all pages share."""
    shared = {name: Path(__file__).with_name(file).read_text(encoding="utf-8") for name, file in _SHARED.items()}
    # One pass, so that text which was filled in is not replaced again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: {**shared, **parts}[match.group(1)], template)
