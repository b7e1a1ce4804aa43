"""What the site needs besides Markdown: files that stand outside of docs/, and the changelog.

Pages link to them as `../benchmarks/results/mlp.png`, which is right on a forge. Here they are
taken into the site, and such links lead there.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_OUTSIDE = re.compile(r"\]\(\.\./((?:benchmarks|examples|experiments)/[^)#]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files that pages link to."""
    pages = [Path(page.abs_src_path).read_text() for page in files.documentation_pages()]
    for name in sorted({name for text in pages for name in _OUTSIDE.findall(text)}):
        if (ROOT / name).is_file():
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Leads links to files outside of docs/ to their copies; a folder stays a name."""
    if "/" in page.file.src_uri:
        return markdown
    without = re.sub(r"\[([^\]]+)\]\(\.\./(?:[\w-]+/)*[\w-]+/?\)", r"\1", markdown)
    return _OUTSIDE.sub(r"](\1)", without)
