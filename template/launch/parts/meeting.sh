# Without this, machines that resolve their own name to 127.0.0.1 or have several networks do not find each other.
if [[ -n $INTERFACE ]]; then
  [[ -e /sys/class/net/$INTERFACE ]] ||
    fail "$(hostname) has no network interface $INTERFACE; it has: $(ls -m /sys/class/net)"
  export NCCL_SOCKET_IFNAME="$INTERFACE" GLOO_SOCKET_IFNAME="$INTERFACE"
fi

# What is wrong here would show much later otherwise, and as a timeout.
address="$(getent ahosts "$MASTER_ADDR" | awk 'NR == 1 { print $1 }' || true)"
[[ -n $address ]] || fail "$(hostname) cannot resolve MASTER_ADDR=$MASTER_ADDR: give the name or address of the first machine"
port_answers() { timeout 2 bash -c ": <'/dev/tcp/$address/$MASTER_PORT'" 2>/dev/null; }
if ((NODE_RANK == 0)); then
  port_answers && fail "port $MASTER_PORT of $MASTER_ADDR is taken by another program: set MASTER_PORT to a free one, the same on all machines"
fi
