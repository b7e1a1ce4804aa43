"""What the site needs besides Markdown: files that stand outside of docs/.

Pages link to them as `../benchmarks/results/mlp.png`, which is right on a forge. Here such files
are taken into the site, and the links lead to the copies. A link to a folder, or to a page that
is none of the site's, as the changelog, stays as its text.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LIST_AFTER_TEXT = re.compile(r"^(?![-|#>\s]|\d+\. )(.+\n)(?=- |1\. )", re.MULTILINE)
_FENCED = re.compile(r"^(```.*?^```)$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\(\.\./([^)#\s]+)\)")


def _is_copied(name: str) -> bool:
    return not name.endswith(".md") and (ROOT / name).is_file()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files that pages link to."""
    pages = [Path(f.abs_src_path) for f in files.documentation_pages() if "/" not in f.src_uri]
    linked = {name for page in pages for _, name in _LINK.findall(page.read_text())}
    for name in sorted(filter(_is_copied, linked)):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def _with_lists(markdown: str) -> str:
    """Sets lists off from the text above: on a forge they need no empty line there."""
    parts = _FENCED.split(markdown)
    parts[::2] = [_LIST_AFTER_TEXT.sub(r"\1\n", part) for part in parts[::2]]
    return "".join(parts)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Leads links to files outside of docs/ to their copies."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]  # its only entry would be the page itself
    markdown = _with_lists(markdown)
    if "/" in page.file.src_uri:
        return markdown
    return _LINK.sub(lambda m: f"[{m[1]}]({m[2]})" if _is_copied(m[2]) else m[1], markdown)
