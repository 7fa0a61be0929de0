fail() {
  echo "error: $1" >&2
  exit 1
}

command -v torchrun >/dev/null ||
  fail "torchrun is not found on $(hostname): activate the environment that torch is installed in"

# Threads of each process: torchrun would set 1 and print a warning.
cores="${SLURM_CPUS_PER_TASK:-$(nproc)}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores >= PROCESSES ? cores / PROCESSES : 1))}"
{% if launch.logs %}
# Lines reach the log files when they are printed, not many at once.
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED-1}"
{% endif %}
