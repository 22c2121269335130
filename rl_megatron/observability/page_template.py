"""The template of report.html and of the page that compares runs."""

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light; --ink: #1c2126; --quiet: #5d6873; --line: #d8dee4; --panel: #f5f7f9; --bad: #a3261b; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 84rem; background: #fff; color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; padding-top: .8rem; border-top: 1px solid var(--line); }
h3 { font-size: .95rem; margin: 1.2rem 0 .3rem; color: var(--quiet); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 0; }
dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(25rem, 100%), 1fr)); gap: .5rem; }
.charts svg { width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; }
th { color: var(--quiet); font-weight: 600; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, monospace; }
.failure { border: 2px solid var(--bad); border-radius: 4px; padding: .6rem .8rem; margin: 1rem 0; }
.failure b { color: var(--bad); }
summary { cursor: pointer; color: var(--quiet); margin: .8rem 0 .3rem; }
footer { margin-top: 2rem; color: var(--quiet); font-size: .85rem; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<dl>
{% for name, value in facts %}
<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}
</dl>
{% if failure %}
<div class="failure"><b>The run failed</b>{% if failure.place %} ({{ failure.place }}){% endif %}
<pre>{{ failure.message }}</pre></div>
{% endif %}
{% for stage in stages %}
<h2>Stage {{ stage.name }}</h2>
{% for heading, charts in stage.groups %}
{% if heading == "Other metrics" %}
<details><summary>{{ heading }} ({{ charts | length }})</summary>
{% elif heading %}
<h3>{{ heading }}</h3>
{% endif %}
<div class="charts">
{% for chart in charts %}
{{ chart | safe }}
{% endfor %}
</div>
{% if heading == "Other metrics" %}
</details>
{% endif %}
{% endfor %}
{% if stage.shares %}
<h3>Mean time of a step</h3>
<table><tr><th>phase</th><th>seconds</th><th>share</th></tr>
{% for row in stage.shares %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endif %}
{% if stage.samples %}
<h3>Completions of evaluations</h3>
<table><tr><th>step</th><th>reward</th><th>prompt</th><th>completion</th><th>answer</th></tr>
{% for line in stage.samples %}
{% for sample in line.samples %}
<tr><td>{{ line.step }}</td><td>{{ "%g" | format(sample.reward) }}</td><td><pre>{{ sample.prompt }}</pre></td>
<td><pre>{{ sample.completion }}</pre></td><td><pre>{{ sample.answer }}</pre></td></tr>
{% endfor %}
{% endfor %}
</table>
{% endif %}
{% endfor %}
{% if changes %}
<h2>Settings</h2>
<table><tr>{% for column in columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for row in changes %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endif %}
{% if attempts %}
<h2>Starts of the run</h2>
<table><tr><th>began</th><th>layout</th><th>ended</th><th>how</th><th>where</th></tr>
{% for row in attempts %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endif %}
{% if versions %}
<h2>Versions</h2>
<dl>
{% for name, value in versions.items() %}
<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}
</dl>
{% endif %}
<footer>Written {{ written }} by rl_megatron.</footer>
</body>
</html>
"""
