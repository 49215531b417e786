"""Snapshot, rollback and fork keep the tree to the bit (B10, B11), end every process, and empty everything else that is writable."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.client import Api, expect, refused
from tests.support.forgery import plain, stored_files
from tests.support.lifecycle import strays
from tests.support.server import Facade
from tests.support.waiting import eventually

TREE = r"""
set -e
mkdir -p empty empty2/nested dir shut
echo one > dir/file
ln -s dir/file link; ln -s dir dlink; ln -s nowhere gone
printf '#!/bin/sh\necho ran\n' > script; chmod 755 script
echo secret > private; chmod 600 private
: > zero; echo dot > .hidden
echo kept > shut/kept; chmod 500 shut
"""
LOOK = (
    "find . -printf '%P|%y|%m|%l|%U:%G\\n' | grep -v '^|' | LC_ALL=C sort; "
    "find . -type f -printf '%P|%s\\n' | LC_ALL=C sort; find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum"
)
WIPE = "chmod -R u+w .; find . -mindepth 1 -delete; ls -A"


def look(api: Api, sandbox: str) -> str:
    return api.sh(sandbox, LOOK)


def wipe(api: Api, sandbox: str) -> None:
    assert api.sh(sandbox, WIPE) == ""


@pytest.mark.needs("processes")
@pytest.mark.behaviour("STATE-001", "B10")
def test_a_restore_is_the_same_tree_every_time(api: Api, box: str) -> None:
    api.sh(box, TREE)
    tree1 = look(api, box)
    assert "1000:1000" in tree1 and "0:0" not in tree1
    first = api.snap(box)["id"]
    wipe(api, box)
    api.rollback(box, first)
    assert look(api, box) == tree1
    api.sh(box, "echo two >> dir/file; echo n > new")
    tree2 = look(api, box)
    second = api.snap(box)["id"]
    assert tree2 != tree1
    for _ in range(5):
        wipe(api, box)
        api.rollback(box, second)
        assert look(api, box) == tree2
        api.rollback(box, first)
        assert look(api, box) == tree1
    assert look(api, api.fork(first)["id"]) == tree1
    assert look(api, api.fork(second)["id"]) == tree2


@pytest.mark.needs("processes")
@pytest.mark.behaviour("STATE-002")
def test_hard_links_sparse_files_times_and_attributes_survive(api: Api, box: str) -> None:
    script = """
import os
open("a","w").write("linked"); os.mkdir("d"); os.link("a","d/b"); os.link("a","c")
f=open("sparse","wb"); f.seek(300*1024*1024); f.write(b"end"); f.seek(100*1024*1024); f.write(b"middle"); f.close()
open("tail","wb").truncate(50_000_000)
os.utime("a", ns=(1_000_000_000_123_456_789, 1_111_111_111_987_654_321))
os.utime("d", ns=(5, 1_222_222_222_000_000_001))
try: os.setxattr("a","user.note",bytes(range(256)))
except OSError: pass
"""
    facts = """
import os,hashlib
s=os.stat
print([s(n).st_ino==s("a").st_ino for n in ("c","d/b")], s("a").st_nlink, s("a").st_mtime_ns, s("d").st_mtime_ns)
for n in ("sparse","tail"): print(n, s(n).st_size, s(n).st_blocks*512 < 1_000_000, hashlib.sha256(open(n,"rb").read()).hexdigest())
print([os.getxattr("a",x).hex() for x in os.listxattr("a")])
"""
    api.sh(box, ["python3", "-c", script])
    before = api.sh(box, ["python3", "-c", facts])
    assert "[True, True] 3" in before and "True" in before
    row = api.snap(box)
    assert row["size_bytes"] < 5_000_000
    wipe(api, box)
    api.rollback(box, row["id"])
    assert api.sh(box, ["python3", "-c", facts]) == before
    assert api.sh(api.fork(row["id"])["id"], ["python3", "-c", facts]) == before


@pytest.mark.needs("processes")
@pytest.mark.behaviour("STATE-003")
def test_sockets_and_pipes_are_left_out_of_a_snapshot(api: Api, box: str) -> None:
    api.sh(box, "mkfifo pipe; python3 -c 'import socket;socket.socket(socket.AF_UNIX).bind(\"sock\")'; echo x > f")
    snapshot = api.snap(box)["id"]
    assert api.names(box) == ["f", "pipe", "sock"]
    api.rollback(box, snapshot)
    assert api.names(box) == ["f"]


@pytest.mark.needs("processes")
@pytest.mark.behaviour("STATE-004")
def test_rollback_ends_every_process(api: Api, box: str) -> None:
    snapshot = api.snap(box)["id"]
    api.sh(
        box,
        "for i in 1 2 3; do setsid sleep 306 >/dev/null 2>&1 & done; (trap '' TERM HUP; sleep 306) >/dev/null 2>&1 & kill -STOP $!",
    )
    assert len([line for line in strays(api, box) if "sleep 306" in line]) >= 4
    api.rollback(box, snapshot)
    assert strays(api, box) == []
    assert api.sh(box, "echo works") == "works\n"


@pytest.mark.needs("processes")
@pytest.mark.behaviour("STATE-005")
def test_rollback_covers_every_writable_mount(api: Api, box: str) -> None:
    """Every place where the user can write is found by looking, so that a new mount cannot be forgotten."""
    find = "for m in $(cut -d' ' -f2 /proc/mounts); do if [ -d $m ] && (: > $m/mark) 2>/dev/null; then echo $m; fi; done"
    snapshot = api.snap(box)["id"]
    places = api.sh(box, find).split()
    assert {"/workspace", "/tmp"} <= set(places)
    api.rollback(box, snapshot)
    left = api.sh(box, "for m in " + " ".join(places) + "; do ls -A $m; done; true")
    assert left == "", f"left after a rollback in {places}: {left}"


@pytest.mark.needs("processes")
@pytest.mark.behaviour("STATE-006")
def test_rollback_empties_ipc_objects(api: Api, box: str) -> None:
    make = """
import ctypes,os
c=ctypes.CDLL(None,use_errno=True)
for call in ("shmget","msgget","semget"):
    a={"shmget":(77,4096,0o1666),"msgget":(77,0o1666),"semget":(77,1,0o1666)}[call]
    assert getattr(c,call)(*a)>=0,(call,os.strerror(ctypes.get_errno()))
from multiprocessing import shared_memory
open("/dev/shm/kept","w").write("x")
"""
    count = "for f in shm msg sem; do tail -n +2 /proc/sysvipc/$f; done | wc -l; ls -A /dev/shm /dev/mqueue 2>/dev/null | grep -vc ':$' || true"
    snapshot = api.snap(box)["id"]
    clean = api.sh(box, count)
    api.sh(box, ["python3", "-c", make])
    assert api.sh(box, count).split()[0] == "3"
    api.rollback(box, snapshot)
    assert api.sh(box, count) == clean


@pytest.mark.needs("processes")
@pytest.mark.behaviour("STATE-007")
def test_with_a_writable_root_rollback_replaces_the_root_too(api: Api) -> None:
    sandbox = api.new(read_only_rootfs=False)["id"]
    probe = "for d in / /etc /usr /var /root /opt /home /var/tmp /run; do ([ -w $d ] && echo mark > $d/mark && echo $d) 2>/dev/null; done; true"
    snapshot = api.snap(sandbox)["id"]
    places = api.sh(sandbox, probe).split()
    assert "/var/tmp" in places
    api.rollback(sandbox, snapshot)
    assert api.sh(sandbox, "ls " + " ".join(f"{place.rstrip('/')}/mark" for place in places) + " 2>/dev/null; true") == ""
    assert api.sandbox(sandbox)["read_only_rootfs"] is False


WRITERS = r"""
import os,sys,threading,time
n=[0]
def guard(f):
    def run():
        try:
            while True: f()
        except BaseException as e: open('/tmp/errors','a').write(repr(e)+'\n')
    threading.Thread(target=run).start()
log=open('log.txt','ab',buffering=0)
def append(): log.write(b'%08d'%n[0]+b'x'*2039+b'\n'); n[0]+=1; time.sleep(0.002)
k=[0]
def pair():
    k[0]+=1
    with open('a','w') as f: f.write(str(k[0]))
    with open('b','w') as f: f.write(str(k[0]))
    time.sleep(0.0005)
os.makedirs('small',exist_ok=True)
r=[0]
def churn():
    r[0]+=1
    for i in range(200):
        with open(f'small/t{i}','w') as f: f.write('full content of a file\n')
        os.rename(f'small/t{i}',f'small/f{i}')
    for i in range(200): os.unlink(f'small/f{i}')
guard(append); guard(pair); guard(churn)
"""
CHECK = r"""
import os
log=open('log.txt','rb').read()
whole=log[:len(log)//2048*2048]
assert all(int(whole[i:i+8])==i//2048 for i in range(0,len(whole),2048)), 'log.txt is no prefix'
a,b=open('a').read(),open('b').read()
s=os.listdir('small')
assert not [i for i in range(200) if f't{i}' in s and f'f{i}' in s], 'half of a rename'
print(len(log),a or 'empty',b or 'empty')
"""


@pytest.mark.needs("processes")
@pytest.mark.behaviour("STATE-008", "B11")
@pytest.mark.slow
def test_a_snapshot_of_a_busy_workspace_is_one_point_in_time(api: Api) -> None:
    sandbox = api.new(pids_limit=128)["id"]
    api.write(sandbox, "writers.py", WRITERS)
    api.sh(sandbox, "printf 0 > a; printf 0 > b; nohup python3 writers.py >/dev/null 2>&1 &")
    eventually(lambda: api.get(sandbox, "log.txt").status_code == 200 and len(api.read(sandbox, "log.txt")) > 10_000, why="the writers write")
    snapshots = []
    for _ in range(20):
        answer = api.take(sandbox)
        if answer.status_code == 409:
            refused(answer, 409)
        else:
            snapshots.append(expect(answer, 201)["id"])
    assert len(snapshots) >= 15
    assert [row["id"] for row in api.snapshots(sandbox)] == snapshots

    def check(snapshot: str) -> list[str]:
        fork = api.fork(snapshot)["id"]
        shown = api.sh(fork, ["python3", "-c", CHECK]).split()
        api.delete(fork)
        return shown

    with ThreadPoolExecutor(4) as pool:
        checked = list(pool.map(check, snapshots))
    sizes, pairs = [int(size) for size, *_ in checked], [pair for _, *pair in checked]
    assert sizes == sorted(sizes)
    # A point in time: the writer writes a, then b. "empty" is the instant between open and write, in which a writer may be frozen.
    assert all("empty" in pair or int(pair[0]) - int(pair[1]) in (0, 1) for pair in pairs), pairs
    assert ["empty", "empty"] not in pairs
    length = int(api.sh(sandbox, "stat -c %s log.txt"))
    eventually(lambda: int(api.sh(sandbox, "stat -c %s log.txt")) > length, why="the writers go on after the snapshots")
    assert api.sh(sandbox, "cat /tmp/errors 2>/dev/null; true") == ""


@pytest.mark.needs("processes")
@pytest.mark.behaviour("STATE-009")
def test_what_was_stopped_before_a_snapshot_stays_stopped_and_the_rest_goes_on(api: Api, box: str) -> None:
    api.sh(box, "sleep 307 >/dev/null 2>&1 & echo $! > stopped; kill -STOP $!; sleep 308 >/dev/null 2>&1 & echo $! > going")
    api.snap(box)
    state = "for f in stopped going; do awk '/^State/{print $2}' /proc/$(cat $f)/status; done"
    assert api.sh(box, state).split() == ["T", "S"]


@pytest.mark.needs("processes")
@pytest.mark.behaviour("STATE-010")
def test_a_running_command_survives_a_snapshot_with_its_output(api: Api, box: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(api.stream, box, "for i in $(seq 1 100); do echo $i; sleep 0.02; done", timeout_seconds=60)
        for _ in range(3):
            api.snap(box)
        stream = running.result(60)
    assert stream.text("stdout") == "".join(f"{n}\n" for n in range(1, 101)) and stream.finished["exit_code"] == 0


MANY_FILES = "import os\nfor d in range(100):\n  os.mkdir(f'd{d}')\n  for n in range(100): open(f'd{d}/{n}','w').write('x'*500)"


@pytest.mark.needs("processes")
@pytest.mark.behaviour("STATE-011")
def test_calls_during_a_rollback_are_409_and_the_sandbox_is_listed(api: Api, box: str) -> None:
    api.sh(box, ["python3", "-c", MANY_FILES])
    snapshot = api.snap(box)["id"]
    seen: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        rolling = pool.submit(api.rollback, box, snapshot)
        while not rolling.done():
            for answer in (api.exec(box, "true"), api.get(box, "d1/1"), api.put(box, "d1/1", b"x" * 500), api.take(box)):
                seen.append(answer.status_code)
                if answer.status_code == 409:
                    refused(answer, 409)
            assert api.sandbox(box)["id"] == box and box in [row["id"] for row in api.sandboxes()]
        rolling.result(60)
    assert 409 in seen, "the rollback was too quick to be seen"
    assert set(seen) <= {200, 201, 409}, seen
    assert api.run(box, "ls | wc -l")["stdout"].strip() == "100"


@pytest.mark.needs("processes")
@pytest.mark.behaviour("STATE-012")
def test_a_command_that_a_rollback_ends_is_never_a_success(api: Api, box: str) -> None:
    snapshot = api.snap(box)["id"]
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(api.exec, box, "echo begun > /workspace/begun; sleep 309; echo done", timeout_seconds=600)
        streaming = pool.submit(api.stream, box, "sleep 309; echo done", timeout_seconds=600)
        eventually(lambda: len([line for line in strays(api, box) if line == "sleep 309"]) == 2, why="both commands run")
        api.rollback(box, snapshot)
        answer, stream = running.result(60), streaming.result(60)
    if answer.status_code == 200:
        assert answer.json()["exit_code"] != 0, "a killed command must not look like a success"
    else:
        assert answer.status_code in (409, 502)
        refused(answer, answer.status_code)
    assert stream.exit is None or stream.exit["exit_code"] != 0
    assert api.names(box) == []


@pytest.mark.needs("processes")
@pytest.mark.behaviour("STATE-013")
def test_delete_wins_over_a_rollback_and_a_snapshot(api: Api) -> None:
    sandbox = api.new()["id"]
    api.sh(sandbox, ["python3", "-c", MANY_FILES])
    snapshot = api.snap(sandbox)["id"]
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(api.roll, sandbox, snapshot), pool.submit(api.take, sandbox)]
        eventually(
            lambda: api.exec(sandbox, "true").status_code == 409 or any(other.done() for other in others),
            every=0.005,
            why="work is under way",
        )
        expect(api.call("DELETE", f"/sandboxes/{sandbox}", timeout=15), 204)
        for other in others:
            assert other.result(60).status_code in (200, 201, 404, 409, 502)
    refused(api.call("GET", f"/sandboxes/{sandbox}"), 404)
    assert len(api.names(api.fork(snapshot)["id"])) == 100


@pytest.mark.behaviour("STATE-014", "B10")
def test_a_snapshot_after_a_fork_holds_the_newest_state(api: Api, box: str) -> None:
    for number in range(4):
        api.write(box, "n", str(number))
        fork = api.fork(api.snap(box)["id"])["id"]
        assert api.read(fork, "n") == str(number).encode()
        api.write(fork, "n", f"{number}+")
        again = api.fork(api.snap(fork)["id"])["id"]
        assert api.read(again, "n") == f"{number}+".encode()


@pytest.mark.behaviour("STATE-015")
def test_a_snapshots_files_hold_no_env_value_and_yet_a_fork_has_it(api: Api, facade: Facade) -> None:
    sandbox = api.new(env={"TOKEN": "s3cr3t-SNAP-0001"})["id"]
    snapshot = api.snap(sandbox)["id"]
    blob, record = stored_files(facade.data, snapshot)
    assert b"s3cr3t-SNAP-0001" not in plain(blob.read_bytes()) and b"s3cr3t-SNAP-0001" not in record.read_bytes()
    assert b"TOKEN" in record.read_bytes()
    assert api.sh(api.fork(snapshot)["id"], "echo $TOKEN") == "s3cr3t-SNAP-0001\n"
