fail() {
  echo "error: $1" >&2
  exit 1
}

# Bash is the first process of the container: it would ignore SIGTERM, and be killed much later.
trap 'exit 143' TERM

command -v torchrun >/dev/null ||
  fail "torchrun is not found in the image: install torch in it, or activate its environment"

# Pods start in any order, and DNS learns of a new one late: it may still know the pod before this one.
# Node 0 waits until its name means itself, the others until it answers.
ready() {
  if ((node == 0)); then
    getent ahosts "$address" | grep -qwF "$POD_IP"
  else
    timeout 5 bash -c ": <'/dev/tcp/$address/$port'"
  fi
}
SECONDS=0
until ready &>/dev/null; do
  if ((SECONDS >= WAIT_S)); then
    waited="$SECONDS s (WAIT_S=$WAIT_S)"
    getent ahosts "$address" >/dev/null ||
      fail "$address, the name of node 0, does not resolve after $waited: is its pod running? kubectl get pods"
    ((node > 0)) || fail "$address resolves, but not to this pod, $POD_IP, after $waited: is the Service its own?"
    fail "node 0 does not answer at $address:$port after $waited: see its log, and the NetworkPolicies"
  fi
  sleep 1
done
