"""Show files of the repository outside of docs/ as pages of the site: a hook of MkDocs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = {"CHANGELOG.md": "changelog.md", "benchmarks/results.md": "benchmarks.md"}
"""The page of each file."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the site, with these pages."""
    repository = Path(config.docs_dir).parent
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(repository / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return a page's text, with links to these files leading to their pages."""
    up = "../" * page.file.src_uri.count("/")
    for source, name in PAGES.items():
        markdown = markdown.replace(f"]({up}../{source}", f"]({up}{name}")
    return markdown
