"""The report of `geomesh bench` for people, made from report.json alone.

    pages.py     report.md and report.html as a list of blocks
    words.py     the summary: what is better, what is worse, and why
    setting.py   the slowest site and link; which engine produced which figure
    tables.py    all methods side by side
    figures.py   how a figure is written, and what it is set against
    blocks.py    blocks as Markdown and as HTML
    plots.py, gantt.py, style.py    the pictures (matplotlib)
"""
