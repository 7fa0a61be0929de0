{% if launch.env %}

# Variables for the program
{% for line in launch.env %}
export {{ line }}
{% endfor %}
{% endif %}
{% if launch.setup %}

# What the program needs first. Such commands often use variables that are not set.
set +u
{% for line in launch.setup %}
{{ line }}
{% endfor %}
set -u
{% endif %}
