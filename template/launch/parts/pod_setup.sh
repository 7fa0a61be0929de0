set -euo pipefail
{% if launch.setup %}

# What the program needs first. Such commands often use variables that are not set.
set +u
{% for line in launch.setup %}
{{ line.replace("$", "$$") if "$(" in line or "$$" in line else line }}
{% endfor %}
set -u
{% endif %}
