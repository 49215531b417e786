"""Sandboxed code against its own init: it cannot end it, use its socket, replace it, trace it, or make it lie."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.client import Api, StreamRefused
from tests.support.lifecycle import assert_no_strays, strays
from tests.support.server import Facade, health_latency
from tests.support.waiting import eventually

pytestmark = pytest.mark.needs("kernel")

SIGNALS = """
import os,signal
for n in range(1,65):
    try: os.kill(1,n)
    except OSError as e: print(n,e)
for i in range(1000):
    os.kill(1,(1,2,3,6,10,12,13,14,15,17,28,34,64)[i%13])
print('sent')
"""
CALL = """
import socket,sys
names=[l.split()[-1] for l in open('/proc/net/unix') if '@' in l]
print('seen', '@sandbox-init' in names)
s=socket.socket(socket.AF_UNIX); s.settimeout(3)
try:
    s.connect('\\0sandbox-init')
    s.sendall(b'GET /v1/health HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')
    print('answer', s.recv(100))
except OSError as e: print('error', type(e).__name__)
"""
BIND = """
import socket
s=socket.socket(socket.AF_UNIX)
try: s.bind('\\0sandbox-init'); print('bound')
except OSError as e: print('refused', e.errno)
"""
TRACE = """
import ctypes,os,glob
c=ctypes.CDLL(None,use_errno=True)
c.ptrace.restype=ctypes.c_long
def attempt(pid):
    out=[]
    out.append(c.ptrace(16,pid,0,0)==0)                     # PTRACE_ATTACH
    out.append(c.ptrace(0x4206,pid,0,0)==0)                 # PTRACE_SEIZE
    for name in ('mem','environ','maps','auxv','syscall','stack'):
        try: open(f'/proc/{pid}/{name}','rb').read(1); out.append(name)
        except OSError: out.append(False)
    for name in ('fd','cwd','root','exe'):
        try: os.readlink(f'/proc/{pid}/{name}') if name!='fd' else os.listdir(f'/proc/{pid}/fd'); out.append(name)
        except OSError: out.append(False)
    try: os.open(f'/proc/{pid}/mem',os.O_RDWR); out.append('rw')
    except OSError: out.append(False)
    return any(out), out
def bridges():
    found=[]
    for p in glob.glob('/proc/[0-9]*'):
        try:
            outside=open(p+'/stat').read().rsplit(')',1)[1].split()[1]=='0'
            if outside and b'connect' in open(p+'/cmdline','rb').read(): found.append(int(p[6:]))
        except OSError: pass
    return found
b=bridges()
print(attempt(1)); print(len(b)>0)
for pid in b: print(attempt(pid))
pidfd=os.pidfd_open(1)
print(c.syscall(438,pidfd,3,0))                             # pidfd_getfd of init
print(c.syscall(310,1,0,0,0,0,0)>0)                         # process_vm_readv
"""
KILL_BRIDGES = """
import glob,os,signal,sys,time
end=time.monotonic()+float(sys.argv[1]); n=0
while time.monotonic()<end:
    for p in glob.glob('/proc/[0-9]*'):
        try:
            if b'connect' in open(p+'/cmdline','rb').read().split(b'\\0'):
                os.kill(int(p[6:]),int(sys.argv[2])); n+=1
        except (OSError,ValueError): pass
    time.sleep(0.02)
open('/workspace/killed','a').write(f'{n}\\n')
"""
BRIDGE = r"""
for f in /proc/1/exe "$(tr '\0' '\n' < /proc/1/cmdline | head -1)"; do
  printf 'GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n' | timeout 3 "$f" connect 2>/dev/null
done
"""
BOMB = "import os,time\nwhile True:\n  try: os.fork()\n  except OSError: time.sleep(0.001)\n"


@pytest.mark.behaviour("TRAP-001")
def test_no_signal_from_inside_ends_init(api: Api, box: str) -> None:
    api.write(box, "s.py", SIGNALS)
    boot = api.sh(box, "cut -d' ' -f22 /proc/1/stat")
    for _ in range(2):
        assert api.sh(box, ["python3", "s.py"]).endswith("sent\n")
    with ThreadPoolExecutor(8) as pool:
        for result in pool.map(lambda _: api.run(box, ["python3", "s.py"]), range(8)):
            assert result["exit_code"] == 0
    assert api.sh(box, "cut -d' ' -f22 /proc/1/stat") == boot
    row = api.sandbox(box)
    assert row["status"] == "running" and row.get("incarnation", 1) == 1
    assert api.run(box, "kill -9 1; kill -STOP 1; echo alive")["stdout"] == "alive\n"
    assert api.sh(box, "echo works") == "works\n"


@pytest.mark.behaviour("TRAP-002")
def test_the_sandboxed_code_cannot_use_the_socket(api: Api, room: str) -> None:
    seen, answer = api.sh(room, ["python3", "-c", CALL]).splitlines()
    assert seen == "seen True"
    assert answer in ("answer b''", "error ConnectionResetError", "error BrokenPipeError"), answer


@pytest.mark.behaviour("TRAP-003")
def test_the_sandboxed_code_cannot_bridge_to_the_socket(api: Api, room: str) -> None:
    """`connect`, found through /proc/1/exe or its path, is refused to a child of sandboxed code, also to an orphan."""
    api.write(room, "bridge.sh", BRIDGE)
    assert "boot_id" not in api.run(room, "sh bridge.sh; setsid sh bridge.sh; true")["stdout"]
    api.sh(room, "(setsid sh -c 'sleep 0.3; sh bridge.sh > out; echo end >> out' >/dev/null 2>&1 &)")
    eventually(lambda: api.get(room, "out").status_code == 200 and api.read(room, "out").endswith(b"end\n"), why="the orphan tried")
    assert b"boot_id" not in api.read(room, "out")


@pytest.mark.behaviour("TRAP-004")
def test_the_sandboxed_code_cannot_take_the_sockets_name(api: Api, room: str) -> None:
    assert api.sh(room, ["python3", "-c", BIND]).startswith("refused")


@pytest.mark.behaviour("TRAP-005")
def test_the_sandboxed_code_cannot_trace_init_or_a_bridge(api: Api, box: str) -> None:
    with api.streaming(box, "echo up; sleep 312", timeout_seconds=60) as answer:
        next(answer.iter_lines())
        shown = api.sh(box, ["python3", "-c", TRACE]).splitlines()
    attempts = [line for line in shown if line.startswith("(")]
    assert len(attempts) >= 2 and "True" in shown, shown
    assert all(line.startswith("(False,") for line in attempts), shown
    assert shown[-2:] == ["-1", "False"], shown


@pytest.mark.behaviour("TRAP-006")
def test_the_guest_binary_cannot_be_replaced(api: Api) -> None:
    sandbox = api.new(read_only_rootfs=False)["id"]
    path = api.sh(sandbox, "tr '\\0' '\\n' < /proc/1/cmdline | head -1").strip()
    folder = path.rsplit("/", 1)[0]
    attacks = (f": > {path}", f"rm -f {path}", f"mv {folder} /tmp/x", f"chmod 777 {path}", f"cp /bin/sh {folder}/x", ": > /proc/1/exe")
    for attack in attacks:
        assert api.run(sandbox, attack)["exit_code"] != 0, attack


@pytest.mark.behaviour("TRAP-007")
@pytest.mark.parametrize("number", [9, 19])
def test_a_killed_or_stopped_bridge_never_makes_a_wrong_result(api: Api, number: int) -> None:
    sandbox = api.new()["id"]
    api.write(sandbox, "k.py", KILL_BRIDGES)
    api.run(sandbox, f"nohup setsid python3 k.py 6 {number} >/dev/null 2>&1 &")
    end = time.monotonic() + 6
    right, errors = 0, 0
    numbers = "".join(f"{n}\n" for n in range(1, 20_001))

    def one(worker: int) -> None:
        nonlocal right, errors
        count = 0
        while time.monotonic() < end:
            count += 1
            text = f"{worker}-{count}"
            if count % 2:
                answer = api.exec(sandbox, f"echo {text}; seq 1 20000; exit 7", timeout_seconds=20)
                if answer.status_code == 200:
                    body = answer.json()
                    assert body["exit_code"] == 7 and body["stdout"] == f"{text}\n{numbers}"
                    right += 1
                else:
                    assert answer.status_code in (409, 502, 503), answer.text
                    errors += 1
            else:
                try:
                    stream = api.stream(sandbox, f"echo {text}; seq 1 20000; exit 7", timeout_seconds=20)
                except StreamRefused as refusal:
                    if refusal.status not in (409, 502, 503):
                        raise
                    errors += 1
                    continue
                if stream.exit is not None:
                    assert stream.exit["exit_code"] == 7 and stream.text("stdout") == f"{text}\n{numbers}"
                    right += 1
                else:
                    errors += 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(4)))
    eventually(lambda: api.get(sandbox, "killed").status_code == 200, within=30, why="the attacker ended")
    assert int(api.read(sandbox, "killed")) > 0, "no bridge was ever hit: the test proves nothing"
    eventually(lambda: api.run(sandbox, "echo fine")["stdout"] == "fine\n", within=30, why="exec works again")
    assert right + errors > 0


@pytest.mark.behaviour("TRAP-008")
def test_a_fork_bomb_leaves_exec_kill_reads_and_timeouts_working(api: Api) -> None:
    sandbox = api.new(pids_limit=64)["id"]
    api.write(sandbox, "f", b"readable")
    with ThreadPoolExecutor(1) as pool:
        bomb = pool.submit(api.run, sandbox, ["python3", "-c", BOMB], timeout_seconds=8)
        eventually(lambda: api.run(sandbox, ["true"], timeout_seconds=5)["exit_code"] == 126, within=5, why="the bomb has filled the process limit")
        begun = time.monotonic()
        assert api.read(sandbox, "f") == b"readable"
        assert api.names(sandbox) == ["f"]
        result = api.run(sandbox, ["true"], timeout_seconds=5)
        assert result["exit_code"] in (0, 126)
        assert time.monotonic() - begun < 5
        result = bomb.result(30)
    assert result["timed_out"] is True and result["duration_ms"] < 13_000
    assert_no_strays(api, sandbox, within=5)
    assert api.sh(sandbox, "echo works") == "works\n"


@pytest.mark.behaviour("TRAP-009")
def test_a_fork_bomb_left_in_the_background_ends_with_a_rollback_or_delete(api: Api) -> None:
    sandbox = api.new(pids_limit=64)["id"]
    snapshot = api.snap(sandbox)["id"]
    api.write(sandbox, "bomb.py", BOMB)
    api.run(sandbox, "setsid python3 bomb.py >/dev/null 2>&1 &")
    eventually(lambda: api.run(sandbox, ["true"])["exit_code"] == 126, within=5, why="the bomb has filled the process limit")
    api.rollback(sandbox, snapshot)
    assert strays(api, sandbox) == [] and api.sh(sandbox, "echo works") == "works\n"
    api.write(sandbox, "bomb.py", BOMB)
    api.run(sandbox, "setsid python3 bomb.py >/dev/null 2>&1 &")
    begun = time.monotonic()
    api.delete(sandbox)
    assert time.monotonic() - begun < 15


@pytest.mark.behaviour("TRAP-010")
def test_hanging_commands_do_not_delay_health(api: Api, facade: Facade) -> None:
    boxes = [api.new(pids_limit=64)["id"] for _ in range(4)]
    with ThreadPoolExecutor(64) as pool:
        running = [pool.submit(api.run, boxes[n % 4], "sleep 4; echo ok", timeout_seconds=60) for n in range(64)]
        eventually(
            lambda: sum(len([x for x in strays(api, box) if x.startswith("sleep 4")]) for box in boxes) >= 48,
            within=4,
            every=0.1,
            why="the commands hang",
        )
        latencies = [health_latency(facade.url) for _ in range(20)]
        assert sorted(latencies)[16] < 0.5 and max(latencies) < 3, latencies
        assert all(future.result()["stdout"] == "ok\n" for future in running)


@pytest.mark.behaviour("TRAP-011")
def test_sixty_four_sandboxes_with_a_hanging_channel_do_not_delay_health(api: Api, facade: Facade) -> None:
    """A stopped bridge is a channel that hangs: bytes go in, none come out."""
    boxes = [api.new(memory_mb=16, pids_limit=8)["id"] for _ in range(8)]
    stop = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline 2>/dev/null | grep -q 'connect' && kill -STOP ${p#/proc/}; done; true"
    with ThreadPoolExecutor(64) as pool:
        for box in boxes:
            pool.submit(
                api.call,
                "POST",
                f"/sandboxes/{box}/exec",
                json={"command": f'setsid sh -c "sleep 0.2; {stop}" >/dev/null 2>&1 &'},
                timeout=5,
            )
        running = [pool.submit(api.exec, box, "sleep 3", timeout_seconds=5) for box in boxes for _ in range(7)]
        latencies = [health_latency(facade.url) for _ in range(30)]
        assert sorted(latencies)[24] < 0.5 and max(latencies) < 3, latencies
        begun = time.monotonic()
        for box in boxes:
            api.delete(box)
        assert time.monotonic() - begun < 60
        for future in running:
            answer = future.result()
            assert answer.status_code in (200, 404, 409, 502, 503), answer.text
            assert answer.status_code != 200 or answer.json()["exit_code"] in (0, 2, 126, 137, 143) or answer.json()["timed_out"]


@pytest.mark.behaviour("TRAP-012")
def test_one_sandbox_sees_nothing_of_another(api: Api) -> None:
    one, two = api.new()["id"], api.new(env={"SECRET": "s3cr3t-OTHER"})["id"]
    api.sh(two, "echo mine > /workspace/f; echo mine > /tmp/f; setsid sleep 313 >/dev/null 2>&1 & sleep 0.1")
    assert api.sh(one, "ls -A /workspace /tmp | grep -v :; true").split() == []
    assert strays(api, one) == []
