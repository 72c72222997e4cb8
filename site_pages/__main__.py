"""`python -m site_pages`, in a checkout: writes the pages to out/site_pages, builds site/ and checks its links."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from site_pages import links
from site_pages.write import write

ROOT = Path.cwd()
PAGES = ROOT / "out" / "site_pages"
SITE = ROOT / "site"


def main() -> int:
    """Build the site; 1 if mkdocs warns or a link is broken."""
    shutil.rmtree(PAGES, ignore_errors=True)
    config = write(ROOT, PAGES)
    built = subprocess.run([sys.executable, "-m", "mkdocs", "--quiet", "build", "--strict", "-f", config], check=False)
    if built.returncode:
        return 1
    (SITE / "404.html").unlink()  # of the language built last, and with the addresses of a site at the root of a host
    broken = links.broken(SITE)
    sys.stderr.writelines(f"broken link: {link}\n" for link in broken)
    if not broken:
        sys.stdout.write(f"site: {SITE / 'index.html'}; `make serve` shows it, with its search\n")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
