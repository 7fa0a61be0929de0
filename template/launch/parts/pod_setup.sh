set -euo pipefail
{% if launch.setup %}

# What the program needs first
{% for line in launch.setup %}
{{ line.replace("$", "$$") if "$(" in line or "$$" in line else line }}
{% endfor %}
{% endif %}
