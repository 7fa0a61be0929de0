fail() {
  echo "error: $1" >&2
  exit 1
}

[[ $PROCESSES =~ ^[1-9][0-9]*$ ]] || fail "PROCESSES=$PROCESSES: set it to the number of processes on each machine"
[[ $MAX_RESTARTS =~ ^[0-9]+$ ]] || fail "MAX_RESTARTS=$MAX_RESTARTS: set it to a number, 0 for none"
command -v torchrun >/dev/null ||
  fail "torchrun is not found on $(hostname): {{ how_to_find_torchrun | default('activate the environment that torch is installed in') }}"

# Threads of each process: torchrun would set 1 and print a warning.
cores="${SLURM_CPUS_PER_TASK:-$(nproc)}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores >= PROCESSES ? cores / PROCESSES : 1))}"
{% if launch.logs %}
# Lines reach the log files when they are printed, not many at once.
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED-1}"
{% endif %}
