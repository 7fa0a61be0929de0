{% if launch.logs %}
  --log-dir "$RUNS"/{{ launch.logs }}/node-"$node" --tee 3 \
{% endif %}
{% if launch.has_config %}
  {{ launch.program }} --output_dir "$RUNS" "$@"
{% else %}
  {{ launch.program.replace("$", "$$") if "$(" in launch.program or "$$" in launch.program else launch.program }} "$@"
{% endif %}
