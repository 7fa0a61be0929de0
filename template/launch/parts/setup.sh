{% if launch.env or launch.setup %}

# What the program needs first
{% for line in launch.env %}
export {{ line }}
{% endfor %}
{% for line in launch.setup %}
{{ line }}
{% endfor %}
{% endif %}
