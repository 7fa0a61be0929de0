# Without this, machines that resolve their own name to 127.0.0.1 or have several networks do not find each other.
if [[ -n $INTERFACE ]]; then
  [[ -e /sys/class/net/$INTERFACE ]] ||
    fail "$(uname -n) has no network interface $INTERFACE; it has: $(ls -m /sys/class/net)"
  export NCCL_SOCKET_IFNAME="$INTERFACE" GLOO_SOCKET_IFNAME="$INTERFACE"
fi

[[ ${WAIT_S:-45} =~ ^[0-9]+$ ]] || fail "WAIT_S=$WAIT_S: set it to a number of seconds"
# What is wrong here would show minutes later otherwise, and as a timeout.
if [[ ! $MASTER_PORT =~ ^[1-9][0-9]{0,4}$ ]] || ((MASTER_PORT > 65535)); then
  fail "MASTER_PORT=$MASTER_PORT: set it to a number from 1 to 65535"
fi
addresses="$(getent ahosts "$MASTER_ADDR" | awk '!seen[$1]++ { print $1 }' || true)"
[[ -n $addresses ]] ||
  fail "$(uname -n) cannot resolve MASTER_ADDR=$MASTER_ADDR: set it to the name or address of the first machine"
if ((NODE_RANK == 0)); then
  own="$(hostname -I 2>/dev/null || true)"
  if [[ -n $own ]] && ! grep -qE '^(127\.|::1$)' <<<"$addresses" && ! grep -qxF "$addresses" <<<"${own// /$'\n'}"; then
    fail "MASTER_ADDR=$MASTER_ADDR is not $(uname -n), the first machine (NODE_RANK=0), which has the addresses $own"
  fi
  # The system's list of sockets; 0A: somebody listens
  if grep -qs "^ *[0-9]*: [^ ]*:$(printf %04X "$MASTER_PORT") [^ ]* 0A " /proc/net/tcp /proc/net/tcp6; then
    fail "port $MASTER_PORT of $(uname -n) is taken by another program: set MASTER_PORT to a free one, the same on all machines"
  fi
else
  # A firewall may swallow a try: none takes longer than two seconds.
  deadline=$((SECONDS + ${WAIT_S:-45}))
  until timeout 2 bash -c ": </dev/tcp/\$1/\$2" - "$MASTER_ADDR" "$MASTER_PORT" 2>/dev/null; do
    ((SECONDS < deadline)) ||
      fail "$(uname -n) cannot reach port $MASTER_PORT of $MASTER_ADDR: is the first machine (NODE_RANK=0) started, and the port open?"
    sleep 1
  done
fi
