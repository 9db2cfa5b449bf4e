"""A hook of mkdocs: pages link to files of the repository, which are not part of the site.

Images outside docs/ are copied into the site. Other links lead to the repository, whose address is the environment
variable REPOSITORY_URL; without it only their text remains.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMAGES = "repository"  # folder of the site for images from outside docs/

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def rewrite(text: str, page: str, repository: str) -> tuple[str, set[str]]:
    """Rewrites links of a page that leave docs/.

    Args:
      text: Markdown.
      page: path of the page below docs/.
      repository: address of the repository, or "".

    Returns:
      The Markdown, and the paths below the repository's root of the images that it needs.
    """
    folder, images = (ROOT / "docs" / page).parent, set()

    def link(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        file = Path(os.path.normpath(folder / path))
        if file.is_relative_to(ROOT / "docs"):
            return match[0]
        name = file.relative_to(ROOT).as_posix()
        if picture:
            images.add(name)
            return f"![{words}]({'../' * page.count('/')}{IMAGES}/{name})"
        if not repository:
            return words
        kind = "tree" if file.is_dir() else "blob"
        return f"[{words}]({repository}/{kind}/main/{name}{'#' * bool(anchor)}{anchor})"

    parts = re.split(r"(^ *```.*?^ *``` *$)", text, flags=re.MULTILINE | re.DOTALL)  # fenced blocks stay
    parts[::2] = [_LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts), images


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Adds the images that pages show from outside docs/."""
    from mkdocs.structure.files import File

    for page in [file for file in files if file.is_documentation_page()]:
        for name in rewrite(page.content_string, page.src_uri, "")[1]:
            uri = f"{IMAGES}/{name}"
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of a page."""
    return rewrite(markdown, page.file.src_uri, os.environ.get("REPOSITORY_URL", "").rstrip("/"))[0]
