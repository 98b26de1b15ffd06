"""Style and template of the page. It loads nothing: no script, no font, no picture."""

from __future__ import annotations

_COLOURS = """
:root { color-scheme: light dark; --bg: #ffffff; --fg: #1c1e21; --muted: #5a6068; --line: #d5d9de;
  --soft: #f4f5f7; --accent: #0b5cad; --good: #1b7a3d; --bad: #b3261e; --mark: #111111; }
@media (prefers-color-scheme: dark) { :root { --bg: #16181c; --fg: #e8eaed; --muted: #a6adb7; --line: #3a3f47;
  --soft: #1f2228; --accent: #7ab8f5; --good: #6cc88a; --bad: #f2877f; --mark: #ffffff; } }
"""

_LAYOUT = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 1rem; background: var(--bg); color: var(--fg);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
.lead { font-size: 1.05rem; }
.lead p, .close p { margin: .2rem 0; }
p, li, dd, figcaption { max-width: 62rem; }
.muted, figcaption { color: var(--muted); }
figure { margin: 0 0 1rem; }
figcaption { font-size: .9rem; margin: .25rem 0; }
svg { display: block; width: 100%; max-width: 680px; height: auto; }
@media (min-width: 1100px) { td:not(.words):not(:first-child) { min-width: 5.1rem; }
  .roomy td.words:not(.short) { min-width: 15rem; }
  .roomy td.words:not(.short):last-child { min-width: 18rem; } }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--muted); font-weight: 600; }
th, td { overflow-wrap: normal; }
.words { text-align: left; }
td.words { min-width: 9rem; }
th.short, td.short { white-space: nowrap; min-width: 0; }
tr.best { background: var(--soft); font-weight: 600; }
details { margin: .25rem 0 1rem; }
summary { cursor: pointer; color: var(--accent); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; }
dt { color: var(--muted); } dd { margin: 0; }
@media (max-width: 799px) {
  thead { position: absolute; left: -9999px; }
  tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line); }
  td, td.words { display: grid; grid-template-columns: 8.5rem 1fr; gap: .5rem; text-align: left;
    border: 0; padding: .1rem .3rem; overflow-wrap: anywhere; white-space: normal; }
  td:empty { display: none; }
  td::before { content: attr(data-name); color: var(--muted); font-weight: 400; }
  dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; }
}
"""

_PICTURES = """
svg text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: var(--fg);
  paint-order: stroke; stroke: var(--bg); stroke-width: 3px; stroke-linejoin: round; }
svg text.muted { fill: var(--muted); } svg text.strong { font-weight: 700; } svg text.on { fill: #111111; stroke: none; }
.p0 { fill: #7db8e0; } .p1 { fill: #f3bd5c; } .p2 { fill: #8fcf98; } .p3 { fill: #e99a8c; }
.p4 { fill: #c0aae0; } .p5 { fill: #cfc8ba; } .p6 { fill: #96d6d2; } .p7 { fill: #dcb795; }
.p8 { fill: #e8a9cf; }
.p0, .p1, .p2, .p3, .p4, .p5, .p6, .p7, .p8 { stroke: var(--bg); stroke-width: 1; }
.limit { stroke: var(--bad); stroke-width: 2; stroke-dasharray: 6 4; }
.bound { stroke: var(--muted); stroke-width: 1.5; stroke-dasharray: 2 4; }
.grid { stroke: var(--line); stroke-width: 1; }
.diagonal { stroke: var(--muted); stroke-width: 1.5; stroke-dasharray: 6 4; }
.stair { stroke: var(--accent); stroke-width: 2; }
.whisker { stroke: var(--muted); stroke-width: 1.5; }
.dot { fill: var(--accent); } .won { fill: var(--good); stroke: var(--mark); stroke-width: 1; }
.hollow { fill: var(--bg); stroke: var(--accent); stroke-width: 1.5; }
.failed { stroke: var(--bad); stroke-width: 2.5; fill: none; }
.measured { fill: var(--mark); stroke: var(--bg); stroke-width: 1.5; }
.idle { fill: var(--soft); stroke: var(--line); stroke-width: 1; } .lap { fill: #111111; }
.total { fill: #7db8e0; } .faster { fill: #8fcf98; } .slower { fill: #e99a8c; }
"""

_PRINT = """
@media print { body { max-width: none; } details > * { display: block; } }
"""

STYLE = _COLOURS + _LAYOUT + _PICTURES + _PRINT
"""Style of the page."""

SVG_STYLE = f"{_COLOURS}{_PICTURES}.ground {{ fill: var(--bg); }}\n"
"""Style of a picture in a file of its own."""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"/>
<title>{{ title }}</title>
<style>{{ style | safe }}</style>
</head>
<body>
{% macro kind(table, at) -%}
{% if at in table.words %} class="words{% if at in table.short %} short{% endif %}"{% endif %}
{%- endmacro %}
{% macro draw(table, best="") -%}
<table{% if table.is_roomy %} class="roomy"{% endif %}>
<thead><tr>{% for name in table.columns %}<th scope="col"
 {{- kind(table, loop.index0) }}>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}<tr{% if row[0] == best %} class="best"{% endif %}>
{%- for cell in row %}<td data-name="{{ table.columns[loop.index0] }}"
 {{- kind(table, loop.index0) }}>
 {%- if loop.index0 in table.words %}{{ cell | breakable }}{% else %}{{ cell | kept_together }}{% endif -%}
</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table>
{%- endmacro %}
<header>
<h1>{{ title | breakable }}</h1>
<p class="muted">{{ search.setting if search else "" }}</p>
</header>
<main>
<section aria-label="verdict" class="lead">
{% for sentence in (search.sentences if search else ()) %}<p>{{ sentence | breakable }}</p>
{% endfor %}</section>
{% if applied %}<section>
<h2>What is applied</h2>
{{ draw(applied) }}
{% for note in notes %}<p class="muted">{{ note }}</p>
{% endfor %}</section>
{% endif %}{% if actual %}<section class="close">
<h2>Predicted against actual</h2>
{% for line in actual %}<p>{{ line }}</p>
{% endfor %}</section>
{% endif %}{% if search %}<section>
<h2>Candidates</h2>
<p class="muted">{{ search.candidates_note }}</p>
{{ draw(search.candidates, search.best) }}
{% for title, table in search.folded %}<details><summary>{{ title }}</summary>
{{ draw(table) }}</details>
{% endfor %}</section>
{% endif %}{% for section in sections %}<section id="{{ section.name }}">
<h2>{{ section.title }}</h2>
{% for figure in section.figures %}<figure>
{{ figure.picture | safe }}
<figcaption>{{ figure.caption }}</figcaption>
</figure>
{% endfor %}<details><summary>The figures as a table</summary>
{{ draw(section.table) }}</details>
</section>
{% endfor %}{% if search and search.lists %}<section>
<h2>How it was found</h2>
{% for heading, lines in search.lists %}<h3>{{ heading }}</h3>
<ul>{% for line in lines %}<li>{{ line }}</li>{% endfor %}</ul>
{% endfor %}</section>
{% endif %}{% if search %}<section>
<details><summary>Settings of the search</summary>
<dl>{% for name, value in search.settings %}<dt>{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}</dl></details>
</section>
{% endif %}</main>
</body>
</html>
"""
