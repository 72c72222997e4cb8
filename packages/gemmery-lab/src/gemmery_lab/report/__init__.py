"""Records -> a live table, Markdown, JSON; SVG figures in `figures`, and one self-contained HTML page in `page`."""
