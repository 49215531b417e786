package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"
)

// Sandboxed code of the tests: this very binary, which needs no interpreter. Run it with the name of one of these in helperVariable.
const helperVariable = "SANDBOX_INIT_TEST_HELPER"

var helpers = map[string]func(){"queue": queueSignals, "vfork": forkForEver, "chain": multiply, "fork": forkInnocently}

// queueSignals sends PID 1 every signal as rt_sigqueueinfo(2) can, which a Go program takes for faults of its own.
func queueSignals() {
	for _, code := range []int32{-1, -2, -3, -6, -60} {
		for signal := 1; signal <= 64; signal++ {
			var info [128]byte
			binary.NativeEndian.PutUint32(info[0:], uint32(signal))
			binary.NativeEndian.PutUint32(info[8:], uint32(code))
			for range 20 {
				_, _, _ = syscall.RawSyscall(syscall.SYS_RT_SIGQUEUEINFO, 1, uintptr(signal), uintptr(unsafe.Pointer(&info)))
			}
		}
	}
}

// forkForEver starts programs with vfork(2), as Go, Python and posix_spawn do.
func forkForEver() {
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); {
		pid, err := syscall.ForkExec("/bin/true", []string{"true"}, nil)
		if err == nil {
			_, _ = syscall.Wait4(pid, nil, 0, nil)
		}
	}
}

func fork() (pid int) {
	r, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 {
		return -1
	}
	return int(r)
}

// multiply starts new sessions all the time; each process dies after a while, so there are some dozens of them at any time and never more.
func multiply() {
	var now, end syscall.Timespec
	_ = clock(&end)
	end.Sec += 8
	pause := syscall.Timespec{Nsec: 2e6}
	for _ = clock(&now); now.Sec < end.Sec; _ = clock(&now) {
		if fork() != 0 {
			// The parent lingers a little, so that there are two dozens of links of the chain.
			lingers := syscall.Timespec{Nsec: 50e6}
			_, _, _ = syscall.RawSyscall(syscall.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&lingers)), 0, 0)
			break
		}
		_, _, _ = syscall.RawSyscall(syscall.SYS_SETSID, 0, 0, 0)
		_, _, _ = syscall.RawSyscall(syscall.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&pause)), 0, 0)
	}
	syscall.RawSyscall(syscall.SYS_EXIT_GROUP, 0, 0, 0)
}

func clock(t *syscall.Timespec) syscall.Errno {
	_, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, 1, uintptr(unsafe.Pointer(t)), 0)
	return errno
}

// forkInnocently has no part in what is killed beside it: no child of its may be left stopped.
func forkInnocently() {
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); {
		pid := fork()
		if pid == 0 {
			syscall.RawSyscall(syscall.SYS_EXIT_GROUP, 0, 0, 0)
		}
		for begun := time.Now(); pid > 0; time.Sleep(time.Millisecond) {
			if got, _ := syscall.Wait4(pid, nil, syscall.WNOHANG, nil); got == pid {
				break
			}
			if time.Since(begun) > 5*time.Second {
				fmt.Println("stuck")
				os.Exit(9)
			}
		}
	}
}

func helper(what string, more fields) fields {
	body := fields{"argv": []string{os.Args[0]}, "env": fields{helperVariable: what, "GOMAXPROCS": "1"}}
	for name, value := range more {
		body[name] = value
	}
	return body
}

func TestQueuedFaultSignalsAreDropped(t *testing.T) {
	s := start(t)
	_, before := s.call("GET", "/health", nil)
	if code, _, _, stderr := s.run(helper("queue", nil)); code != 0 {
		t.Fatalf("got %d %q", code, stderr)
	}
	if _, after := s.call("GET", "/health", nil); before["boot_id"] != after["boot_id"] {
		t.Fatalf("%v, then %v", before, after)
	}
}

func TestAnArchiveBesideProgramsThatVforkNeverFails(t *testing.T) {
	s := start(t)
	var ids []string
	for range 3 {
		ids = append(ids, s.begin(helper("vfork", nil)))
	}
	for range 40 {
		request, _ := http.NewRequest("POST", "http://sandbox/v1/archive", strings.NewReader("{}"))
		answer, err := s.client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(answer.Body)
		_ = answer.Body.Close()
		if err != nil || answer.StatusCode != http.StatusOK || !bytes.Contains(data, []byte(".sandbox-init/index.json")) {
			t.Fatalf("got %d %.300q %v", answer.StatusCode, data, err)
		}
	}
	for _, id := range ids {
		s.call("POST", "/processes/"+id+"/kill", fields{})
	}
}

func TestAFrameIsNeverLongerThanItMayBe(t *testing.T) {
	s := start(t)
	id := s.begin(fields{"argv": []string{strings.Repeat("n", 131000)}})
	if exit := s.ended(id); exit["code"].(float64) != 127 {
		t.Fatalf("got %v", exit)
	}
	for _, f := range s.frames(id, 0) {
		if len(f.data) > 64<<10 {
			t.Errorf("a frame of kind %d has %d bytes", f.kind, len(f.data))
		}
	}
}

func TestAMissingInterpreterIsNamed(t *testing.T) {
	s := start(t)
	for name, first := range map[string]string{"outer": "#!" + filepath.Join(s.workspace, "inner"), "inner": "#!/no/such/interpreter -x"} {
		if err := os.WriteFile(filepath.Join(s.workspace, name), []byte(first+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"./inner", "./outer"} {
		if code, _, _, stderr := s.run(fields{"argv": []string{name}}); code != 127 || !strings.Contains(stderr, "/no/such/interpreter ") {
			t.Errorf("%s: got %d %q", name, code, stderr)
		}
	}
}

func TestNothingOfATerminalIsLostAtTheEnd(t *testing.T) {
	s := start(t)
	for range 60 {
		id := s.begin(fields{"argv": []string{"seq", "1", "300"}, "pty": fields{"rows": 24, "cols": 80}})
		s.ended(id)
		if out := joined(s.frames(id, 0), 1); !strings.HasSuffix(out, "\r\n300\r\n") {
			t.Fatalf("it ends with %q", out[max(0, len(out)-20):])
		}
	}
}

func TestAKillOfAChainOfSessionsIsWholeAndLeavesABystanderAlone(t *testing.T) {
	s := start(t)
	innocent := s.begin(helper("fork", nil))
	chain := s.begin(helper("chain", nil))
	s.ended(chain) // its first process ends at once; the others go on
	time.Sleep(300 * time.Millisecond)
	s.call("POST", "/processes/"+chain+"/kill", fields{})
	if exit := s.ended(innocent); exit["code"].(float64) != 0 {
		t.Fatalf("the bystander ended with %v: %q", exit, joined(s.frames(innocent, 0), 1))
	}
	_, _, stdout, _ := s.run(fields{"command": "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -c " + chain})
	if strings.TrimSpace(stdout) != "0" {
		t.Fatalf("%s processes of it are left", strings.TrimSpace(stdout))
	}
}

func TestUnknownKeysOfAStartAreRefused(t *testing.T) {
	s := start(t)
	if status, answer := s.call("PUT", "/processes/"+s.id(), fields{"command": "true", "nice": 3}); status != http.StatusBadRequest {
		t.Fatalf("got %d %v", status, answer)
	}
}
